"""attention as it is measured: inputs, the formula that is its truth, our calls, and others'.

A gradient is that of all inputs, with the forward pass, as one tensor: parts of the others are summed into the values'.
"""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from fused_softmax import attention
from fused_softmax.bench.cases import Case
from fused_softmax.bench.entries import ceiling
from fused_softmax.bench.entries.attention_kinds import KINDS, Kind, flops
from fused_softmax.bench.entries.makers import Call
from fused_softmax.bench.entries.operation import Operation
from fused_softmax.core.plan import Device
from fused_softmax.ops.attention.plan.sdpa import entry_of

SCORES = 2**26  # elements of a step of the formula in float64: half a GiB for each of its tensors


def kind_of(case: Case) -> Kind:
    return KINDS[case.operation]


def inputs(case: Case, generator: torch.Generator) -> tuple[Tensor, ...]:
    """(query, key, value, and the output's gradient, a bias or sinks where there are); of decode the keys first."""
    kind = kind_of(case)
    n_batches, n_heads, length, dim = case.shape

    def normal(*shape: int) -> Tensor:
        options: dict[str, Any] = {"dtype": getattr(torch, case.dtype), "device": generator.device}
        return torch.randn(shape, generator=generator, **options)

    if kind.decode:
        k, v = (normal(*case.shape) for _ in range(2))
        return k, v, normal(n_batches, n_heads * kind.group, 1, dim)
    of_keys = n_batches, max(1, n_heads // kind.group), length, dim
    q, k, v = normal(*case.shape).mul_(2), normal(*of_keys), normal(*of_keys)
    do = (normal(*case.shape),) if kind.gradient else ()
    bias = (normal(1, n_heads, length, length),) if kind.bias else ()
    return q, k, v, *do, *bias, *((normal(n_heads),) if kind.sinks else ())


def held_bytes(case: Case) -> int:
    """Of the inputs and the result."""
    kind = kind_of(case)
    n_batches, n_heads, length, dim = case.shape
    keys = case.elements // (1 if kind.decode else kind.group)
    queries = n_batches * n_heads * kind.group * dim if kind.decode else case.elements
    result = keys if kind.gradient else queries
    n = queries + 2 * keys + result + (queries if kind.gradient else 0)
    return case.itemsize * (n + kind.bias * n_heads * length * length + kind.sinks * n_heads)


def checking_bytes(case: Case) -> int:
    """Of the inputs and the scores of a step of `by_heads`, in float64, some eight times."""
    kind = kind_of(case)
    scores = kind.group * (1 if kind.decode else case.shape[-2]) * case.shape[-2]
    step = min(case.shape[0], batches_at_once(scores))
    return 8 * 8 * (step * scores + case.elements) + 8 * held_bytes(case)


def _parts(kind: Kind, given: tuple[Tensor, ...]) -> Any:
    """(query, key, value, bias, sinks, the gradient of the output) of a call's inputs."""
    if kind.decode:
        k, v, q = given
        return q, k, v, None, None, None
    q, k, v, *more = given
    do = more.pop(0) if kind.gradient else None
    return q, k, v, more[0] if kind.bias else None, more[-1] if kind.sinks else None, do


def as_call(case: Case, function: Callable[..., Tensor]) -> Call:
    """A call of function(query, key, value, bias, sinks), or of its gradient."""
    kind = kind_of(case)

    def forward(*given: Tensor) -> Tensor:
        q, k, v, bias, sinks, _ = _parts(kind, given)
        return function(q, k, v, bias, sinks)

    def gradient(*given: Tensor) -> Tensor:
        q, k, v, bias, sinks, do = _parts(kind, given)
        with torch.enable_grad():
            leaves = [None if each is None else each.detach().requires_grad_() for each in (q, k, v, bias, sinks)]
            found = function(*leaves)
            there = [each for each in leaves if each is not None]
            gradients = iter(torch.autograd.grad(found, there, do))
        return in_one(*(None if each is None else next(gradients) for each in leaves))

    return gradient if kind.gradient else forward


def in_one(dq: Any, dk: Any, dv: Any, dbias: Any, dsinks: Any) -> Tensor:
    """The values' gradient, with sums of the others in its first rows: an error of each of them shows.

    Of keys and of a bias every second: over all keys they sum to 0.
    """
    n_batches, n_heads, length, _ = dv.shape
    scale = length**-0.5
    dv[:, :, 0] += dq.sum(2).view(n_batches, n_heads, -1, dq.shape[-1]).sum(2) * scale
    dv[:, :, 1] += dk[:, :, ::2].sum(2) * scale
    if dbias is not None:
        dv[0, :, :, 0] += dbias[0, :, :, ::2].sum(-1) * scale
    if dsinks is not None:
        dv[0, :, 2, 0] += dsinks.view(n_heads, -1).sum(-1) * scale
    return dv


# By torch's operations.


def formula(case: Case) -> Call:
    """Composed. In float64 head by head, for their scores together would fill a GPU's memory."""
    kind = kind_of(case)

    def whole(*given: Tensor) -> Tensor:
        found = _composed(kind, *_parts(kind, given))
        return in_one(*found) if kind.gradient else found[0]

    def call(*given: Tensor) -> Tensor:
        return by_heads(case)(*given) if given[0].dtype == torch.float64 else whole(*given)

    return call


def by_heads(case: Case) -> Call:
    """The formula for one head of keys after another, each of as many of the batch at once as SCORES allow."""
    kind = kind_of(case)

    def call(*given: Tensor) -> Tensor:
        q, k, v, bias, sinks, do = _parts(kind, given)
        group = q.shape[1] // k.shape[1]
        step = batches_at_once(group * q.shape[2] * k.shape[2])
        heads = []
        for h in range(k.shape[1]):
            of_keys, of_queries = slice(h, h + 1), slice(h * group, (h + 1) * group)
            of_bias = None if bias is None else bias[:, of_queries]
            of_sinks = None if sinks is None else sinks[of_queries]
            parts = []
            for start in range(0, q.shape[0], step):
                rows = slice(start, start + step)
                of_do = None if do is None else do[rows, of_queries]
                of_qkv = q[rows, of_queries], k[rows, of_keys], v[rows, of_keys]
                parts.append(_composed(kind, *of_qkv, of_bias, of_sinks, of_do))
            heads.append([None if each[0] is None else torch.cat(each) if i < 3 else torch.stack(each).sum(0)
                          for i, each in enumerate(zip(*parts, strict=True))])  # fmt: skip
        found: list[Any] = [None if each[0] is None else torch.cat(each, 0 if i == 4 else 1)
                            for i, each in enumerate(zip(*heads, strict=True))]  # fmt: skip
        return in_one(*found) if kind.gradient else found[0]

    return call


def batches_at_once(scores: int) -> int:
    """How many of a batch a step takes: a loop over thousands of short ones would take seconds for its launches."""
    return max(1, SCORES // scores)


def _composed(kind: Kind, q: Tensor, k: Tensor, v: Tensor, bias: Any, sinks: Any, do: Any) -> tuple[Any, ...]:
    """(output,), or the gradients of query, key, value, bias and sinks. Weights are of the inputs' dtype."""
    wide = torch.float64 if q.dtype == torch.float64 else torch.float32
    scale, group = q.shape[-1] ** -0.5, q.shape[1] // k.shape[1]
    if group > 1:
        k, v = k.repeat_interleave(group, 1), v.repeat_interleave(group, 1)
    z = (q @ k.transpose(-2, -1)).to(wide) * scale
    capped = None
    if kind.softcap is not None:
        capped = torch.tanh(z / kind.softcap)
        z = kind.softcap * capped
    z = z if bias is None else z + bias.to(wide)
    if kind.is_causal:
        rows, cols = (torch.arange(n, device=z.device) for n in z.shape[-2:])
        hidden = cols > rows[:, None]
        if kind.window is not None:
            hidden = hidden | (cols < rows[:, None] - kind.window)
        z = z.masked_fill(hidden, -torch.inf)
    if sinks is not None:
        z = torch.cat([z, sinks.to(wide)[:, None, None].expand(*z.shape[:-1], 1)], -1)
    p = torch.softmax(z, -1)
    p, of_sinks = (p, None) if sinks is None else (p[..., :-1], p[..., -1])
    half = p.to(q.dtype)
    if do is None:
        return (half @ v,)
    dp = (do @ v.transpose(-2, -1)).to(wide)
    delta = (p * dp).sum(-1)
    ds = p * (dp - delta[..., None])
    dbias = None if bias is None else ds.sum(0, keepdim=True).to(q.dtype)
    dsinks = None if of_sinks is None else -(of_sinks * delta).sum((0, 2)).to(q.dtype)
    ds = (ds if capped is None else ds * (1 - capped.square())).to(q.dtype)
    dk, dv = (ds.transpose(-2, -1) @ q) * scale, half.transpose(-2, -1) @ do
    if group > 1:
        dk, dv = (each.unflatten(1, (-1, group)).sum(2) for each in (dk, dv))
    return (ds @ k) * scale, dk, dv, dbias, dsinks


# Calls.


def own(case: Case, **options: Any) -> Call:
    kind = kind_of(case)
    given: dict[str, Any] = {
        "is_causal": kind.is_causal,
        "softcap": kind.softcap,
        "window": None if kind.window is None else (kind.window, None),
        "enable_gqa": kind.group > 1,
    }

    def function(q, k, v, bias, sinks):
        return attention(q, k, v, bias=bias, sinks=sinks, **given, **options)

    return as_call(case, function)


def by_torch(case: Case) -> Call:
    """scaled_dot_product_attention; composed, head by head, of what that has not."""
    kind = kind_of(case)

    def function(q, k, v, bias, sinks):
        return F.scaled_dot_product_attention(q, k, v, bias, is_causal=kind.is_causal, enable_gqa=kind.group > 1)

    return as_call(case, function) if kind.plain else by_heads(case)


def by_sdpa(case: Case, backend: str) -> Call:
    """One of its four ways."""
    from torch.nn.attention import SDPBackend, sdpa_kernel

    call = by_torch(case)

    def forced(*given: Tensor) -> Tensor:
        with sdpa_kernel(getattr(SDPBackend, backend)):
            return call(*given)

    return forced


def by_flex(case: Case) -> Call:
    """FlexAttention, compiled for the shape; sinks by its lse."""
    from torch.nn.attention.flex_attention import create_block_mask, flex_attention

    torch.compiler.reset()
    compiled = torch.compile(flex_attention, dynamic=False)
    kind, length, mask = kind_of(case), case.shape[-2], None
    if kind.is_causal:
        reach = length if kind.window is None else kind.window
        mask = create_block_mask(lambda b, h, i, j: (j <= i) & (j >= i - reach), None, None, length, length)

    def function(q, k, v, bias, sinks):
        def scored(score, b, h, i, j):
            if kind.softcap is not None:
                score = kind.softcap * torch.tanh(score / kind.softcap)
            return score if bias is None else score + bias[0, h, i, j]

        score_mod = None if bias is None and kind.softcap is None else scored
        options: dict[str, Any] = {"score_mod": score_mod, "block_mask": mask, "enable_gqa": kind.group > 1}
        options["return_lse"] = sinks is not None
        found: Any = compiled(q, k, v, **options)
        if sinks is None:
            return found
        y, lse = found
        return y * torch.sigmoid(lse - sinks.float()[:, None])[..., None].to(y.dtype)

    return as_call(case, function)


def by_xformers(case: Case) -> Call:
    from xformers.ops import LowerTriangularMask, memory_efficient_attention

    kind = kind_of(case)

    def function(q, k, v, bias, sinks):
        added = LowerTriangularMask() if kind.is_causal else None
        if bias is not None:
            added = bias.expand(q.shape[0], -1, -1, -1)
        return memory_efficient_attention(*(each.transpose(1, 2) for each in (q, k, v)), added).transpose(1, 2)

    return as_call(case, function)


def by_flash_attention_3(case: Case) -> Call:
    from flash_attn_interface import flash_attn_func

    kind = kind_of(case)

    def function(q, k, v, bias, sinks):
        found = flash_attn_func(
            *(each.transpose(1, 2) for each in (q, k, v)), causal=kind.is_causal, softcap=kind.softcap or 0.0
        )
        return (found[0] if isinstance(found, tuple) else found).transpose(1, 2)

    return as_call(case, function)


def by_cuequivariance(case: Case) -> Call:
    from cuequivariance_torch import triangle_attention

    def function(q, k, v, bias, sinks):
        return triangle_attention(q[None], k[None], v[None], bias[None], scale=q.shape[-1] ** -0.5)[0]

    return as_call(case, function)


def handed_over(case: Case, device: Device) -> dict[str, str]:
    """Who computes each pass of our call, for the record."""
    kind = kind_of(case)
    plain = kind == Kind(is_causal=kind.is_causal, gradient=kind.gradient)
    *heads, length, dim = case.shape
    found = {}
    for which in ("forward", "backward")[: 1 + kind.gradient]:
        entry = entry_of(which, dim, dim, case.itemsize, math.prod(heads), length, length, device)  # type: ignore[arg-type]
        found[which] = "cuDNN" if plain and not isinstance(entry, str) else "own kernels"
    return found


def ceilings(case: Case) -> list[ceiling.Ceiling]:
    """A product of matrices; of a single query a kernel that reads as much."""
    done = flops(case)
    return ceiling.reads() if done is None else [ceiling.Square(held_bytes(case), done)]


# One query for each of four heads of keys, or as many rows as a tile of the interpreted kernels takes.
_SAMPLES = {"attention_decode": Case((2, 2, 70, 16)), "attention_sinks": Case((2, 8, 140, 16))}

ENTRIES = {
    name: Operation(
        inputs=inputs,
        own=own,
        formula=formula,
        eager=by_torch,
        held_bytes=held_bytes,
        ceilings=ceilings,
        parameters=lambda case: kind_of(case).parameters,
        whole=True,
        checking_bytes=checking_bytes,
        of_torchs=2.0,
        who=handed_over,
        sample=_SAMPLES.get(name.removesuffix("_gradient"), Case((2, 2, 41, 16))),
    )
    for name in KINDS
}
