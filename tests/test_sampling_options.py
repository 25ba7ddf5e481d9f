"""sample: bias, bitmask, row indices and outputs, rows that cannot be drawn from, and calls that are refused."""

import math

import pytest
import torch
from products import pairwise
from sampling_cases import columns
from torch.testing import assert_close

import fused_softmax
from fused_softmax import sample

INF, NAN = math.inf, math.nan


def bitmask_of(possible):
    """A bool [n, n_cols] as int32 words, by Python."""
    n_cols = possible.shape[1]
    words = [
        [sum(1 << c % 32 for c in range(32 * w, min(32 * w + 32, n_cols)) if row[c]) for w in range(-(-n_cols // 32))]
        for row in possible.tolist()
    ]
    return torch.tensor([[word - 2**32 * (word >= 2**31) for word in row] for row in words], dtype=torch.int32)


@pytest.mark.parametrize("wider", [0, 2])
def test_a_bitmask_says_what_is_possible(wider, device):
    x, possible = torch.randn(6, 77) * 2, torch.rand(6, 77) < 0.3
    possible[:, 70] = True
    bits = torch.nn.functional.pad(bitmask_of(possible), (0, wider), value=-1).to(device)
    x[:, 3] = torch.where(possible[:, 3], x[:, 3], NAN)  # a column that is not possible is not looked at
    drawn = sample(x.to(device), bitmask=bits, seed=1, return_kept=True)
    masked = sample(x.masked_fill(~possible, -INF).to(device), seed=1, return_kept=True)
    assert drawn.valid.all()
    assert all(torch.equal(a, b) for a, b in zip(drawn, masked, strict=True) if a is not None)
    assert torch.equal(drawn.kept.cpu(), bitmask_of(possible))


@pairwise(strength=1)
@pytest.mark.parametrize("shape", [(50,), (5, 50)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_bias_is_added_first(shape, dtype, device):
    x, bias = (torch.randn(5, 50) * 2).to(device), torch.randn(*shape, dtype=dtype).to(device)
    options = {"top_p": 0.8, "seed": 2, "return_kept": True, "return_logprobs": "processed"}
    biased, added = sample(x, logit_bias=bias, **options), sample(x + bias.float(), **options)
    assert all(torch.equal(a, b) for a, b in zip(biased, added, strict=True) if a is not None)


def test_row_indices_say_which_row_a_draw_is_from(device):
    x = (torch.randn(5, 60) * 2).to(device)
    indices = torch.tensor([4, 0, 0, 3, 2, 4, 1], device=device)
    seed, top_k = torch.arange(7, device=device), torch.tensor([3, 9, 0, 4, 60, 1, 2], device=device)
    options = {"seed": seed, "top_k": top_k, "return_kept": True, "return_logprobs": "raw", "top_logprobs": 3}
    options["return_rank"] = True
    for kind in (torch.int64, torch.int32):
        drawn = sample(x, row_indices=indices.to(kind), **options)
        gathered = sample(x[indices], **options)
        assert all(torch.equal(a, b) for a, b in zip(drawn, gathered, strict=True))
    wrong = sample(x, row_indices=torch.tensor([0, 5, -1], device=device), seed=1)
    assert wrong.valid.tolist() == [True, False, False]
    assert wrong.tokens[1:].tolist() == [0, 0]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_raw_logprobs_are_those_of_the_logits_as_given(dtype, device):
    x, bias = (torch.randn(9, 80) * 3).to(dtype).to(device), torch.randn(80, device=device)
    drawn = sample(x, 0.5, 10, logit_bias=bias, seed=1, return_logprobs="raw", top_logprobs=80)
    wanted = x.double().log_softmax(1)
    assert_close(drawn.logprobs.double(), wanted.gather(1, drawn.tokens[:, None]).squeeze(1), atol=1e-6, rtol=1e-6)
    order = x.float().sort(dim=1, descending=True, stable=True).indices
    assert torch.equal(drawn.top_tokens, order)
    assert_close(drawn.top_logprobs.double(), wanted.gather(1, order), atol=1e-6, rtol=1e-6)


def test_greedy_rows_have_one_column(device):
    x = torch.tensor([[1.0, 3.0, 3.0, 2.0]], device=device)
    drawn = sample(x, 0.0, 3, 0.9, return_logprobs="processed", top_logprobs=2, return_kept=True)
    assert drawn.tokens.item() == 1
    assert drawn.logprobs.item() == 0
    assert drawn.top_tokens.tolist() == [[1, -1]]
    assert drawn.top_logprobs.tolist() == [[0.0, -INF]]
    assert columns(drawn.kept[0]) == {1}


def test_out_is_written_at_its_strides(device):
    x = (torch.randn(6, 40) * 2).to(device)
    buffer = torch.full((6, 3), -7, device=device)
    drawn = sample(x, seed=1, out=buffer[:, 1])
    assert drawn.tokens.data_ptr() == buffer[:, 1].data_ptr()
    assert torch.equal(buffer[:, 1], sample(x, seed=1).tokens)
    assert (buffer[:, [0, 2]] == -7).all()


OUT_WAYS = {
    "no filter": {},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.9},
    "min-p": {"min_p": 0.2},
    "greedy": {"temperature": 0.0},
    "raw": {"return_logprobs": "raw", "top_logprobs": 2},
    "processed": {"return_logprobs": "processed", "top_logprobs": 2},
    "many raw": {"return_logprobs": "raw", "top_logprobs": 90},
    "many processed": {"return_logprobs": "processed", "top_logprobs": 90},
}
N_OUT = 5


def sharing(argument, device):
    """(a tensor for an argument, a tensor of tokens beside it in its memory)."""
    if argument in ("position", "seed", "row_indices", "top_k"):
        memory = torch.tensor([4, 3, 2, 1, 0, 0], device=device)
        return memory[:-1], memory[1:]
    if argument == "logits":
        memory = torch.randn(N_OUT * 100 + 2 * N_OUT, generator=torch.Generator().manual_seed(3)).to(device)
        return memory[: N_OUT * 100].view(N_OUT, 100), memory.view(torch.int64)[100 : 100 + N_OUT]
    if argument == "bitmask":
        memory = torch.full((N_OUT, 6), -1, dtype=torch.int32, device=device)
        return memory, memory.view(torch.int64)[:, 1]
    memory = torch.linspace(0.3, 0.9, 2 * N_OUT, dtype=torch.float32, device=device)
    return memory[:N_OUT], memory.view(torch.int64)


@pairwise()
@pytest.mark.parametrize("way", ["torch", "kernels"], indirect=True)
@pytest.mark.parametrize("kept", [False, True])
@pytest.mark.parametrize("asked", OUT_WAYS)
@pytest.mark.parametrize(
    "argument", ["position", "seed", "row_indices", "top_k", "top_p", "min_p", "temperature", "logits", "bitmask"]
)
def test_out_may_share_memory_with_an_argument(argument, asked, kept, way, device):
    """kept: by a call that was kept before, of tensors that lay apart."""

    def call(given, **more):
        x = torch.randn(N_OUT, 100, generator=torch.Generator().manual_seed(2)).to(device)
        options = {"logits": x, "seed": 3, **OUT_WAYS[asked], argument: given}
        options |= {} if "position" in options else {"position": torch.arange(N_OUT, device=device)}
        return sample(**options, **more)

    given, out = sharing(argument, device)
    wanted = call(given.clone())
    if kept:
        # Of the strides and the place against 16 bytes that follow.
        apart = torch.full((out.storage_offset() + N_OUT * out.stride(0) + 2,), -7, device=device)
        call(given.clone(), out=apart.as_strided(out.shape, out.stride(), out.storage_offset()))
    found = call(given, out=out)
    assert found.tokens is out
    for ours, each in zip(found, wanted, strict=True):
        assert (ours is None) == (each is None)
        if each is not None:
            assert_close(ours, each, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("way", ["torch", "kernels"], indirect=True)
@pytest.mark.parametrize("asked", OUT_WAYS)
def test_autograd_is_told_of_tokens_written_to_out(asked, way, device):
    x = torch.randn(3, 100, device=device)
    embedding = torch.randn(100, 4, device=device, requires_grad=True)
    for turn in range(2):  # the second call is kept
        tokens = torch.tensor([1, 2, 3], device=device)
        hidden = torch.nn.functional.embedding(tokens, embedding)
        version = tokens._version
        sample(x, **OUT_WAYS[asked], seed=1, out=tokens)
        assert tokens._version == version + 1, turn
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            hidden.sum().backward()
    with torch.inference_mode():  # whose tensors have no version
        tokens = torch.zeros(3, dtype=torch.int64, device=device)
        sample(x, **OUT_WAYS[asked], seed=1, out=tokens)
    assert torch.equal(tokens, sample(x, **OUT_WAYS[asked], seed=1).tokens)


@pytest.mark.parametrize("way", ["torch", "kernels"], indirect=True)
@pytest.mark.parametrize("asked", OUT_WAYS)
def test_an_expanded_out_is_refused(asked, way, device):
    x, out = torch.randn(3, 100, device=device), torch.zeros(1, dtype=torch.int64, device=device).expand(3)
    with pytest.raises(RuntimeError, match=r"sample: out must have a place for each element, got .* strides \(0,\)"):
        sample(x, **OUT_WAYS[asked], seed=1, out=out)
    one = torch.zeros(1, dtype=torch.int64, device=device).expand(1)
    assert sample(x[:1], **OUT_WAYS[asked], seed=1, out=one).tokens is one


@pytest.mark.parametrize(
    "asked",
    [
        {"return_logprobs": "raw"}, {"return_logprobs": "raw", "top_logprobs": 3},
        {"return_logprobs": "processed", "top_logprobs": 3},
    ],
    ids=str,
)  # fmt: skip
def test_log_probabilities_are_those_of_tokens_in_a_strided_out(asked, device):
    x = (torch.randn(4, 40) * 2).to(device)
    expected = sample(x, seed=1, position=torch.arange(4, device=device), **asked)
    beside = expected.tokens.roll(1)[:, None].expand(4, 3).contiguous()  # columns of the row, but not its tokens
    drawn = sample(x, seed=1, position=torch.arange(4, device=device), out=beside[:, 1], **asked)
    for name, wanted in zip(expected._fields, expected, strict=True):
        if wanted is not None:
            assert torch.equal(getattr(drawn, name), wanted), name


BAD_ROWS = {
    "NaN": [0.0, NAN, 1.0], "two inf": [INF, 0.0, INF], "all -inf": [-INF] * 3, "NaN beside inf": [NAN, INF, 0.0],
}  # fmt: skip


@pairwise()
@pytest.mark.parametrize("way", ["torch", "kernels"], indirect=True)
@pytest.mark.parametrize("filters", [{}, {"temperature": 0.0}, {"top_k": 2, "top_p": 0.5, "min_p": 0.1}], ids=str)
@pytest.mark.parametrize("bad", BAD_ROWS)
def test_rows_that_cannot_be_drawn_from(bad, filters, way, device):
    x = torch.tensor([[0.0, 1.0, 5.0], BAD_ROWS[bad], [5.0, 1.0, 0.0]], device=device)
    asked = {"return_logprobs": "processed", "top_logprobs": 2, "return_kept": True}
    drawn = sample(x, **filters, seed=1, position=0, **asked)
    assert drawn.valid.tolist() == [True, False, True]
    assert drawn.tokens[1] == 0
    assert drawn.kept[1] == 0
    assert drawn.logprobs.isnan().tolist() == [False, True, False]
    assert drawn.top_logprobs[1].isnan().all()
    assert (drawn.top_tokens[1] == -1).all()
    good = sample(x[::2].contiguous(), **filters, seed=1, position=0)
    assert torch.equal(drawn.tokens[::2], good.tokens)


def test_a_bitmask_without_a_bit_cannot_be_drawn_from(device):
    x = torch.randn(2, 40, device=device)
    bits = torch.tensor([[0, 0], [0, 1]], dtype=torch.int32, device=device)
    drawn = sample(x, bitmask=bits, seed=1)
    assert drawn.valid.tolist() == [False, True]
    assert drawn.tokens.tolist() == [0, 32]
    beyond = torch.tensor([[0, -256]], dtype=torch.int32, device=device)  # bits of columns that the row does not have
    assert not sample(x[:1], bitmask=beyond, seed=1).valid


@pytest.mark.parametrize("filters", [{}, {"temperature": 0.0}, {"top_k": 2, "top_p": 0.5, "min_p": 0.1}], ids=str)
def test_one_inf_is_drawn(filters, device):
    x = torch.tensor([[0.0, -INF, INF, 9.0]] * 6, device=device)
    position = torch.arange(6, device=device)
    for kind in ("raw", "processed"):
        drawn = sample(x, **filters, seed=1, position=position, return_logprobs=kind, return_kept=True)
        assert drawn.valid.all()
        assert (drawn.tokens == 2).all()
        assert (drawn.logprobs == 0).all()


@pytest.mark.parametrize(
    ("argument", "bad", "good"),
    [
        ("temperature", [-1.0, NAN, INF, -0.5], 0.5),
        ("top_p", [0.0, -1.0, NAN, -INF], 0.5),
        ("min_p", [1.5, NAN, INF, 2.0], 0.5),
    ],
)
def test_a_wrong_value_on_the_device_spoils_its_row_alone(argument, bad, good, device):
    x = torch.randn(5, 30, device=device)
    drawn = sample(x, **{argument: torch.tensor([*bad, good], device=device)}, seed=1, position=4)
    assert drawn.valid.tolist() == [False] * 4 + [True]
    assert drawn.tokens[:4].tolist() == [0] * 4
    assert drawn.tokens[4] == sample(x[4:], **{argument: good}, seed=1, position=4).tokens


EVERYTHING = {
    "top_k": 5, "top_p": 0.9, "min_p": 0.01, "return_logprobs": "processed", "top_logprobs": 3, "return_kept": True,
}  # fmt: skip


def every_call(device):
    """A call of each function, with all that it takes."""
    x, bits = torch.zeros(4, 40, device=device), torch.ones(4, 2, dtype=torch.int32, device=device)
    zeros = torch.zeros(4, dtype=torch.int64, device=device)
    fused_softmax.sample(x, **EVERYTHING)
    fused_softmax.sample(
        x, x[:, 0], zeros, x[:, 1], x[:, 2], seed=zeros, position=zeros, logit_bias=x, bitmask=bits, row_indices=zeros,
        token_ids=zeros[:, None], repetition=x[:, 0], presence=0.5, frequency=x[:, 1], return_logprobs="raw",
        top_logprobs=3, return_kept=True, out=zeros.clone(),
    )  # fmt: skip
    fused_softmax.speculative_sample(x[:, None], zeros[:, None][:, :0], x[:, None][:, :0], x[:, 0], zeros, seed=zeros)
    fused_softmax.speculative_sample(x.view(2, 2, 40), zeros[:2, None], None, 0.5, 3)
    fused_softmax.top_k_mask_logits(x, zeros)
    fused_softmax.top_p_mask_logits(x, 0.5)
    fused_softmax.min_p_mask_logits(x, x[:, 0])
    fused_softmax.top_k_renorm_probs(x, 3)
    fused_softmax.top_p_renorm_probs(x, x[:, 0])
    fused_softmax.penalize(x, zeros[:, None], x[:, 0], 0.5, 0.5, out=x.clone())


def test_no_call_asks_a_tensor_for_a_value_or_a_shape():
    every_call("meta")  # which has no values, and takes no tensor of another device


def test_calls_are_traced_whole():
    def both(x, seed):
        drawn = sample(x, 0.7, **EVERYTHING, seed=seed)
        return drawn, fused_softmax.speculative_sample(x[None], drawn.tokens[None, 1:], seed=seed[0])

    x, seed = torch.randn(3, 40), torch.arange(3)
    traced = torch.compile(both, backend="eager", fullgraph=True)(x, seed)
    for one, other in zip(traced, both(x, seed), strict=True):
        assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True) if b is not None)


X = torch.zeros(3, 40)
I64 = torch.zeros(3, dtype=torch.int64)
REFUSED = [
    ({"logits": [1.0]}, TypeError, "logits must be a Tensor, not list"),
    ({"logits": X.double()}, TypeError, "logits must be of float32, float16 or bfloat16, got torch.float64"),
    ({"logits": X[0]}, ValueError, r"logits must have shape \[n_rows, vocab\], got \(40,\)"),
    ({"logits": X[:, :0]}, ValueError, r"got \(3, 0\)"),
    ({"logits": X.to_sparse()}, RuntimeError, "logits must be a dense strided tensor"),
    ({"temperature": -1.0}, ValueError, "temperature must be at least 0 and finite, got -1.0"),
    ({"temperature": NAN}, ValueError, "temperature must be at least 0 and finite, got nan"),
    ({"temperature": INF}, ValueError, "temperature must be at least 0 and finite, got inf"),
    ({"temperature": None}, TypeError, "temperature must be a number or a Tensor, not NoneType"),
    ({"temperature": True}, TypeError, "temperature must be a number or a Tensor, not bool"),
    ({"temperature": torch.ones(2)}, ValueError, r"temperature must have shape \(\) or \(3,\), got \(2,\)"),
    ({"temperature": I64}, TypeError, "temperature must be of 16 to 64 bit floats, got torch.int64"),
    ({"temperature": torch.ones(3, device="meta")}, RuntimeError, "temperature must be on the logits' device cpu"),
    ({"top_k": 2.0}, TypeError, "top_k must be an int or a Tensor, not float"),
    ({"top_k": torch.ones(3)}, TypeError, "top_k must be of int64 or int32, got torch.float32"),
    ({"top_p": 0.0}, ValueError, "top_p must be more than 0, got 0.0"),
    ({"top_p": -0.1}, ValueError, "top_p must be more than 0, got -0.1"),
    ({"top_p": NAN}, ValueError, "top_p must be more than 0, got nan"),
    ({"min_p": 1.1}, ValueError, "min_p must be at most 1, got 1.1"),
    ({"min_p": "0.1"}, TypeError, "min_p must be a number or a Tensor, not str"),
    ({"order": "both"}, ValueError, "order must be \"sequential\" or \"joint\", got 'both'"),
    ({"seed": 1, "generator": torch.Generator()}, ValueError, "give seed=1 or a generator, not both"),
    ({"position": 1}, ValueError, "position needs a seed, got seed=None"),
    ({"seed": 1.0}, TypeError, "seed must be an int or a Tensor, not float"),
    ({"seed": 2**64}, ValueError, "seed must fit in 64 bits, got 18446744073709551616"),
    ({"seed": I64[:2]}, ValueError, r"seed must have shape \(\) or \(3,\), got \(2,\)"),
    ({"seed": 1, "position": torch.zeros(3)}, TypeError, "position must be of int64 or int32, got torch.float32"),
    ({"generator": 5}, TypeError, "generator must be a torch.Generator, not int"),
    ({"logit_bias": torch.zeros(41)}, ValueError, r"logit_bias must have shape \(40,\) or \(3, 40\), got \(41,\)"),
    ({"logit_bias": [0.0]}, TypeError, "logit_bias must be a Tensor, not list"),
    ({"bitmask": torch.zeros(3, 1, dtype=torch.int32)}, ValueError, r"bitmask must have shape \(3, 2\).*got \(3, 1\)"),
    ({"bitmask": torch.zeros(2, 2, dtype=torch.int32)}, ValueError, r"bitmask must have shape \(3, 2\).*got \(2, 2\)"),
    ({"bitmask": torch.zeros(3, 2, dtype=torch.int64)}, TypeError, "bitmask must be of int32, got torch.int64"),
    ({"row_indices": torch.zeros(2)}, TypeError, "row_indices must be of int64 or int32, got torch.float32"),
    ({"row_indices": I64[None]}, ValueError, r"row_indices must have shape \[n_draws\], got \(1, 3\)"),
    ({"row_indices": I64[:2], "seed": I64}, ValueError, r"seed must have shape \(\) or \(2,\), got \(3,\)"),
    ({"return_logprobs": True}, ValueError, 'return_logprobs must be None, "raw" or "processed", got True'),
    ({"top_logprobs": 2}, ValueError, "top_logprobs=2 needs return_logprobs"),
    ({"top_logprobs": 41, "return_logprobs": "raw"}, ValueError, r"top_logprobs must be in \[0, 40\], got 41"),
    ({"top_logprobs": 1.0, "return_logprobs": "raw"}, TypeError, "top_logprobs must be an int, not float"),
    ({"return_kept": 1}, TypeError, "return_kept must be a bool, not int"),
    ({"out": torch.zeros(3)}, TypeError, "out must be of int64, got torch.float32"),
    ({"out": I64[:2]}, ValueError, r"out must have shape \(3,\), got \(2,\)"),
]  # fmt: skip


@pytest.mark.parametrize(("given", "error", "message"), REFUSED, ids=lambda each: str(each)[:40])
def test_a_wrong_argument_is_named(given, error, message, monkeypatch):
    monkeypatch.setattr("fused_softmax.ops.sampling.reference.sample", None)  # nothing has run by then
    with pytest.raises(error, match=f"sample: .*{message}"):
        sample(**{"logits": X} | given)
