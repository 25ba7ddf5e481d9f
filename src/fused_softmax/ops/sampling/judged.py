"""Launches that judge rows: they find what filters keep of each row, and its mass. Others write what is kept."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fused_softmax.core import launch
from fused_softmax.core.calls import allocator
from fused_softmax.core.device import device_of
from fused_softmax.core.runner import overlapping, overlaps
from fused_softmax.ops.sampling.kernels.spec import SampleSpec
from fused_softmax.ops.sampling.launches import (
    READ,
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
from fused_softmax.ops.sampling.reference import Number

_MOST_BYTES = 2**24  # of scratch, for rows that are filtered at a time
_ALIGNED = 16  # rows: after so many, a row of any dtype and length is aligned as the first one is


@dataclass(frozen=True)
class Rows:
    """Judged rows: the arguments of kernels that read them. tensors: by the names of parameters without `_ptr`.

    scratch: int64, the records. valid: bool, which rows can be drawn from. temperature: a number; 1 if a tensor has one
    for each row.
    """

    tensors: dict[str, Tensor | None]
    temperature: float

    @property
    def scratch(self) -> Tensor:
        return self.tensors["scratch"]  # type: ignore[return-value]

    @property
    def valid(self) -> Tensor:
        return self.tensors["valid"]  # type: ignore[return-value]


class Judging:
    """Judges rows [n_rows, n_cols] of logits, or of probabilities, like those that it is made for, once it is prepared.

    of_probs: whether rows are probabilities, judged by their logarithms. linear: whether they are probabilities, judged
    as they are. masks: whether a call needs what is kept and not its mass, also of rows that have no distribution.
    """

    def __init__(
        self, logits: Tensor, options: Sampling, of_probs: bool = False, linear: bool = False, masks: bool = False
    ):
        self.n_rows, n_cols = logits.shape
        index, device = logits.get_device(), logits.device
        self.n_draws = self.n_rows if options.row_indices is None else options.row_indices.shape[0]
        self.plan = plan_draws(self.n_draws, n_cols, logits.element_size(), device_of(index))
        self.spec = replace(_spec_of(self.plan, options, index, logits.dtype, of_probs, masks), linear=linear)
        self._empty = allocator(device)
        read = readable(logits, options.logit_bias, options.bitmask, options.row_indices)
        written, numbers = self._written(), _numbers(options)
        arguments = Arguments(read, written, numbers, self.n_rows, n_cols, self.plan)
        self.strides = arguments.strides
        # Only until they are prepared, because they hold tensors.
        self._preparing = (
            _launches(self.plan, self.spec, arguments, index, _is_bounded(options)) if self.n_draws else []
        )

    def prepare(self, *others: Callable[[], Any]) -> list[Any]:
        """Prepare the launches, together with others whose functions are given, and return those others."""
        preparing, self._preparing = self._preparing, []
        made = launch.together(*preparing, *others)
        self._launches = made[: len(preparing)]
        return made[len(preparing) :]

    def __call__(self, logits: Tensor, options: Sampling) -> Rows:
        rows, run = self.of_call(logits, options)
        run()
        return rows

    def of_call(self, logits: Tensor, options: Sampling) -> tuple[Rows, Callable[[], None]]:
        """(rows that are not judged yet, what launches their judgement)."""
        read, written = readable(logits, options.logit_bias, options.bitmask, options.row_indices), self._written()

        def run() -> None:
            values = of_a_call(read, written, _numbers(options))
            for launched, wanted in self._launches:
                launched(*wanted(values))

        return _rows_of(read, written, options), run

    def like(self, logits: Tensor, options: Sampling) -> Rows:
        """Rows like those of a call, for launches that are prepared for them."""
        return self.of_call(logits, options)[0]

    def _written(self) -> Written:
        record = self._empty((self.n_draws * self.spec.scratch,), (1,), torch.int64)
        return Written(record, valid=self._empty((self.n_draws,), (1,), torch.bool))


def _rows_of(read: tuple, written: Written, options: Sampling) -> Rows:
    tensors: dict[str, Tensor | None] = dict(zip(READ, read, strict=True))
    tensors |= {"scratch": written.scratch, "valid": written.valid, "temperature": None}
    if not isinstance(options.temperature, Tensor):
        return Rows(tensors, options.temperature)
    tensors["temperature"] = options.temperature
    return Rows(tensors, 1.0)


def _numbers(options: Sampling) -> Numbers:
    return Numbers(options.temperature, options.top_k, options.top_p, options.min_p, 0, 0)


def _is_bounded(options: Sampling) -> bool:
    return options.min_p is not None


def _spec_of(
    plan: DrawPlan, options: Sampling, index: int, dtype: torch.dtype, of_probs: bool, masks: bool
) -> SampleSpec:  # fmt: skip
    """The spec for rows that are judged alone, as for the boundary of a draw."""
    spec = spec_of(plan, options, index, True, dtype)
    greedy = isinstance(options.temperature, Tensor) or options.temperature == 0
    filtered = options.top_k is not None or options.top_p is not None
    wide = filtered and not is_few(options.top_k)
    ranked = filtered or greedy
    capacity = 2 * plan.capacity if wide else plan.capacity
    return replace(
        spec, judges=True, first=False, by_row=False, counted=options.top_p is None and options.min_p is None,
        ranked=ranked, wide=wide, capacity=capacity, candidates=2 * capacity if ranked else 1,
        listed=plan.listed if wide else 0, of_probs=of_probs, grain_bits=0 if of_probs else spec.grain_bits,
        masks=masks, sums=wide and not (masks or _is_bounded(options)),
    )  # fmt: skip


def _launches(plan: DrawPlan, spec: SampleSpec, arguments: Arguments, index: int, bounded: bool) -> list:
    from fused_softmax.ops.sampling.kernels.judged import _judge, _sum_kept
    from fused_softmax.ops.sampling.kernels.kept import _stretches
    from fused_softmax.ops.sampling.kernels.wide import _bound, _weigh

    n_parts, n_wide = -(-plan.n_cols // (STRETCH * plan.stretches)), plan.n_draws * plan.wide_parts
    cut, follows = (plan.wide_parts, plan.wide_stretches), overlaps(index)
    spec = replace(spec, leads=follows)
    capped: dict[str, Any] = {"maxnreg": registers_of_choosing()} if spec.wide and spec.ptx else {}
    of_judging = replace(spec, stretches=plan.kept_warps)
    launches = [
        arguments.prepare(_stretches, plan.n_draws * n_parts, spec, index, plan.num_warps),
        arguments.prepare(_judge, plan.n_draws, of_judging, index, plan.kept_warps, follows=follows, **capped),
    ]
    if spec.wide:
        of_bound = replace(spec, stretches=plan.bound_warps)
        launches += [
            arguments.prepare(_weigh, n_wide, spec, index, plan.num_warps, *cut, follows),
            arguments.prepare(_bound, plan.n_draws, of_bound, index, plan.bound_warps, follows=follows),
        ]
    if bounded and not spec.masks and (spec.wide or not spec.ranked):
        launches.append(arguments.prepare(_sum_kept, n_wide, spec, index, plan.num_warps, *cut, follows))
    return launches


def prepare_filter(rows: Tensor, filter: str, number: Number, linear: bool) -> Callable[[Tensor, Number], Tensor]:
    """What applies one filter to rows like these, as `reference.mask_logits` does: call(rows, the filter's number).

    of_probs: as `reference.renorm_probs` does.
    """
    (n_rows, n_cols), dtype, empty = rows.shape, rows.dtype, allocator(rows.device)
    shape, strides = (n_rows, n_cols), (n_cols, 1)
    turns = _turns(rows, _filtering(filter, number))
    y = empty(shape, strides, dtype)
    writes = {
        here.stop - here.start: _prepare_turn(rows[here], filter, _of_turn(number, here), y[here], linear)
        for here in (*turns[:1], *turns[-1:])
    }
    if len(turns) == 1:
        write = writes[n_rows]
        return lambda rows, number: write(rows, number, empty(shape, strides, dtype))

    def call(rows: Tensor, number: Number) -> Tensor:
        y = empty(shape, strides, dtype)
        for here in turns:
            writes[here.stop - here.start](rows[here], _of_turn(number, here), y[here])
        return y

    return call


def _turns(logits: Tensor, options: Sampling) -> list[slice]:
    """The rows that are judged at a time, with scratch of some 16 MiB. The last turn has no more than the others."""
    n_rows = logits.shape[0]
    bytes_of_row = bytes_of_a_row(n_rows, logits, options, masks=True)
    most = max(1, _MOST_BYTES // bytes_of_row // _ALIGNED) * _ALIGNED
    at_once = -(-n_rows // -(-n_rows // most) // _ALIGNED) * _ALIGNED if n_rows else 1
    return [slice(begin, min(begin + at_once, n_rows)) for begin in range(0, n_rows, at_once)]


def bytes_of_a_row(n_rows: int, logits: Tensor, options: Sampling, masks: bool = False) -> int:
    """How many bytes of scratch one of n_rows rows takes. logits: [..., n_cols]. masks: as Judging's."""
    index, dtype = logits.get_device(), logits.dtype
    plan = plan_draws(n_rows, logits.shape[-1], logits.element_size(), device_of(index))
    return 8 * _spec_of(plan, options, index, dtype, False, masks).scratch


def _filtering(filter: str, number: Number) -> Sampling:
    given: Any = {filter: number}
    return Sampling(**given)


def _of_turn(number: Number, here: slice) -> Number:
    return number[here] if isinstance(number, Tensor) and number.ndim else number


def _prepare_turn(
    rows: Tensor, filter: str, number: Number, y: Tensor, linear: bool
) -> Callable[[Tensor, Number, Tensor], Tensor]:
    from fused_softmax.ops.sampling.kernels.judged import _write_kept

    judge = Judging(rows, given := _filtering(filter, number), linear=linear, masks=not linear)
    plan, judged = judge.plan, judge.like(rows, given)
    tensors = judged.scratch, judged.valid, judged.tensors["logits"], y
    scalars = judge.strides, rows.shape[0], plan.n_cols, plan.wide_parts, plan.wide_stretches
    index, follows = rows.get_device(), overlaps(rows.get_device())
    writing = partial(
        launch.prepare, _write_kept, plan.n_draws * plan.wide_parts, tensors, scalars,
        {"K": replace(judge.spec, follows=follows)}, device=index, num_warps=plan.num_warps, plan=plan,
        **overlapping(follows),
    )  # fmt: skip
    (launched,) = judge.prepare(writing)
    write = launched.__call__

    def call(rows: Tensor, number: Number, y: Tensor) -> Tensor:
        judged = judge(rows, _filtering(filter, number))
        write(judged.scratch, judged.valid, judged.tensors["logits"], y)
        return y

    return call
