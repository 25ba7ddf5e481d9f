"""Softmax and logsumexp as they are measured: of rows, of dims, of scores, and their gradients."""

import math
from collections.abc import Callable
from functools import cache

import torch
from torch import Tensor

from fused_softmax import classic as classics
from fused_softmax import logsumexp, softmax
from fused_softmax.bench.cases import Case
from fused_softmax.bench.entries import ceiling
from fused_softmax.bench.entries.makers import Call, Maker
from fused_softmax.bench.entries.operation import Inputs, Operation, alone, along, logits, widest
from fused_softmax.ops.softmax import calls as softmax_calls

SCALE = 0.125  # of causal scores; a power of two, so that scaling rounds nothing


def output_and_gradient(function: Call, mean: float) -> Callable[[Case, torch.Generator], Inputs]:
    """(dy, y): normal values around `mean`, and `function` of peaked logits."""

    def inputs(case: Case, generator: torch.Generator) -> Inputs:
        y = function(logits(case, generator), dim=-1)
        return torch.randn(y.shape, device=y.device, dtype=y.dtype, generator=generator).add_(mean), y

    return inputs


def own_backward(log: bool) -> Maker:
    return lambda case: lambda dy, y: softmax_calls.backward(dy, y, -1, y.dtype, log, False, 1.0)


def torch_backward(function: Call) -> Maker:
    return lambda case: lambda dy, y: function(dy, y, -1, y.dtype)


def softmax_gradient(case: Case) -> Call:
    def call(dy, y):
        dy, y, dtype = dy.to(widest(y)), y.to(widest(y)), y.dtype
        return (y * (dy - (y * dy).sum(-1, keepdim=True))).to(dtype)

    return call


def log_softmax_gradient(case: Case) -> Call:
    def call(dy, y):
        dy, y, dtype = dy.to(widest(y)), y.to(widest(y)), y.dtype
        return (dy - y.exp() * dy.sum(-1, keepdim=True)).to(dtype)

    return call


def scores(case: Case, generator: torch.Generator) -> Inputs:
    """Logits that are peaked after scaling."""
    return (logits(case, generator).div_(SCALE),)


def causal(case: Case) -> Call:
    """Causal softmax with a mask made from indices, which torch.compile can fuse."""
    n_queries, n_keys = case.shape[-2:]

    def call(x):
        last = torch.arange(n_keys - n_queries, n_keys, device=x.device)[:, None]
        hidden = torch.arange(n_keys, device=x.device) > last
        return torch.softmax((x * SCALE).masked_fill(hidden, -math.inf), -1)

    return call


def causal_eager(case: Case) -> Call:
    """Causal softmax with a mask made beforehand."""
    n_queries, n_keys = case.shape[-2:]

    def call(x):
        return torch.softmax((x * SCALE).masked_fill(above_diagonal(n_queries, n_keys, x.device), -math.inf), -1)

    return call


@cache
def above_diagonal(n_queries: int, n_keys: int, device: torch.device) -> Tensor:
    return torch.ones(n_queries, n_keys, dtype=torch.bool, device=device).triu(n_keys - n_queries + 1)


def above_diagonal_elements(case: Case) -> int:
    """How many elements causality hides: no key from the last query, one more from each query before it."""
    n_queries, n_keys = case.shape[-2:]
    return case.elements // (n_queries * n_keys) * sum(min(i, n_keys) for i in range(n_queries))


def mask_shape(case: Case) -> list[int]:
    """One mask for all heads of a sequence: [batch, 1, queries, keys]."""
    return [case.shape[0], 1, *case.shape[2:]]


def bias_shape(case: Case) -> list[int]:
    """One bias for each head, shared by all sequences: [1, heads, queries, keys]."""
    return [1, *case.shape[1:]]


def with_mask(case: Case, generator: torch.Generator) -> Inputs:
    """Logits and a mask that keeps three keys in four, always the first one, so that no row is empty."""
    mask = torch.rand(mask_shape(case), device=generator.device, generator=generator) > 0.25
    mask[..., 0] = True
    return logits(case, generator), mask


def with_bias(case: Case, generator: torch.Generator) -> Inputs:
    dtype = getattr(torch, case.dtype)
    bias = torch.randn(bias_shape(case), device=generator.device, dtype=dtype, generator=generator)
    return logits(case, generator), bias


def classic(case: Case, name: str) -> Call:
    return getattr(classics, name)


def liger(case: Case) -> Call:
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return LigerSoftmaxFunction.apply


def liger_backward(case: Case) -> Call:
    from liger_kernel.ops.softmax import _softmax_backward
    from liger_kernel.ops.utils import calculate_settings

    def call(dy, y):
        block, num_warps = calculate_settings(y.shape[-1])
        return _softmax_backward(dy, y, block, num_warps, False)

    return call


def quack(case: Case) -> Call:
    from quack.softmax import softmax

    return softmax


def quack_backward(case: Case) -> Call:
    from quack.softmax import softmax_bwd

    return softmax_bwd


ENTRIES = {
    "softmax": Operation(
        inputs=alone,
        own=lambda case: softmax,
        formula=along(torch.softmax),
        held_bytes=lambda case: 2 * case.tensor_bytes,
        ceilings=lambda case: ceiling.copies(),
        planned=1,
    ),
    "softmax_dim": Operation(
        inputs=alone,
        own=along(softmax),
        formula=along(torch.softmax),
        held_bytes=lambda case: 2 * case.tensor_bytes,
        ceilings=lambda case: ceiling.copies(),
        sample=Case((3, 131, 37), dim=1),
    ),
    "softmax_float32": Operation(
        inputs=alone,
        own=lambda case: lambda x: softmax(x, dtype=torch.float32),
        formula=lambda case: lambda x: torch.softmax(x, dim=-1, dtype=widest(x)),
        held_bytes=lambda case: case.tensor_bytes + 4 * case.elements,
        ceilings=lambda case: ceiling.copies(torch.float32),
        parameters=lambda case: {"result": "float32"},
        sample=Case((61, 781), "float16"),
    ),
    "softmax_causal": Operation(
        inputs=scores,
        own=lambda case: lambda x: softmax(x, scale=SCALE, is_causal=True),
        formula=causal,
        eager=causal_eager,
        held_bytes=lambda case: 2 * case.tensor_bytes,
        unread_bytes=lambda case: above_diagonal_elements(case) * case.itemsize,
        ceilings=lambda case: ceiling.copies(share=1 - above_diagonal_elements(case) / case.elements),
        parameters=lambda case: {"scale": SCALE},
        sample=Case((1, 3, 61, 131)),
    ),
    "softmax_masked": Operation(
        inputs=with_mask,
        own=lambda case: lambda x, mask: softmax(x, mask=mask),
        formula=lambda case: lambda x, mask: torch.softmax(x.masked_fill(~mask, -math.inf), -1),
        held_bytes=lambda case: 2 * case.tensor_bytes + math.prod(mask_shape(case)),
        ceilings=lambda case: ceiling.copies(),
        parameters=lambda case: {"mask": mask_shape(case)},
        sample=Case((2, 3, 17, 131)),
    ),
    "softmax_biased": Operation(
        inputs=with_bias,
        own=lambda case: lambda x, bias: softmax(x, mask=bias),
        formula=lambda case: lambda x, bias: torch.softmax(x + bias, -1),
        held_bytes=lambda case: 2 * case.tensor_bytes + math.prod(bias_shape(case)) * case.itemsize,
        ceilings=lambda case: ceiling.copies(),
        parameters=lambda case: {"bias": bias_shape(case)},
        sample=Case((2, 3, 17, 131)),
    ),
    "softmax_backward": Operation(
        inputs=output_and_gradient(torch.softmax, mean=1),  # a lost part of sum y * dy then shows in every row
        own=own_backward(log=False),
        formula=softmax_gradient,
        eager=torch_backward(torch._softmax_backward_data),
        held_bytes=lambda case: 3 * case.tensor_bytes,
        ceilings=lambda case: ceiling.adds(),
        planned=2,
        own_needs_gpu=True,
    ),
    "log_softmax_backward": Operation(
        inputs=output_and_gradient(torch.log_softmax, mean=0),
        own=own_backward(log=True),
        formula=log_softmax_gradient,
        eager=torch_backward(torch._log_softmax_backward_data),
        held_bytes=lambda case: 3 * case.tensor_bytes,
        ceilings=lambda case: ceiling.adds(),
        planned=2,
        own_needs_gpu=True,
    ),
    "logsumexp": Operation(
        inputs=alone,
        own=along(logsumexp),
        formula=along(torch.logsumexp),
        held_bytes=lambda case: case.tensor_bytes + case.n_rows * case.itemsize,
        ceilings=lambda case: ceiling.reads(),
        sample=Case((3, 131, 37), dim=1),
    ),
}
