"""What attention is held to: twice the error of torch's operations in the same dtype; and tiles that are small."""

import torch

import fused_softmax
from fused_softmax.ops.attention import reference as reference_attention
from fused_softmax.ops.attention.plan.tiles import AttentionPlan, Tiles

FP32, FP16, BF16, FP64 = torch.float32, torch.float16, torch.bfloat16, torch.float64
_SQUARE, _TALL, _WIDE = Tiles(16, 16, 4, 1), Tiles(32, 16, 4, 1), Tiles(16, 32, 4, 1)
PLANS = {
    "square": AttentionPlan(*[_SQUARE] * 5),
    "oblong": AttentionPlan(forward=_TALL, keys=_TALL, queries=_WIDE, bias=_WIDE, sums=_TALL),
}
# By dtype: eps times this, and the greatest value, is within anybody's error.
_ROUNDINGS = {FP16: 1, BF16: 1, FP32: 16}


def tensors(*shapes, dtype=FP32, seed=0, peak=2.0):
    """Normal values times peak, so that rows of scores have few great weights."""
    generator = torch.Generator().manual_seed(seed)
    return [(torch.randn(*shape, generator=generator, dtype=FP64) * peak**0.5).to(dtype) for shape in shapes]


def qkv(n_queries, n_keys, *, lead=(2,), heads=2, key_heads=None, dim=16, value_dim=None, dtype=FP32, device="cpu"):
    of_keys = (*lead, key_heads or heads, n_keys)
    shapes = (*lead, heads, n_queries, dim), (*of_keys, dim), (*of_keys, value_dim or dim)
    return [each.to(device) for each in tensors(*shapes, dtype=dtype)]


def results(of, q, k, v, arguments, dtype=None, with_lse=True, weights=None):
    """(output, lse, gradients by name) of a function, its float tensors taken in dtype, lse and output weighed."""
    given = {"query": q, "key": k, "value": v, **arguments}
    leaves = {
        name: (each if dtype is None else each.to(dtype)).detach().requires_grad_(name != "alibi_slopes")
        if isinstance(each, torch.Tensor) and each.is_floating_point()
        else each
        for name, each in given.items()
    }
    named = dict(leaves)
    q, k, v = (named.pop(name) for name in ("query", "key", "value"))
    found = of(q, k, v, **named, return_lse=True)
    output, lse = found.output, found.lse
    do, dlse = weights or weights_of(output, lse)
    of_results = [output, lse] if with_lse else [output]
    wanted = {name: leaf for name, leaf in leaves.items() if isinstance(leaf, torch.Tensor) and leaf.requires_grad}
    given = [do.to(output.dtype), dlse.to(lse.dtype)][: len(of_results)]
    gradients = torch.autograd.grad(of_results, list(wanted.values()), given)
    return {"output": output.detach(), "lse": lse.detach()} | dict(zip(wanted, gradients, strict=True))


def weights_of(output, lse):
    do, dlse = tensors(output.shape, lse.shape, seed=7)
    return do.to(output.device), dlse.to(lse.device)


def assert_attention(q, k, v, **arguments):
    """Results and gradients are off the truth, float64's, by at most twice what torch's operations are in the dtype."""
    with_lse = arguments.pop("with_lse", True)
    ours = results(fused_softmax.attention, q, k, v, arguments, with_lse=with_lse)

    def composed(*given, **named):
        return reference_attention.attention(*given, **named, arithmetic=q.dtype)

    weights = weights_of(ours["output"], ours["lse"])
    truth = results(reference_attention.attention, q, k, v, arguments, FP64, with_lse, weights)
    theirs = results(composed, q, k, v, arguments, None, with_lse, weights)
    assert ours.keys() == truth.keys()
    # dS is P (dP - delta), where delta is of the rounded output, and their difference is rounded in fp32: with one key
    # nothing else is left of it.
    terms = (weights[0].double() * truth["output"]).abs().sum(-1)
    rounding, of_output = (torch.finfo(each).eps * (terms.max() if terms.numel() else 0) for each in (FP32, q.dtype))
    for name, exact in truth.items():
        found, torchs = ours[name], theirs[name]
        given = arguments.get(name, {"query": q, "key": k, "value": v}.get(name))
        assert (found.shape, found.dtype) == (
            exact.shape,
            FP32 if name == "lse" else (q if given is None else given).dtype,
        )
        assert torch.equal(found.isinf(), exact.isinf()), name
        assert not found.isnan().any(), name
        if not found.numel():
            continue
        finite = exact.isfinite()
        size = exact[finite].abs().max() if finite.any() else torch.zeros(())
        error, allowed = (
            (each.double() - exact)[finite].abs().max() if finite.any() else torch.zeros(()) for each in (found, torchs)
        )
        dtype = q.dtype if name == "lse" else found.dtype
        allowed = 2 * allowed + _ROUNDINGS[dtype] * torch.finfo(dtype).eps * (size + 0.1)
        if name in ("query", "key"):
            other = k if name == "query" else q
            largest = other.abs().max() if other.numel() else 0
            allowed += rounding * arguments.get("scale", q.shape[-1] ** -0.5) * largest
        if name == "bias":
            allowed += of_output / 2
        assert error <= allowed, f"{name}: {error:.3g} off, {error / allowed:.3g} times what is allowed"
    return ours
