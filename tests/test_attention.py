"""attention by its kernels, held to float64: masks, windows, sinks, softcap, ALiBi, shared heads, lengths, layouts."""

import os

import pytest
import torch
from attention_cases import BF16, FP16, FP32, FP64, PLANS, assert_attention, qkv, tensors
from products import pairwise

import fused_softmax
from fused_softmax.ops.attention import bias as attention_bias
from fused_softmax.ops.attention import call as attention_call
from fused_softmax.ops.attention import reference as reference_attention

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="without a GPU or the interpreter, torch computes"
)
PATTERNS = [(b, h, m, n) for b in (1, 2) for h in (1, 2) for m in (1, 20) for n in (1, 35)]
OPTIONS = {
    "causal": {"is_causal": True},
    "bottom right": {"is_causal": True, "causal_align": "bottom_right"},
    "left": {"window": (5, None)},
    "right": {"window": (None, 3), "causal_align": "bottom_right"},
    "window": {"window": (4, 20), "scale": 0.7},
    "causal window": {"is_causal": True, "window": (6, 9)},
    "softcap": {"softcap": 2.0},
    "negative scale": {"scale": -0.5},
}


@pytest.fixture(params=["square"])
def tiles(request, monkeypatch):
    """Tiles of which a short length has several; the planner's own are of a GPU."""
    monkeypatch.setattr(attention_call, "plan_attention", lambda *_: PLANS[request.param])


every_plan = pytest.mark.parametrize("tiles", PLANS, indirect=True)


@every_plan
@pytest.mark.parametrize("dtype", [FP32, FP16, BF16], ids=str)
def test_plain(tiles, dtype, device):
    assert_attention(*qkv(20, 35, dim=20, value_dim=24, dtype=dtype, device=device))


@pytest.mark.parametrize(("dim", "value_dim"), [(20, 12), (24, 20), (20, 24), (3, 1)])
def test_heads_of_16_bits_that_no_vectors_fill(tiles, dim, value_dim, device):
    """They are computed with zeros at their ends, of which neither results nor gradients have any."""
    assert_attention(*qkv(20, 35, dim=dim, value_dim=value_dim, dtype=BF16, device=device))


@pairwise(strength=1)
@every_plan
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
@pytest.mark.parametrize("option", OPTIONS)
def test_options(tiles, option, dtype, device):
    assert_attention(*qkv(20, 35, dtype=dtype, device=device), **OPTIONS[option])
    assert_attention(*qkv(35, 20, dtype=dtype, device=device), **OPTIONS[option])


@pairwise(strength=1)
@every_plan
@pytest.mark.parametrize("name", ["bias", "attn_mask"])
@pytest.mark.parametrize("shape", PATTERNS, ids=str)
def test_every_pattern_of_a_bias_has_its_gradient(tiles, shape, name, device):
    (added,) = tensors(shape, seed=3)
    assert_attention(*qkv(20, 35, device=device), **{name: added.to(device)})


def test_parts_of_a_biass_gradient(tiles, device, monkeypatch):
    """Four tiles for three parts, of which the last has none."""
    monkeypatch.setattr(attention_bias, "_PART_BYTES", 3 * 4 * 20)
    (bias,) = tensors((1, 20), seed=3)
    assert_attention(*qkv(20, 20, heads=1, device=device), bias=bias.to(device))


def test_two_biases_that_differ_in_all(tiles, device):
    """Both have the gradient of the scores; one is read in another dtype, and -inf hides."""
    bias, mask = (each.to(device) for each in tensors((2, 2, 20, 35), (2, 20, 35), seed=3))
    mask[0, 3], mask[1, :, 30:] = -float("inf"), -float("inf")
    q, k, v = qkv(20, 35, dtype=BF16, device=device)
    assert_attention(q, k, v, bias=bias.bfloat16(), attn_mask=mask)
    assert_attention(q, k, v, bias=bias, attn_mask=mask.expand(2, 2, 20, 35), softcap=3.0)


@pytest.mark.parametrize("shape", [(20, 35), (2, 1, 1, 35), (1, 2, 20, 1), (2, 2, 20, 35)], ids=str)
def test_bool_masks(tiles, shape, device):
    keep = (tensors(shape, seed=5)[0] > 0).to(device)
    (bias,) = tensors((1, 2, 20, 35), seed=3)
    assert_attention(*qkv(20, 35, device=device), attn_mask=keep)
    assert_attention(*qkv(20, 35, device=device), attn_mask=keep, bias=bias.to(device), window=(9, 9))


@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_sinks(tiles, dtype, device):
    sinks = torch.tensor([0.5, -float("inf")], device=device)
    assert_attention(*qkv(20, 35, dtype=dtype, device=device), sinks=sinks)
    assert_attention(*qkv(35, 20, dtype=dtype, device=device), sinks=sinks.to(dtype), is_causal=True, window=(4, 0),
                     causal_align="bottom_right")  # fmt: skip


@pytest.mark.parametrize("n_queries", [1, 20])
def test_sinks_at_any_stride(n_queries, device):
    """A column of a table of all layers' sinks, by the kernel of few queries and by that of many."""
    (table,) = (each.to(device) for each in tensors((4, 3), seed=3))
    q, k, v = qkv(n_queries, 300, lead=(1,), heads=4, key_heads=2, device=device)
    exact = reference_attention.attention(q, k, v, sinks=table[:, 1], enable_gqa=True, return_lse=True)
    found = fused_softmax.attention(q, k, v, sinks=table[:, 1], enable_gqa=True, return_lse=True)
    torch.testing.assert_close(found.lse, exact.lse, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(found.output, exact.output, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("of_batches", [False, True])
def test_alibi(tiles, of_batches, device):
    slopes = torch.tensor([[0.5, 0.0625], [0.25, 1.0]], device=device)
    slopes = slopes if of_batches else slopes[0]
    assert_attention(*qkv(20, 35, device=device), alibi_slopes=slopes, is_causal=True, causal_align="bottom_right")


def test_a_gradient_of_slopes(tiles, device):
    q, k, v = qkv(6, 7, device=device)
    slopes = torch.tensor([0.5, 0.25], device=device, requires_grad=True)
    (found,) = torch.autograd.grad(fused_softmax.attention(q, k, v, alibi_slopes=slopes).sum(), slopes)
    (exact,) = torch.autograd.grad(reference_attention.attention(q, k, v, alibi_slopes=slopes).sum(), slopes)
    torch.testing.assert_close(found, exact)


@every_plan
@pytest.mark.parametrize("key_heads", [1, 2])
def test_heads_that_share_keys(tiles, key_heads, device):
    """With a bias of every head of query, and one of none."""
    full, shared = (each.to(device) for each in tensors((4, 20, 35), (1, 1, 35), seed=3))
    given = qkv(20, 35, lead=(1,), heads=4, key_heads=key_heads, device=device)
    assert_attention(*given, enable_gqa=True, bias=full, attn_mask=shared)


def test_everything_together(tiles, device):
    bias, mask, sinks = (each.to(device) for each in tensors((2, 1, 35, 50), (1, 1, 1, 50), (4,), seed=3))
    slopes = torch.tensor([0.5, 0.25, 0.125, 0.0625], device=device)
    given = qkv(35, 50, heads=4, key_heads=2, dim=20, value_dim=12, device=device)
    assert_attention(*given, attn_mask=mask, bias=bias, sinks=sinks, alibi_slopes=slopes, softcap=5.0, window=(20, 8),
                     enable_gqa=True, causal_align="bottom_right")  # fmt: skip


@pairwise(strength=1)
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("n_keys", [1, 15, 16, 17, 31, 33])
@pytest.mark.parametrize("n_queries", [1, 7, 16, 17, 24, 33])
def test_lengths(tiles, n_queries, n_keys, is_causal, device):
    assert_attention(*qkv(n_queries, n_keys, lead=(1,), heads=1, device=device), is_causal=is_causal)


@pytest.mark.parametrize("window", [(1, 1), (31, None), (None, 31)], ids=str)
def test_windows_that_end_with_a_tile(tiles, window, device):
    """Of a tile of queries the last key seen is a tile's first one, and the first key a tile's last; one key hidden."""
    (bias,) = tensors((1, 33), seed=3)
    assert_attention(*qkv(33, 33, lead=(1,), heads=1, device=device), bias=bias.to(device), window=window)


@pytest.mark.parametrize("tiles", ["oblong"], indirect=True)
def test_keys_after_the_last_tile(tiles, device):
    """Whole tiles for one kernel and not for another, with NaN after the last key."""
    q, *of_keys = qkv(20, 48, lead=(1,), heads=1, device=device)
    poisoned = [torch.nn.functional.pad(each, (0, 0, 0, 16), value=float("nan"))[..., :48, :] for each in of_keys]
    assert_attention(q, *poisoned, bias=torch.zeros(1, 1, 20, 48, device=device))


@pytest.mark.parametrize(("n_queries", "n_keys"), [(0, 5), (5, 0), (0, 0)])
def test_no_queries_or_keys(tiles, n_queries, n_keys, device):
    sinks, bias = torch.zeros(2, device=device), torch.zeros(1, 2, n_queries, n_keys, device=device)
    assert_attention(*qkv(n_queries, n_keys, device=device), sinks=sinks, bias=bias)
    assert_attention(*qkv(n_queries, n_keys, device=device), bias=bias[:, :1])
    found = fused_softmax.attention(*qkv(n_queries, n_keys, lead=(0, 3), device=device))
    assert found.shape == (0, 3, 2, n_queries, 16)


def test_rows_that_see_nothing(tiles, device):
    """0, lse -inf, and no part in any gradient, not even by a NaN that comes back to lse."""
    keep = torch.ones(20, 35, dtype=torch.bool, device=device)
    keep[[0, 7, 19]] = False
    q, k, v = (each.requires_grad_() for each in qkv(20, 35, device=device))
    found = fused_softmax.attention(q, k, v, keep, return_lse=True)
    assert (found.lse[..., [0, 7, 19]] == -float("inf")).all()
    assert (found.output[..., [0, 7, 19], :] == 0).all()
    dlse = torch.where(found.lse.isinf(), float("nan"), 1.0)
    got = torch.autograd.grad([found.output, found.lse], [q, k, v], [torch.ones_like(found.output), dlse])
    assert all(each.isfinite().all() for each in got)
    assert (got[0][..., [0, 7, 19], :] == 0).all()
    hidden = torch.where(keep, 0.0, -float("inf"))
    assert_attention(q.detach(), k.detach(), v.detach(), attn_mask=hidden)
    assert_attention(*qkv(35, 5, device=device), is_causal=True, causal_align="bottom_right")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("option", [{"is_causal": True}, {"window": (4, 2)}], ids=str)
@pytest.mark.parametrize("added", ["bias", "attn_mask"])
def test_what_is_added_to_hidden_scores_of_the_last_queries_is_not_looked_at(tiles, added, option, value, device):
    """Queries after the last one in a tile saw more keys than it, with its bias: dK and dV of these keys were NaN."""
    if added == "attn_mask" and "is_causal" in option:
        option = {"window": (None, 0)}
    n_queries, n_keys = 20, 35
    left, right = option.get("window", (None, 0))
    steps = torch.arange(n_keys, device=device) - torch.arange(n_queries, device=device)[:, None]
    hidden = (steps > right) if left is None else (steps > right) | (steps < -left)
    given = [each.requires_grad_() for each in qkv(n_queries, n_keys, device=device)]

    def results(shape, value):
        (plain,) = (each.to(device) for each in tensors(shape, seed=3))
        plain = plain.masked_fill(hidden, value).requires_grad_()
        found = fused_softmax.attention(*given, **{added: plain}, **option)
        return found, *torch.autograd.grad(found.sum(), [*given, plain])

    for shape in ((2, 2, n_queries, n_keys), (1, 2, n_queries, n_keys)):
        found, expected = results(shape, value), results(shape, 0.0)
        assert all(torch.equal(*each) for each in zip(found, expected, strict=True))


def test_layouts_and_poison(tiles, device):
    """[batch, length, heads, dim], parts of greater tensors full of NaN, and a strided last dim."""
    plain = qkv(20, 35, dim=20, value_dim=12, device=device)
    expected = assert_attention(*plain)

    def within(t, order):
        big = torch.full([2 * n + 3 for n in (t.shape[i] for i in order)], float("nan"), device=device)
        part = big[tuple(slice(1, 1 + t.shape[i]) for i in order)].permute(*[order.index(i) for i in range(4)])
        return part.copy_(t)

    for order in ((0, 2, 1, 3), (2, 0, 1, 3), (3, 0, 2, 1)):
        found = assert_attention(*[within(each, order) for each in plain])
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_many_leading_dims(tiles, device):
    """Those that merge, those that two strides describe, and those that neither does, with a bias of any.

    One that is expanded over a dim has a stride of 0 there, and yet a gradient of the whole dim.
    """
    for shape in ((3, 1, 9, 17), (2, 1, 2, 9, 17), (1, 3, 2, 9, 17), (2, 3, 2, 9, 17)):
        (bias,) = tensors(shape, seed=3)
        assert_attention(*qkv(9, 17, lead=(2, 3), device=device), bias=bias.to(device))
    (bias,) = tensors((1, 1, 1, 1, 17), seed=3)
    assert_attention(*qkv(9, 17, lead=(2, 2), heads=1, device=device), bias=bias.to(device).expand(2, 1, 1, 1, 17))
    (bias,) = tensors((2, 1, 2, 1, 9, 17), seed=3)
    assert_attention(*qkv(9, 17, lead=(2, 2, 2), device=device), bias=bias.to(device))


def test_leading_sizes_broadcast(tiles, device):
    """One head of keys for all, a batch of one, and no heads at all."""
    q, k, v = (each.to(device) for each in tensors((2, 3, 9, 16), (1, 17, 16), (2, 1, 17, 16)))
    assert_attention(q, k, v, is_causal=True)
    assert_attention(
        q[0, 0], k[0], v[0, 0], sinks=torch.ones(1, device=device), alibi_slopes=torch.ones(1, device=device)
    )


def test_stats(tiles, device):
    sinks, names = torch.tensor([0.5, -1.0], device=device), ("column_sums", "entropy", "row_max")
    keep = torch.ones(20, 35, dtype=torch.bool, device=device)
    keep[3] = False
    for options in ({}, {"is_causal": True}, {"window": (3, 5), "sinks": sinks, "softcap": 3.0}, {"attn_mask": keep}):
        q, k, v = (each.requires_grad_() for each in qkv(20, 35, device=device))
        found = fused_softmax.attention(q, k, v, **options, return_stats=names)
        exact = reference_attention.attention(q.double(), k.double(), v.double(), **options, return_stats=names)
        assert found.lse is None
        assert list(found.stats) == list(names)
        for name in names:
            assert found.stats[name].dtype == FP32
            torch.testing.assert_close(found.stats[name].detach().double(), exact.stats[name], rtol=1e-5, atol=1e-5)


def test_parts_of_the_keys_merge_by_lse(tiles, device):
    q, k, v = (each.requires_grad_() for each in qkv(20, 35, device=device))
    parts = [fused_softmax.attention(q, k[..., at, :], v[..., at, :], return_lse=True)
             for at in (slice(0, 13), slice(13, 35))]  # fmt: skip
    lse = torch.stack([each.lse for each in parts])
    weights = torch.softmax(lse, 0)
    merged = sum(w[..., None] * each.output for w, each in zip(weights, parts, strict=True))
    whole = fused_softmax.attention(q, k, v)
    torch.testing.assert_close(merged, whole, rtol=1e-4, atol=1e-5)
    do = torch.ones_like(whole)
    ours, exact = (torch.autograd.grad(each, [q, k, v], do) for each in (merged, whole))
    torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-5)


def test_the_same_bits_and_kept_calls(tiles, device):
    """A call seen before is found, takes other values, and gives the same bits for the same ones."""
    bias, other = (each.to(device) for each in tensors((1, 2, 1, 35), (1, 2, 1, 35), seed=3))
    given = qkv(20, 35, device=device)
    first, _, again = (assert_attention(*given, bias=each, is_causal=True) for each in (bias, other, bias))
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert torch.equal(fused_softmax.attention(*given, bias=bias, is_causal=True), first["output"])


def test_only_what_is_asked_for(tiles, device):
    for wanted, n_biases in ((0, 1), (1, 1), (2, 1), (3, 1), (3, 2)):
        given = [*qkv(20, 35, device=device), torch.zeros(n_biases, 2, 20, 35, device=device)]
        leaf = given[wanted].requires_grad_()
        exact = reference_attention.attention(*given[:3], bias=given[3])
        found = fused_softmax.attention(*given[:3], bias=given[3])
        ones = torch.ones_like(found)
        (ours,), (theirs,) = (torch.autograd.grad(each, leaf, ones) for each in (found, exact))
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_gradients_share_no_memory(tiles, device):
    """Of a bias and a mask that have the gradient of the scores."""
    bias, mask = (each.to(device).requires_grad_() for each in tensors((2, 2, 20, 35), (2, 2, 20, 35), seed=3))
    y = fused_softmax.attention(*qkv(20, 35, device=device), attn_mask=mask, bias=bias)
    dbias, dmask = torch.autograd.grad(y.square().sum(), (bias, mask))
    assert torch.equal(dbias, dmask)
    assert dbias.data_ptr() != dmask.data_ptr()


def test_what_no_kernel_writes_is_0(tiles, device):
    """Where torch fills new memory with NaN: gradients of hidden scores, and of keys that no query is there for."""
    bias = torch.zeros(1, 1, 20, 35, device=device)
    torch.use_deterministic_algorithms(True)
    try:
        assert_attention(*qkv(20, 35, lead=(1,), heads=1, device=device), bias=bias, window=(3, 2))
        assert_attention(*qkv(0, 5, device=device))
    finally:
        torch.use_deterministic_algorithms(False)


def test_gradcheck(tiles, device):
    """Loosely, for kernels hold fp32; the reference strictly in test_attention_calls.py."""
    q, k, v, bias, sinks = (each.to(device).requires_grad_() for each in
                            tensors((1, 2, 5, 4), (1, 1, 6, 4), (1, 1, 6, 3), (2, 1, 6), (2,)))  # fmt: skip

    def call(q, k, v, bias, sinks):
        return fused_softmax.attention(
            q, k, v, bias=bias, sinks=sinks, softcap=2.0, window=(3, 4), enable_gqa=True, return_lse=True
        )[:2]

    torch.autograd.gradcheck(
        call, (q, k, v, bias, sinks), eps=1e-2, atol=2e-2, rtol=2e-2, nondet_tol=0.0, fast_mode=True
    )


@pytest.mark.parametrize("extra", [1, 63, 64, 65, 127])
def test_the_planned_tiles(extra, device):
    """Lengths that leave so much of the last tile."""
    q, k, v = qkv(128 + extra, 64 + extra, lead=(1,), heads=1, dim=64, dtype=BF16, device=device)
    assert_attention(q, k, v, is_causal=True, bias=torch.zeros(1, 64 + extra, dtype=BF16, device=device))


def test_a_second_derivative_is_the_references(tiles, device):
    given = [each.requires_grad_() for each in qkv(5, 6, lead=(1,), heads=1, device=device)]
    found = []
    for of in (fused_softmax.attention, reference_attention.attention):
        y = of(*given, is_causal=True)
        (dq,) = torch.autograd.grad((y * y).sum(), given[0], create_graph=True)
        found.append(torch.autograd.grad((dq * dq).sum(), given))
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def test_a_differentiable_gradient_of_keys_made_of_the_query_counts_once(tiles, device):
    q = qkv(5, 5, lead=(1,), heads=1, device=device)[0].requires_grad_()
    pairs = ((fused_softmax.attention, True), (reference_attention.attention, False))
    found = [torch.autograd.grad(of(q, q * 2, q).square().sum(), q, create_graph=again)[0] for of, again in pairs]
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-4)


def test_doubles_take_torchs_operations(tiles, device):
    q, k, v = (each.to(FP64) for each in qkv(5, 6, device=device))
    torch.testing.assert_close(fused_softmax.attention(q, k, v), reference_attention.attention(q, k, v))
