"""attention's call: what it refuses, torch's path, tracing, and the reference's derivatives."""

from fractions import Fraction

import pytest
import torch
import torch.nn.functional as F
from attention_cases import BF16, FP16, FP32, FP64, qkv, tensors

import fused_softmax
from fused_softmax.core.plan import H200
from fused_softmax.ops.attention import call as attention_call
from fused_softmax.ops.attention import reference as reference_attention
from fused_softmax.ops.attention.call import Inputs
from fused_softmax.ops.attention.options import Attention
from fused_softmax.ops.attention.plan.tiles import padded, plan_attention

Q, K, V = qkv(4, 6)
WIDE, THREE = torch.zeros(1, 2, 257), torch.zeros(2, 3, 6, 16)


@pytest.mark.parametrize(
    ("error", "says", "arguments"),
    [
        (TypeError, "query must be a Tensor", {"query": 3}),
        (RuntimeError, r"query must be of float16.*int64", {"query": Q.long(), "key": K.long(), "value": V.long()}),
        (RuntimeError, "key must have the query's dtype", {"key": K.half()}),
        (RuntimeError, "value must be on the query's device", {"value": V.to("meta")}),
        (RuntimeError, r"key must have the query's last size 16.*15", {"key": K[..., :15]}),
        (RuntimeError, r"value must have the key's length 6.*5", {"value": V[..., :5, :]}),
        (RuntimeError, "query must have shape", {"query": Q[0, 0, 0]}),
        (RuntimeError, "leading sizes of query, key and value must broadcast", {"key": THREE}),
        (ValueError, "at most 256", {"query": WIDE, "key": WIDE, "value": WIDE[..., :3]}),
        (RuntimeError, r"key must have heads that divide", {"enable_gqa": True, "key": THREE, "value": THREE}),
        (RuntimeError, "value must have the key's 1 heads", {"enable_gqa": True, "key": K[:, :1]}),
        (RuntimeError, "is_causal=True takes no attn_mask", {"is_causal": True, "attn_mask": torch.ones(4, 6)}),
        (RuntimeError, r"attn_mask must broadcast to .*\(2, 2, 4, 6\), got \(3, 6\)", {"attn_mask": torch.ones(3, 6)}),
        (RuntimeError, "attn_mask must be of bool or a float dtype", {"attn_mask": torch.ones(4, 6).long()}),
        (RuntimeError, "bias must be of a float dtype", {"bias": torch.ones(4, 6).bool()}),
        (RuntimeError, "bias must broadcast", {"bias": torch.ones(1, 1, 1, 4, 6)}),
        (TypeError, "bias must be a Tensor", {"bias": 1.0}),
        (RuntimeError, r"sinks must have shape \[heads\], \(2,\), got \(3,\)", {"sinks": torch.ones(3)}),
        (RuntimeError, "alibi_slopes must have shape", {"alibi_slopes": torch.ones(4)}),
        (ValueError, "window must have no negative size", {"window": (-1, 0)}),
        (ValueError, r"window must be \(left, right\)", {"window": 5}),
        (TypeError, r"window must be \(left, right\)", {"window": (1.5, 0)}),
        (ValueError, "softcap must be more than 0", {"softcap": 0.0}),
        (TypeError, "scale must be a number", {"scale": "1"}),
        (TypeError, "return_stats must be names among", {"return_stats": None}),
        (TypeError, "return_stats must be names among", {"return_stats": 5}),
        (ValueError, "causal_align", {"causal_align": "left"}),
        (ValueError, "dropout_p must be 0.0", {"dropout_p": 0.1}),
        (ValueError, "return_stats takes names", {"return_stats": ("weights",)}),
    ],
)  # fmt: skip
def test_bad_input_is_named(error, says, arguments):
    with pytest.raises(error, match=rf"attention: .*{says}" if not says.startswith("leading") else says):
        fused_softmax.attention(**{"query": Q, "key": K, "value": V} | arguments)


@pytest.mark.parametrize("dtype", [FP64, FP32], ids=str)
def test_it_is_torchs(dtype, device):
    q, k, v = (each.to(device, dtype) for each in qkv(7, 9))
    keep, added = (torch.arange(9) % 4 != 1).to(device)[None], tensors((2, 1, 7, 9))[0].to(device, dtype)
    for options in ({}, {"is_causal": True}, {"attn_mask": keep}, {"attn_mask": added}, {"scale": 0.3}):
        torch.testing.assert_close(
            fused_softmax.attention(q, k, v, **options), F.scaled_dot_product_attention(q, k, v, **options)
        )
    shared = k[:, :1], v[:, :1]
    torch.testing.assert_close(
        fused_softmax.attention(q, *shared, enable_gqa=True),
        F.scaled_dot_product_attention(q, *shared, enable_gqa=True),
    )


def test_the_references_derivatives():
    q, k, v, bias, mask, sinks, slopes = (
        each.requires_grad_()
        for each in tensors((1, 2, 3, 4), (1, 1, 4, 4), (1, 1, 4, 2), (2, 1, 4), (3, 4), (2,), (2,), dtype=FP64)
    )

    def call(q, k, v, bias, mask, sinks, slopes):
        return fused_softmax.attention(
            q, k, v, mask, bias=bias, sinks=sinks, alibi_slopes=slopes, softcap=2.0, window=(1, 2), enable_gqa=True,
            return_lse=True,
        )[:2]  # fmt: skip

    given = q, k, v, bias, mask, sinks, slopes
    torch.autograd.gradcheck(call, given, fast_mode=True)
    torch.autograd.gradgradcheck(call, given, fast_mode=True)


def test_rows_that_see_nothing_have_two_derivatives():
    q, k, v = (each.to(FP64).requires_grad_() for each in qkv(5, 3, lead=(1,), heads=1, dim=2))

    def call(q, k, v):
        return fused_softmax.attention(q, k, v, is_causal=True, causal_align="bottom_right")

    assert (call(q, k, v)[..., :2, :] == 0).all()
    torch.autograd.gradcheck(call, (q, k, v))
    torch.autograd.gradgradcheck(call, (q, k, v))


def test_compiled_and_exported(device):
    q, k, v, bias = (each.to(device) for each in [*qkv(9, 17), *tensors((1, 2, 9, 17))])

    def call(q, k, v, bias):
        found = fused_softmax.attention(q, k, v, bias=bias, is_causal=True, return_lse=True, return_stats="entropy")
        return found.output, found.lse, found.stats["entropy"]

    def with_gradients(function):
        leaves = [each.clone().requires_grad_() for each in (q, k, v, bias)]
        found = function(*leaves)
        return *found, *torch.autograd.grad(found[0].sum() + found[1].square().sum(), leaves)

    torch.testing.assert_close(
        with_gradients(torch.compile(call, backend="aot_eager", fullgraph=True)), with_gradients(call)
    )

    class Module(torch.nn.Module):
        def forward(self, q, k, v, bias):
            return call(q, k, v, bias)

    program = torch.export.export(Module(), (q, k, v, bias))
    torch.testing.assert_close(program.module()(q, k, v, bias), call(q, k, v, bias))


def test_vmap_is_one_more_leading_dim(device):
    q, k, v = (each.to(device) for each in qkv(5, 7))
    found = torch.vmap(lambda q, k, v: fused_softmax.attention(q, k, v, is_causal=True))(q, k, v)
    torch.testing.assert_close(found, fused_softmax.attention(q, k, v, is_causal=True), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", ["attn_mask", "bias"])
def test_a_mask_whose_rows_lie_far_apart_is_copied(name):
    """As a query, key or value is: 127 times this stride is more than a tile's offsets hold."""
    q, k, v = (each.to("meta") for each in qkv(128, 16, dtype=BF16))
    rows = torch.empty(128, 17_000_000, device="meta")[:, :16]
    call = attention_call.Call(Inputs(q, k, v)._replace(**{name: rows}), Attention(scale=0.25))
    assert name.removeprefix("attn_") in call.ready


@pytest.mark.parametrize("dtype", [FP32, FP64], ids=str)
def test_a_scale_is_any_real_number(dtype, device):
    given = qkv(5, 7, dtype=dtype, device=device)
    found = fused_softmax.attention(*given, scale=Fraction(1, 4))
    assert torch.equal(found, fused_softmax.attention(*given, scale=0.25))


@pytest.mark.parametrize("itemsize", [2, 4])
@pytest.mark.parametrize("dim", [1, 32, 64, 96, 128, 200, 256])
def test_plans(dim, itemsize):
    """Sides are powers of two that a product takes, and no longer than the length needs."""
    for n_queries, n_keys, extras in ((1, 1, 0), (1, 4096, 1), (49, 49, 2), (4096, 4096, 4)):
        plan = plan_attention(dim, dim, itemsize, n_queries, n_keys, H200, extras)
        for tiles in (plan.forward, plan.keys, plan.queries, plan.bias, plan.sums):
            for side, length in ((tiles.block_m, n_queries), (tiles.block_n, n_keys)):
                assert side in (16, 32, 64, 128)
                assert side == 16 or side < 2 * length
            assert tiles.num_warps in (4, 8)
    assert padded(dim) >= max(dim, 16)


def test_half_precision_by_torchs_operations(device):
    """Of a CPU without the interpreter; gradients have the dtypes of what they are of."""
    for dtype in (FP16, BF16):
        q, k, v = (each.to(device, dtype).requires_grad_() for each in qkv(5, 7))
        y = reference_attention.attention(q, k, v, arithmetic=FP32)
        assert y.dtype == dtype
        assert {each.dtype for each in torch.autograd.grad(y.sum(), (q, k, v))} == {dtype}
