"""Plain attention that cuDNN computes: which calls go there, and that all else of attention holds for them."""

import json
import math
from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from attention_cases import BF16, FP16, FP32, PLANS, assert_attention, qkv
from click.testing import CliRunner

import fused_softmax
from fused_softmax.bench.show import report
from fused_softmax.cli import main
from fused_softmax.core.plan import H200, Device
from fused_softmax.core.route import INTERPRET
from fused_softmax.ops.attention import call as attention_call
from fused_softmax.ops.attention import reference as reference_attention
from fused_softmax.ops.attention import sdpa as attention_sdpa
from fused_softmax.ops.attention.kernels.hopper.spec import ROWS
from fused_softmax.ops.attention.plan import sdpa as plan

AMPERE = Device("A100", "cuda", (8, 0), 108)
MI200 = Device("MI210", "hip", (9, 0), 104)


@pytest.fixture
def cudnn(monkeypatch):
    """Has torch's two operators computed by the reference where there is no cuDNN; lists the passes that went there."""
    ran = []

    def forward(query, key, value, bias, with_lse, dropout_p, is_causal, scale):
        ran.append("forward")
        given = {"is_causal": is_causal, "scale": scale, "enable_gqa": True, "return_lse": True}
        found = reference_attention.attention(query, key, value, **given, arithmetic=FP32)
        like_query = torch.empty_like(query).copy_(found.output)
        lse = found.lse.contiguous().unsqueeze(-1) if with_lse else torch.empty(0)
        return like_query, lse, None, None, key.shape[-2], query.shape[-2], None, None, None

    def backward(do, query, key, value, output, lse, seed, offset, bias, cum_q, cum_k, max_q, max_k, dropout_p,
                 is_causal, scale):  # fmt: skip
        ran.append("backward")
        assert lse.shape == (*query.shape[:-1], 1)
        assert do.stride(-1) == 1
        leaves = [each.detach().requires_grad_() for each in (query, key, value)]
        with torch.enable_grad():
            given = {"is_causal": is_causal, "scale": scale, "enable_gqa": True}
            found = reference_attention.attention(*leaves, **given, arithmetic=FP32)
        return torch.autograd.grad(found, leaves, do)

    monkeypatch.setattr(attention_sdpa, "_forward", forward)
    monkeypatch.setattr(attention_sdpa, "_backward", backward)
    monkeypatch.setattr(attention_sdpa, "_has_cudnn", lambda *_: True)
    monkeypatch.setattr(plan, "LEAST_LENGTH", 16)
    small = [plan.Entry(which, (9, 0), 0, 64, None, "") for which in ("forward", "backward")]
    monkeypatch.setattr(plan, "ENTRIES", small)
    monkeypatch.setattr(attention_call, "plan_attention", lambda *_: PLANS["square"])
    return ran


interpreted = pytest.mark.skipif(not INTERPRET, reason="stands in for cuDNN beside interpreted kernels")


def test_entries_say_what_was_measured_and_overlap_nowhere():
    for each in plan.ENTRIES:
        assert "us" in each.note
        assert each.above < each.most_dim
    for which in ("forward", "backward"):
        spans = sorted((e.above, e.most_dim) for e in plan.ENTRIES if e.which == which)
        assert all(before[1] <= after[0] for before, after in pairwise(spans))


@pytest.mark.parametrize(
    "changed",
    [
        {"head_dim": 129, "value_dim": 129}, {"value_dim": 32}, {"itemsize": 4}, {"n_queries": 1}, {"n_keys": 127},
        {"device": AMPERE}, {"device": MI200},
    ],
    ids=str,
)  # fmt: skip
def test_what_was_not_measured_stays_with_the_kernels(changed):
    given = {"itemsize": 2, "n_heads": 1025, "n_queries": 128, "n_keys": 128, "device": H200}
    for which, dim in (("forward", 64), ("backward", 128)):
        given |= {"head_dim": dim, "value_dim": dim}
        assert plan.entry_of(which, **given).which == which
        assert isinstance(plan.entry_of(which, **given | changed), str)


@pytest.mark.parametrize(("dim", "lengths"), [(65, 2048), (96, 2048), (97, 128), (128, 128)], ids=str)
def test_gradients_of_short_lengths_are_cudnns_beyond_96_dims(dim, lengths):
    """Of 96 dims and 1001 queries the kernels' take 0.95 of cuDNN's time."""
    assert plan.entry_of("backward", dim, dim, 2, 8, lengths, 128, H200).which == "backward"
    assert isinstance(plan.entry_of("backward", dim, dim, 2, 8, lengths - 1, 128, H200), str)
    assert isinstance(plan.entry_of("backward", 64, 64, 2, 8, 4096, 4096, H200), str)


def test_forward_passes_of_few_scores_stay():
    """There the kernels take the GPU no longer, and the host less."""
    few = [plan.entry_of("forward", 64, 64, 2, *shape, H200) for shape in ((1024, 128, 128), (16, 1024, 1024))]
    assert all("scores cuDNN is not faster" in each for each in few)
    assert plan.entry_of("forward", 64, 64, 2, 16, 1024, 1025, H200).which == "forward"
    assert plan.entry_of("backward", 128, 128, 2, 1, 128, 128, H200).which == "backward"


@interpreted
@pytest.mark.parametrize("dtype", [BF16, FP16], ids=str)
@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"scale": 0.3}, {"window": (None, 0)}], ids=str)
def test_plain_calls_go_to_cudnn(cudnn, dtype, options):
    given = qkv(20, 35, dtype=dtype)
    assert_attention(*given, **options, with_lse=False)
    assert cudnn == ["forward", "backward"]
    assert_attention(*qkv(20, 35, dtype=dtype, heads=4, key_heads=2), **options, enable_gqa=True, with_lse=False)
    assert cudnn == ["forward", "backward"] * 2


@interpreted
def test_a_gradient_of_lse_is_the_kernels_of_what_cudnn_left(cudnn):
    """By output and lse, however the output lies."""
    q, k, v = qkv(20, 35, dtype=BF16)
    assert_attention(q.transpose(1, 2).contiguous().transpose(1, 2), k, v, is_causal=True)
    assert cudnn == ["forward"]


@interpreted
def test_cudnn_gets_a_gradient_whose_last_dim_is_contiguous(cudnn):
    given = [each.requires_grad_() for each in qkv(20, 35, dtype=BF16)]
    y = fused_softmax.attention(*given)
    torch.autograd.grad(y, given, torch.ones((), dtype=BF16).expand(y.shape))
    assert cudnn == ["forward", "backward"]


@interpreted
def test_other_calls_stay(cudnn):
    q, k, v = qkv(20, 35, dtype=BF16)
    zeros = torch.zeros(2)
    for options in (
        {"deterministic": True}, {"attn_mask": torch.ones(20, 35, dtype=torch.bool)}, {"softcap": 2.0},
        {"sinks": zeros}, {"bias": torch.zeros(20, 35)}, {"window": (3, 0)}, {"alibi_slopes": zeros}, {"scale": -0.5},
        {"is_causal": True, "causal_align": "bottom_right"}, {"return_stats": "entropy"},
    ):  # fmt: skip
        fused_softmax.attention(q, k, v, **options)
    fused_softmax.attention(q.float(), k.float(), v.float())
    fused_softmax.attention(q[:, :, :3], k, v)
    fused_softmax.attention(q, k[:, :1], v[:1])
    assert cudnn == []
    same_lengths = {"is_causal": True, "causal_align": "bottom_right"}
    fused_softmax.attention(q, k[..., :20, :], v[..., :20, :], **same_lengths)
    assert cudnn == ["forward"]


@interpreted
def test_deterministic_algorithms_ask_for_the_kernels(cudnn):
    q, k, v = qkv(20, 35, dtype=BF16)
    found = fused_softmax.attention(q, k, v)
    torch.use_deterministic_algorithms(True)
    try:
        torch.testing.assert_close(fused_softmax.attention(q, k, v), found, rtol=2e-2, atol=2e-2)
    finally:
        torch.use_deterministic_algorithms(False)
    assert cudnn == ["forward"]


@interpreted
def test_what_is_asked_beside_the_output(cudnn):
    """lse comes from cuDNN; a second derivative takes torch's operations, and one gradient alone the kernels."""
    q, k, v = (each.requires_grad_() for each in qkv(20, 35, dtype=BF16))
    found = fused_softmax.attention(q, k, v, return_lse=True)
    exact = reference_attention.attention(q, k, v, return_lse=True)
    torch.testing.assert_close(found.lse, exact.lse, rtol=1e-3, atol=1e-3)
    assert cudnn == ["forward"]
    (dq,) = torch.autograd.grad(fused_softmax.attention(q, k, v).float().sum(), q, create_graph=True)
    assert torch.autograd.grad(dq.float().square().sum(), v)[0].isfinite().all()
    fused_softmax.attention(q.detach(), k, v.detach()).float().sum().backward()
    assert k.grad.isfinite().all()
    assert "backward" not in cudnn


@interpreted
def test_a_call_that_is_kept_leaves_cudnn_once_the_user_switches_it_off(cudnn, monkeypatch):
    monkeypatch.setattr(attention_sdpa, "_has_cudnn", lambda *_: torch.backends.cuda.cudnn_sdp_enabled())
    q, k, v = qkv(20, 35, dtype=BF16)
    fused_softmax.attention(q, k, v)
    assert cudnn == ["forward"]
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
        fused_softmax.attention(q, k, v)
    assert cudnn == ["forward"]


@interpreted
def test_a_gradient_that_is_kept_leaves_cudnn_once_the_user_switches_it_off(cudnn, monkeypatch):
    monkeypatch.setattr(attention_sdpa, "_has_cudnn", lambda *_: torch.backends.cuda.cudnn_sdp_enabled())
    q, k, v = (each.requires_grad_() for each in qkv(20, 35, dtype=BF16))
    outputs = [fused_softmax.attention(q, k, v) for _ in range(2)]
    torch.autograd.grad(outputs[0].float().sum(), (q, k, v))
    assert cudnn.count("backward") == 1
    with torch.nn.attention.sdpa_kernel([torch.nn.attention.SDPBackend.MATH]):
        torch.autograd.grad(outputs[1].float().sum(), (q, k, v))
    assert cudnn.count("backward") == 1


@interpreted
def test_a_compiler_sees_the_same(cudnn):
    q, k, v = (each.requires_grad_() for each in qkv(20, 35, dtype=BF16))
    call = torch.compile(lambda q, k, v: fused_softmax.attention(q, k, v, is_causal=True), backend="aot_eager")
    found = call(q.transpose(1, 2).contiguous().transpose(1, 2), k, v)
    assert found.is_contiguous()
    torch.testing.assert_close(found, fused_softmax.attention(q, k, v, is_causal=True))
    found.float().sum().backward()
    assert cudnn.count("backward") == 1


def test_the_plan_command_says_who_computes_and_why():
    assert report.CONSUMER_ROWS == ROWS
    done = CliRunner().invoke(main, ["plan", "4", "32", "4096", "128", "--dtype", "bfloat16"])
    assert done.exit_code == 0
    assert plan.ENTRIES[-1].note in done.output
    done = CliRunner().invoke(main, ["plan", "4", "32", "4096", "256", "--dtype", "bfloat16", "--json"])
    if torch.cuda.is_available():
        return
    found = json.loads(done.output)
    assert found["plain forward"].startswith("the Gluon kernels")
    assert found["Gluon kernels"]["keys"] == "64 keys x 64 queries, 2 stages"
    assert found["plain kernels, nothing done to scores"]["forward"] == "128 queries x 64 keys, 8 warps, 2 stages"
    assert CliRunner().invoke(main, ["plan", "4", "32", "4096"]).exit_code == 2
    done = CliRunner().invoke(main, ["plan", "1", "8", "512", "257"])
    assert done.exit_code == 2
    assert "at most 256 dims, not 257" in done.output


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("dim", [64, 128])
@pytest.mark.parametrize("options", [{}, {"is_causal": True}], ids=str)
def test_cudnn_itself(dim, options):
    """Where the GPU is one of the plan; elsewhere the kernels' results are held to the same."""
    for lengths in ((128, 128), (197, 300), (257, 129)):
        for given in (
            qkv(*lengths, dim=dim, dtype=BF16, device="cuda"),
            qkv(*lengths, dim=dim, dtype=FP16, heads=4, key_heads=2, device="cuda"),
        ):
            gqa = {"enable_gqa": given[0].shape[1] != given[1].shape[1]}
            assert_attention(*given, **options, **gqa, with_lse=False)
            assert_attention(*given, **options, **gqa)
            last = [each.transpose(1, 2).contiguous().transpose(1, 2) for each in given]
            assert_attention(*last, **options, **gqa, with_lse=False)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_who_runs_on_an_h200():
    """cuDNN's kernels in the profile of a plain call that the plan hands over; none in a deterministic one's."""
    q, k, v = qkv(2048, 2048, dim=64, dtype=BF16, device="cuda")
    params = torch.backends.cuda.SDPAParams(q, k, v, None, 0.0, True, False)
    if torch.cuda.get_device_capability() != (9, 0) or not torch.backends.cuda.can_use_cudnn_attention(params):
        pytest.skip("no GPU of the plan, or no cuDNN")

    def kernels(**options):
        fused_softmax.attention(q, k, v, is_causal=True, **options)
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as seen:
            fused_softmax.attention(q, k, v, is_causal=True, **options)
            torch.cuda.synchronize()
        return " ".join(each.key for each in seen.key_averages())

    n_heads, gpu = q.shape[0] * q.shape[1], attention_sdpa.device_of(0)
    handed = not isinstance(plan.entry_of("forward", 64, 64, 2, n_heads, 2048, 2048, gpu), str)
    assert ("cudnn" in kernels()) == handed
    assert "cudnn" not in kernels(deterministic=True)
    exact = F.scaled_dot_product_attention(q.double(), k.double(), v.double(), is_causal=True)
    torch.testing.assert_close(fused_softmax.attention(q, k, v, is_causal=True).double(), exact, rtol=2e-2, atol=2e-2)


def off_a_boundary(tensor, elements=1):
    """The same values in memory that begins so many elements after 16 bytes."""
    flat = tensor.new_empty(tensor.numel() + 8)
    return flat[elements : elements + tensor.numel()].view(tensor.shape).copy_(tensor)


def with_gaps(tensor, elements):
    """The same values, with so many elements between rows."""
    room = tensor.new_zeros((*tensor.shape[:-1], tensor.shape[-1] + elements))
    return room[..., : tensor.shape[-1]].copy_(tensor)


@interpreted
@pytest.mark.parametrize("which", range(3))
@pytest.mark.parametrize("spoil", [off_a_boundary, lambda each: with_gaps(each, 4)], ids=["base", "rows"])
def test_what_cudnn_would_get_wrong_stays_with_the_kernels(cudnn, spoil, which):
    given = qkv(20, 35, dtype=BF16)
    assert attention_sdpa.wrong_for(*given) is None
    given[which] = spoil(given[which])
    assert "16 bytes" in attention_sdpa.wrong_for(*given)
    assert_attention(*given, is_causal=True, with_lse=False)
    assert cudnn == []
    assert_attention(*[with_gaps(each, 8) for each in qkv(20, 35, dtype=BF16)], with_lse=False)
    assert cudnn == ["forward", "backward"]


def test_so_do_tensors_whose_offsets_need_more_than_31_bits():
    def there(*shape):
        return torch.empty(shape, dtype=BF16, device="meta")

    assert attention_sdpa.wrong_for(there(400, 4, 10484, 128)) is None
    assert "2 ** 31" in attention_sdpa.wrong_for(there(400, 4, 10486, 128))
    assert "2 ** 31" in attention_sdpa.wrong_for(there(2, 2**31, 2, 128)[:, :: 2**23, :, :])
    assert "broadcast" in attention_sdpa.wrong_for(there(1, 4, 1, 128).expand(2, 4, 300, 128))
    assert attention_sdpa.wrong_for(there(1, 4, 300, 128).as_strided((1, 4, 300, 128), (3, 38400, 128, 1))) is None


@interpreted
def test_gradients_of_one_kind_have_the_layouts_of_the_first(cudnn, monkeypatch):
    """torch keeps a graph by the layouts of query, key and value alone; its own graphs are never met."""
    backward, strides = attention_sdpa._backward, []

    def spy(do, query, key, value, output, *rest, **named):
        strides.append((do.stride(), output.stride()))
        assert math.copysign(1, rest[8]) == -1  # the dropout
        return backward(do, query, key, value, output, *rest, **named)

    monkeypatch.setattr(attention_sdpa, "_backward", spy)
    monkeypatch.setattr(attention_sdpa, "_layouts", {})
    given = [each.requires_grad_() for each in qkv(20, 35, dtype=BF16)]
    y = fused_softmax.attention(*given)
    dy = torch.randn_like(y)
    by_length = dy.transpose(1, 2).contiguous().transpose(1, 2)
    found = [
        torch.autograd.grad(y, given, each, retain_graph=True)
        for each in (by_length, dy, off_a_boundary(dy), with_gaps(dy, 4), dy.mT.contiguous().mT)
    ]
    for each in found[1:]:
        torch.testing.assert_close(each, found[0])
    assert set(strides) == {(by_length.stride(), y.stride())}


def _gradients_of(dims, device):
    """Gradients of the output in layouts that a model's code may leave."""
    *lead, n, dim = dims
    yield "contiguous", torch.randn(*lead, n, dim, device=device, dtype=BF16)
    yield "by length", torch.randn(lead[0], n, lead[1], dim, device=device, dtype=BF16).transpose(1, 2)
    yield "of a sum", torch.ones((), device=device, dtype=BF16).expand(*lead, n, dim)
    yield "of row sums", torch.randn(*lead, n, 1, device=device, dtype=BF16).expand(*lead, n, dim)
    yield "transposed", torch.randn(*lead, dim, n, device=device, dtype=BF16).mT
    yield "off a boundary", off_a_boundary(torch.randn(*lead, n, dim, device=device, dtype=BF16), 3)
    yield "gaps", with_gaps(torch.randn(*lead, n, dim, device=device, dtype=BF16), 2)


@pytest.mark.gpu
@pytest.mark.parametrize("torchs_first", [False, True])
@pytest.mark.parametrize("dim", [64, 96, 128])
def test_handed_over_or_not_every_layout_is_right_on_a_gpu(dim, torchs_first):
    """Also where torch has met the same query, key and value before, with a gradient that lies another way."""
    n = 2048 if dim == 96 else 333
    spoils = {
        "none": lambda each: each, "base": off_a_boundary, "rows of 4 more": lambda each: with_gaps(each, 4),
        "rows of 8 more": lambda each: with_gaps(each, 8),
        "by length": lambda each: each.transpose(1, 2).contiguous().transpose(1, 2),
    }  # fmt: skip
    for which in range(3):
        for name, spoil in spoils.items():
            given = [torch.randn(2, heads, n, dim, device="cuda", dtype=BF16) for heads in (4, 2, 2)]
            given[which] = spoil(given[which])
            given = [each.requires_grad_() for each in given]
            exact = [each.detach().double().requires_grad_() for each in given]
            options = {"is_causal": True, "enable_gqa": True}
            if torchs_first and attention_sdpa.wrong_for(*given) is None:
                y = F.scaled_dot_product_attention(*given, **options)
                torch.autograd.grad(y, given, torch.randn_like(y.transpose(1, 2).contiguous()).transpose(1, 2))
            y, truth = fused_softmax.attention(*given, **options), F.scaled_dot_product_attention(*exact, **options)
            assert (y - truth).norm() < 6e-3 * truth.norm(), name
            for layout, dy in _gradients_of(y.shape, "cuda"):
                found = torch.autograd.grad(y, given, dy, retain_graph=True)
                wanted = torch.autograd.grad(truth, exact, dy.double(), retain_graph=True)
                for each, want in zip(found, wanted, strict=True):
                    assert (each - want).norm() < 6e-3 * want.norm(), (name, layout)


@pytest.mark.gpu
def test_gradients_of_2_to_the_31_elements_are_right_on_a_gpu():
    if torch.cuda.get_device_properties(0).total_memory < 70 * 2**30:
        pytest.skip("needs 70 GiB")
    q = torch.randn(400, 4, 10496, 128, device="cuda", dtype=BF16).requires_grad_()
    k, v = (torch.randn(400, 4, 128, 128, device="cuda", dtype=BF16).requires_grad_() for _ in range(2))
    y = fused_softmax.attention(q, k, v)
    found = torch.autograd.grad(y, (q, k, v), torch.ones((), device="cuda", dtype=BF16).expand(y.shape))
    for batch, head in ((0, 0), (399, 3)):
        exact = [each[batch, head].detach().double().requires_grad_() for each in (q, k, v)]
        wanted = torch.autograd.grad((torch.softmax(exact[0] @ exact[1].mT / 128**0.5, -1) @ exact[2]).sum(), exact)
        for each, want in zip(found, wanted, strict=True):
            assert (each[batch, head] - want).norm() < 1e-2 * want.norm()
