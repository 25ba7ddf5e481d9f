"""Tiles that a mask hides whole are not read: with NaN in what is hidden, results are those without it, to the bit."""

import os

import pytest
import torch
from attention_cases import BF16, FP32, PLANS, assert_attention, qkv, tensors
from products import pairwise

import fused_softmax
from fused_softmax.ops.attention import call as attention_call
from fused_softmax.ops.attention import special as attention_decode
from fused_softmax.ops.attention.plan.tiles import DecodePlan, Tiles

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="without a GPU or the interpreter, torch computes"
)
SIDE = 16  # of a tile
N_QUERIES, N_KEYS = 40, 72  # a multiple of 8, as masks of queries need
NAN, HIDES = float("nan"), -float("inf")


@pytest.fixture(params=["square", "oblong"], autouse=True)
def tiles(request, monkeypatch):
    monkeypatch.setattr(attention_call, "plan_attention", lambda *_: PLANS[request.param])


def padding():
    """[batch, 1, 1, keys]: the second batch has 32 keys, and the third none."""
    lengths = torch.tensor([N_KEYS, 32, 0])
    return (torch.arange(N_KEYS) < lengths[:, None])[:, None, None]


def documents():
    """[queries, keys]: what belongs to one document sees itself."""
    of_queries, of_keys = torch.arange(N_QUERIES) // 32, torch.arange(N_KEYS) // 32
    return of_queries[:, None] == of_keys


def scattered():
    """[1, heads, queries, keys]: in every second tile the 14th query of 16 sees the 4th key, and no others do."""
    keep = torch.zeros(2, N_QUERIES, N_KEYS, dtype=torch.bool)
    keep[0, 13::32, 3::32] = True
    keep[1, 13::32, 35::32] = True
    return keep[None]


MASKS = {"padding": padding, "documents": documents, "scattered": scattered}
# What stands beside the mask, and whose gradient is then a kernel's of its own or that of dQ's.
BESIDE = {
    "nothing": {},
    "causal": {"window": (None, 0)},
    "window": {"window": (30, 20)},
    "softcap": {"softcap": 3.0},
    "shared bias": {"bias": (2, N_QUERIES, N_KEYS)},
    "bias of keys": {"bias": (N_KEYS,), "window": (30, 20)},
    "full bias": {"bias": (3, 2, N_QUERIES, N_KEYS)},
    "sinks": {"sinks": (2,)},
}


def given_of(beside, dtype, device):
    options = {
        name: tensors(each, seed=3)[0].to(device) if name in ("bias", "sinks") else each
        for name, each in BESIDE[beside].items()
    }
    return qkv(N_QUERIES, N_KEYS, lead=(3,), dtype=dtype, device=device), options


@pairwise(("beside", "mask"))
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("beside", BESIDE)
@pytest.mark.parametrize("mask", MASKS)
def test_results(mask, beside, dtype, device):
    given, options = given_of(beside, dtype, device)
    assert_attention(*given, attn_mask=MASKS[mask]().to(device), **options)


@pairwise()
@pytest.mark.parametrize("kind", ["bool", "added"])
@pytest.mark.parametrize("beside", BESIDE)
def test_keys_that_are_padding_are_not_read(beside, kind, device):
    """The third batch has nothing but NaN, in queries too."""
    (q, k, v), options = given_of(beside, FP32, device)
    keep = padding().to(device)
    hidden = ~keep.transpose(-1, -2)

    def results(q, k, v):
        mask = keep if kind == "bool" else torch.zeros(keep.shape, device=device).masked_fill(~keep, HIDES)
        leaves = {"q": q, "k": k, "v": v, **{name: each for name, each in options.items() if name in ("bias", "sinks")}}
        if kind == "added":
            leaves["mask"] = mask
        leaves = {name: each.detach().clone().requires_grad_() for name, each in leaves.items()}
        beside = {name: leaves.get(name, each) for name, each in options.items()}
        y = fused_softmax.attention(
            leaves["q"], leaves["k"], leaves["v"], leaves.get("mask", mask), **beside, return_lse=True,
            return_stats=("entropy", "row_max", "column_sums"),
        )  # fmt: skip
        found = torch.autograd.grad((y.output * y.output).sum(), list(leaves.values()), allow_unused=True)
        return y.output, y.lse, *y.stats.values(), *found

    poisoned = (each.masked_fill(hidden, NAN) for each in (k, v))
    found, expected = results(q, *poisoned), results(q, k, v)
    for each, clean in zip(found, expected, strict=True):
        assert torch.equal(each, clean)
        assert not each.isnan().any()


@pytest.mark.parametrize("heads", [2, 4])
def test_documents_that_are_not_looked_at_are_not_read(heads, device):
    """Neither their keys and values, nor backward their queries and gradients, which come as NaN."""
    q, k, v = qkv(N_QUERIES, N_KEYS, heads=heads, key_heads=2, device=device)
    keep = documents().to(device)

    def results(of, poisoned):
        """Output and gradients of the document `of`, with all of the other poisoned."""
        rows, cols = torch.arange(N_QUERIES, device=device) // 32 == of, torch.arange(N_KEYS, device=device) // 32 == of
        leaves = [q, k, v]
        if poisoned:
            there = zip(leaves, (~rows, ~cols, ~cols), strict=True)
            leaves = [each.masked_fill(hidden[:, None], NAN) for each, hidden in there]
        leaves = [each.clone().requires_grad_() for each in leaves]
        y = fused_softmax.attention(*leaves, keep, enable_gqa=True)
        found = torch.autograd.grad(y, leaves, y.detach())
        return [each[..., here, :] for each, here in zip((y.detach(), *found), (rows, rows, cols, cols), strict=True)]

    for document in (0, 1):
        for each, clean in zip(results(document, True), results(document, False), strict=True):
            assert torch.equal(each, clean)
            assert each.isfinite().all()


@pytest.mark.parametrize("lengths", [(24, 16 * 71 - 8), (16 * 71 - 8, 24)], ids=str)
def test_more_tiles_than_a_word_has_bits(lengths, device):
    """A bit stands for two tiles of 71. The last run has one."""
    keep = torch.zeros(lengths, dtype=torch.bool)
    long = keep if lengths[1] > lengths[0] else keep.T
    for row, tile in ((3, 5), (15, 64), (19, 64), (0, 69), (20, 70)):
        long[row, 16 * tile + 2] = True
    (bias,) = tensors((lengths[1],), seed=3)
    given = qkv(*lengths, lead=(1,), heads=1, device=device)
    assert_attention(*given, attn_mask=keep.to(device), bias=bias.to(device))


def test_more_steps_of_a_biass_gradient_than_a_word_has_bits(device):
    """Of 70 batches, whose tiles come one after another."""
    keep = torch.arange(70) % 3 == 0
    q, k, v = qkv(16, 16, lead=(70,), heads=1, device=device)
    (bias,) = tensors((16, 16), seed=3)
    hidden = ~keep[:, None, None, None].to(device)
    found = assert_attention(q, k, v, attn_mask=~hidden, bias=bias.to(device))
    assert (found["query"].masked_select(hidden) == 0).all()


@pytest.mark.parametrize("n_keys", [70, 72])
@pytest.mark.parametrize("layout", ["contiguous", "off by one", "keys first", "of queries"])
def test_masks_however_they_lie(layout, n_keys, device):
    """Those that 8 bytes at a time do not read are only applied."""
    keep = documents()[:, :n_keys].to(device)
    if layout == "off by one":
        keep = torch.zeros(N_QUERIES, 80, dtype=torch.bool, device=device)[:, 1 : n_keys + 1].copy_(keep)
    elif layout == "keys first":
        keep = keep.T.contiguous().T
    elif layout == "of queries":
        keep = keep[:, -1:]
    assert_attention(*qkv(N_QUERIES, n_keys, device=device), attn_mask=keep)


def test_where_nothing_is_seen_gradients_of_a_whole_bias_are_0(device):
    """dQ's kernel stores them, where torch fills new memory with NaN."""
    given, options = given_of("full bias", FP32, device)
    torch.use_deterministic_algorithms(True)
    try:
        found = assert_attention(*given, attn_mask=documents().to(device), **options)
    finally:
        torch.use_deterministic_algorithms(False)
    assert (found["bias"].masked_select(~documents().to(device)) == 0).all()


@pytest.mark.parametrize("shape", [(2, 1, 1, 70), (2, 4, 1, 70), (2, 1, 3, 70)], ids=str)
def test_few_queries_over_padded_keys(shape, device, monkeypatch):
    """Of three parts the last has no key that is seen. Masks that differ between rows of a tile are only applied."""
    plan = DecodePlan(Tiles(16, SIDE, 4, 1), 3, 16, chunk=2)
    monkeypatch.setattr(attention_decode, "plan_decode", lambda *_: plan)
    keep = (torch.arange(70, device=device) < 32).expand(shape).clone()
    if shape[1] > 1:
        keep[:, 1] = True
    elif shape[2] > 1:
        keep[:, :, 1] = True
    q, k, v = qkv(3, 70, heads=4, key_heads=2, device=device)
    clean = assert_attention(q, k, v, attn_mask=keep, enable_gqa=True)["output"]
    if shape[1:3] == (1, 1):
        k[..., 32:, :], v[..., 32:, :] = NAN, NAN
        assert torch.equal(fused_softmax.attention(q, k, v, keep, enable_gqa=True), clean)
