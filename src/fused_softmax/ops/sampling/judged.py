"""Launches that judge rows: what filters keep of each, and its mass. And masks of rows, which write what is kept."""

from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from fused_softmax.core import launch
from fused_softmax.core.device import device_of
from fused_softmax.ops.sampling.kernels.judged import _judge, _sum_kept, _write_kept
from fused_softmax.ops.sampling.kernels.kept import _stretches
from fused_softmax.ops.sampling.kernels.spec import SampleSpec
from fused_softmax.ops.sampling.kernels.wide import _bound, _weigh
from fused_softmax.ops.sampling.launches import (
    STRETCH,
    Arguments,
    Numbers,
    Written,
    is_few,
    of_a_call,
    readable,
    registers_of_choosing,
    spec_of,
)
from fused_softmax.ops.sampling.options import Sampling
from fused_softmax.ops.sampling.plan import DrawPlan, plan_draws


@dataclass(frozen=True)
class Rows:
    """Judged rows: what their kernels were given. record: int64, of each row; valid: bool, which can be drawn from."""

    spec: SampleSpec
    plan: DrawPlan
    record: Tensor
    valid: Tensor
    tensors: dict[str, Any]
    scalars: dict[str, Any]


def judge_rows(logits: Tensor, options: Sampling, of_probs: bool = False, masks: bool = False) -> Rows:
    """The distributions that filters leave of rows of logits [n_rows, n_cols], or of probabilities.

    masks: whether what is kept is asked for, also of rows that have no distribution, and no mass.
    """
    n_rows, n_cols = logits.shape
    index, device = logits.get_device(), logits.device
    n_draws = n_rows if options.row_indices is None else options.row_indices.shape[0]
    plan = plan_draws(n_draws, n_cols, logits.element_size(), device_of(index))
    spec = replace(_spec_of(plan, options, index, logits.dtype, of_probs), masks=masks)
    record = torch.empty(n_draws * spec.scratch, dtype=torch.int64, device=device)
    valid = torch.empty(n_draws, dtype=torch.bool, device=device)
    read = readable(logits, options.logit_bias, options.bitmask, options.row_indices)
    numbers = Numbers(options.temperature, options.top_k, options.top_p, options.min_p, 0, 0)
    written = Written(record, valid=valid)
    arguments = Arguments(read, written, numbers, n_rows, n_cols, plan)
    if n_draws:
        values = of_a_call(read, written, numbers)
        for launched, wanted in _launches(plan, spec, arguments, index, options.min_p is not None):
            launched(*wanted(values))
    return Rows(spec, plan, record, valid, *arguments.of_rows)


def _spec_of(plan: DrawPlan, options: Sampling, index: int, dtype: torch.dtype, of_probs: bool) -> SampleSpec:
    """Of rows that are judged alone, as the boundary of a draw is sought."""
    spec = spec_of(plan, options, index, True, dtype)
    greedy = isinstance(options.temperature, Tensor) or options.temperature == 0
    filtered = options.top_k is not None or options.top_p is not None
    wide = filtered and not is_few(options.top_k)
    ranked = filtered or greedy
    capacity = 2 * plan.capacity if wide else plan.capacity
    return replace(
        spec, first=False, by_row=False, counted=options.top_p is None and options.min_p is None, ranked=ranked,
        wide=wide, capacity=capacity, candidates=2 * capacity if ranked else 1, listed=plan.listed if wide else 0,
        of_probs=of_probs, grain_bits=0 if of_probs else spec.grain_bits,
    )  # fmt: skip


def _launches(plan: DrawPlan, spec: SampleSpec, arguments: Arguments, index: int, bounded: bool) -> list:
    n_parts, n_wide = -(-plan.n_cols // (STRETCH * plan.stretches)), plan.n_draws * plan.wide_parts
    cut = plan.wide_parts, plan.wide_stretches
    capped: dict[str, Any] = {"maxnreg": registers_of_choosing()} if spec.wide and spec.ptx else {}
    launches = [
        arguments.prepare(_stretches, plan.n_draws * n_parts, spec, index, plan.num_warps),
        arguments.prepare(
            _judge, plan.n_draws, replace(spec, stretches=plan.kept_warps), index, plan.kept_warps, **capped
        ),
    ]
    if spec.wide:
        of_bound = replace(spec, stretches=plan.bound_warps)
        launches += [
            arguments.prepare(_weigh, n_wide, spec, index, plan.num_warps, *cut),
            arguments.prepare(_bound, plan.n_draws, of_bound, index, plan.bound_warps),
        ]
    if not spec.masks and (spec.wide or (bounded and not spec.ranked)):
        launches.append(arguments.prepare(_sum_kept, n_wide, spec, index, plan.num_warps, *cut))
    return launches


def mask_rows(logits: Tensor, **filter: Any) -> Tensor:
    """`reference.mask_logits` by one filter, for rows that kernels take."""
    rows = judge_rows(logits, Sampling(**filter), masks=True)
    plan, y = rows.plan, torch.empty(logits.shape, dtype=logits.dtype, device=logits.device)
    if not y.numel():
        return y
    (read, *_), index = readable(logits, None, None, None), logits.get_device()
    tensors = rows.record, rows.valid, read, y
    scalars = rows.scalars["strides"], logits.shape[0], plan.n_cols, plan.wide_parts, plan.wide_stretches
    launch.prepare(
        _write_kept, plan.n_draws * plan.wide_parts, tensors, scalars, {"K": rows.spec}, device=index,
        num_warps=plan.num_warps, plan=plan,
    )(*tensors)  # fmt: skip
    return y
