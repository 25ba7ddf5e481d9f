"""Launches that verify drafts: rows of target and draft are judged, then followed and drawn from.

If the drafts' distribution is not given, the target's rows are drawn from as `sample` does, and the drafts that are
these tokens are accepted.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from threading import local
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax.core import launch
from fused_softmax.core.calls import allocator
from fused_softmax.core.device import device_of
from fused_softmax.core.runner import has_ptx, overlapping, overlaps
from fused_softmax.ops.sampling.judged import Judging, Rows, bytes_of_a_row
from fused_softmax.ops.sampling.kernels.spec import TraceSpec, VerifySpec
from fused_softmax.ops.sampling.launches import Numbers
from fused_softmax.ops.sampling.one_device import int64_of, prepared_of
from fused_softmax.ops.sampling.options import Sampling
from fused_softmax.ops.sampling.plan import DrawPlan, plan_draws
from fused_softmax.ops.sampling.verification import SpeculativeOutput, of_rows

_LARGE = 2**25  # logits of a target whose judgement takes the device longer than the host
_NUMBERS = 8  # int64 of a sequence: ops/sampling/kernels/verified.py
_FILTERS = "temperature", "top_k", "top_p", "min_p"
_CLIMB_WARPS = 8  # of the program that follows a tree, and reads rows alone


class Given(NamedTuple):
    """A call's tensors: target_logits [n, k + 1, n_cols], draft_tokens [n, k], draft_logits or draft_probs as the
    target's, lengths [n], parents [n, k], and logit_bias and bitmask of columns, of sequences or of rows.
    """

    target_logits: Tensor
    draft_tokens: Tensor
    draft_logits: Tensor | None
    draft_probs: Tensor | None
    lengths: Tensor | None
    parents: Tensor | None
    logit_bias: Tensor | None
    bitmask: Tensor | None


Speculation = Callable[[Given, Numbers], SpeculativeOutput]


def prepare_speculation(
    given: Given, numbers: Numbers, *, order: Any = "sequential", verify: str = "chain", return_logprobs: Any = None
) -> Speculation:  # fmt: skip
    """What verifies the drafts of calls like this one, of which there are some, whose arguments were checked.

    numbers: temperature, top_k, top_p and min_p are numbers or tensors [], [n] or [n, k + 1]; seed and position numbers
    or tensors [] or [n]; a position of None is i * (k + 1) for sequence i.
    """
    if given.draft_logits is None and given.draft_probs is None:
        return _prepare_tracing(given, numbers, order, return_logprobs)
    judges = _Judges(given, numbers, order, return_logprobs)
    follow = _Following(given, numbers, judges, verify)
    return lambda given, numbers: follow(given, numbers, judges(given, numbers))


def bytes_of_verified(n_rows: int, logits: Tensor) -> int:
    """How many bytes of scratch a row of the target takes at most, with the row of the draft beside it."""
    return 2 * bytes_of_a_row(n_rows, logits, Sampling(top_p=0.5))


class _Judged(NamedTuple):
    """Rows of the target, of drafts, and of the target as its log-probabilities are asked for."""

    target: Rows
    drafts: Rows
    reported: Rows | None


class _Judges:
    """Judges the rows of a call."""

    def __init__(self, given: Given, numbers: Numbers, order: Any, return_logprobs: Any):
        self._order, self._return_logprobs = order, return_logprobs
        self.target = Judging(*_rows_of_target(given, numbers, order))
        of_probs = given.draft_probs is not None
        self.drafts = Judging(*_rows_of_drafts(given, numbers, order), of_probs=of_probs)
        self.raw = Judging(*_raw_rows(given)) if return_logprobs == "raw" else None
        # Without filters the launches are bound by memory, and win nothing from others beside them.
        self.may_be_side_by_side = any(getattr(numbers, name) is not None for name in _FILTERS[1:])

    def prepare(self, *others: Callable[[], Any]) -> list[Any]:
        """`Judging.prepare` of all rows. Drafts mostly have the kernels of the target, so they come after it."""
        made = self.target.prepare(*others)
        for each in (self.drafts, self.raw):
            if each is not None:
                each.prepare()
        return made

    def _side_by_side(self, given: Given) -> bool:
        """Whether target and drafts are judged side by side.

        The second stream takes the host some 50 us: a graph saves them, and a large call keeps the device busy as long.
        """
        # Not where kernels are only compiled, or interpreted.
        if not (self.may_be_side_by_side and given.draft_tokens.is_cuda and torch.cuda.is_initialized()):
            return False
        return given.target_logits.numel() >= _LARGE or torch.cuda.is_current_stream_capturing()

    @property
    def reports(self) -> Judging | None:
        return self.target if self._return_logprobs == "processed" else self.raw

    def __call__(self, given: Given, numbers: Numbers, only_like: bool = False) -> _Judged:
        """only_like: rows like those of a call, for launches that are prepared for them."""
        target, judge_target = self.target.of_call(*_rows_of_target(given, numbers, self._order))
        drafts, judge_drafts = self.drafts.of_call(*_rows_of_drafts(given, numbers, self._order))
        reported, judging = target if self.reports is not None else None, [judge_target]
        if self.raw is not None:
            reported, judge_raw = self.raw.of_call(*_raw_rows(given))
            judging.append(judge_raw)
        if not only_like:
            with _beside(given.draft_tokens.get_device() if self._side_by_side(given) else None) as of_drafts:
                with of_drafts:
                    judge_drafts()
                for judge in judging:
                    judge()
        return _Judged(target, drafts, reported)


class _Streams(local):
    """A stream of each device, and of each thread, because another thread may capture a graph."""

    def __init__(self) -> None:
        self.of_device: dict[int, torch.cuda.Stream] = {}


_streams = _Streams()


@contextmanager
def _beside(index: int | None) -> Iterator[AbstractContextManager]:
    """Within what it gives, launches run beside those of the device's current stream, which waits for them in the end.

    Of no device, they run in the current stream.

    Many steps of a judgement wait for a few programs that come last. Side by side, rows of target and drafts fill the
    chip: 64 x (4 + 1) x 151936 bf16 by top-p take 361 and 149 us of 439 and 178 (measured/sampling.md).
    """
    if index is None:
        yield nullcontext()
        return
    current, streams = torch.cuda.current_stream(index), _streams.of_device
    if streams.get(index) in (None, current):
        streams[index] = torch.cuda.Stream(index)
    side = streams[index]
    side.wait_stream(current)
    try:
        yield torch.cuda.stream(side)
    finally:  # or memory that is written there would be given away
        current.wait_stream(side)


class _Kernel:
    """A kernel's launch for tensors and scalars like these, which are found by the names of its parameters."""

    def __init__(
        self, kernel: Any, programs: int, spec: Any, num_warps: int, like: dict[str, Any], index: int, plan: Any = None
    ):  # fmt: skip
        names = [name for name in kernel.arg_names if name != "K"]
        tensors = [name for name in names if name.endswith("_ptr")]
        scalars = [name for name in names if not name.endswith("_ptr")]
        anew = [name for name in scalars if name == "temperature"]
        launched = launch.prepare(
            kernel, programs, [like[name] for name in tensors], [like[name] for name in scalars], {"K": spec},
            device=index, num_warps=num_warps, numbers=tuple(map(scalars.index, anew)), plan=plan,
            **overlapping(getattr(spec, "follows", False)),
        )  # fmt: skip
        self._launch: Callable[..., None] = launched.__call__
        self._given = [name for name in tensors if like[name] is not None] + anew

    def __call__(self, given: dict[str, Any]) -> None:
        self._launch(*[given[name] for name in self._given])


class _Following:
    """Follows the drafts of judged rows, and draws what comes after them."""

    def __init__(self, given: Given, numbers: Numbers, judges: _Judges, verify: str):
        from fused_softmax.ops.sampling.kernels.verified import (
            _climb,
            _draw_left,
            _follow,
            _report_tokens,
            _settle,
            _sum_left,
        )

        target, draft, reports = judges.target, judges.drafts, judges.reports
        (n, k), index = given.draft_tokens.shape, given.draft_tokens.get_device()
        plan, self._shape, self._empty = target.plan, (n, k + 1), allocator(given.draft_tokens.device)
        self._spec = spec = VerifySpec(
            target=target.spec, draft=draft.spec, rows=k + 1, stretches=plan.stretches, block=verify == "block",
            ptx=has_ptx(index), follows=overlaps(index), leads=overlaps(index),
        )  # fmt: skip
        self._tree, self._reports = verify == "tree", reports is not None
        # A launch that comes after those of two streams does not begin before them.
        first = replace(spec, follows=spec.follows and not judges.may_be_side_by_side)
        seed, position = of_sequences(numbers, n, k + 1, given.draft_tokens.device)
        scalars = {
            "strides": target.strides, "draft_strides": draft.strides, "target_rows": target.n_rows,
            "draft_rows": draft.n_rows, "n_cols": plan.n_cols, "sequence_strides": _strides(given, seed, position),
        }  # fmt: skip
        judged = judges(given, numbers, only_like=True)
        like = scalars | self._of_a_call(given, numbers, judged)
        kernels: list[Callable[[], _Kernel]] = []

        def add(kernel: Any, programs: int, spec: VerifySpec, num_warps: int, **changed: Any) -> None:
            kernels.append(partial(_Kernel, kernel, programs, spec, num_warps, like | changed, index, plan))

        if self._tree:
            warps = min(_CLIMB_WARPS, plan.all_stretches)
            add(_climb, n, replace(first, stretches=warps), warps)
        else:
            add(_follow, n, first, 1)
            if spec.block:
                if k > 1:
                    cut = _cut(plan, n * (k - 1), index)
                    add(_sum_left, n * (k - 1) * cut["n_parts"], spec, plan.num_warps, **cut)
                add(_settle, n, spec, 1)
        cut = _cut(plan, n, index)
        add(_draw_left, n * cut["n_parts"], spec, plan.num_warps, **cut)
        reporting = []
        if reports is not None and judged.reported is not None:
            of_reported = _of_rows(judged.reported) | {"strides": reports.strides, "target_rows": reports.n_rows}
            of_nodes = {} if self._tree else {"nodes_ptr": None}
            spec = replace(spec, target=reports.spec)
            like |= of_reported | of_nodes
            reporting.append(partial(_Kernel, _report_tokens, n, spec, 1, like, index, plan))
        made = judges.prepare(*kernels, *reporting)
        self._kernels, self._report = made[: len(kernels)], made[len(kernels) :]

    def __call__(self, given: Given, numbers: Numbers, judged: _Judged) -> SpeculativeOutput:
        its = self._of_a_call(given, numbers, judged)
        for kernel in self._kernels:
            kernel(its)
        if judged.reported is not None:
            for report in self._report:
                report(its | _of_rows(judged.reported))
        of_sequences = its["numbers_ptr"]
        return SpeculativeOutput(
            its["tokens_ptr"], of_sequences[:, 1].clone(), of_sequences[:, 2] > 0, its["logprobs_ptr"],
            its["nodes_ptr"] if self._tree else None,
        )  # fmt: skip

    def _of_a_call(self, given: Given, numbers: Numbers, judged: _Judged) -> dict[str, Any]:
        (n, n_rows), spec = self._shape, self._spec
        seed, position = of_sequences(numbers, n, n_rows, given.draft_tokens.device)
        new = lambda size, dtype=torch.int64: self._empty((n, size), (size, 1), dtype)  # noqa: E731
        return {
            "drafts_ptr": given.draft_tokens, "lengths_ptr": given.lengths, "parents_ptr": given.parents,
            "seed_ptr": seed, "position_ptr": position, "tokens_ptr": new(n_rows),
            "nodes_ptr": new(n_rows - 1), "numbers_ptr": new(_NUMBERS), "scales_ptr": new(spec.scales, torch.float32),
            "lefts_ptr": new(spec.most), "logprobs_ptr": new(n_rows, torch.float32) if self._reports else None,
            **_of_rows(judged.target), **_of_rows(judged.drafts, "draft_"),
        }  # fmt: skip


def _of_rows(rows: Rows, prefix: str = "") -> dict[str, Any]:
    """Judged rows as arguments by name. Probabilities have temperature 1; else drafts are tempered as the target."""
    tensors: dict[str, Any] = {f"{prefix}{name}_ptr": each for name, each in rows.tensors.items()}
    return tensors if prefix else tensors | {"temperature": rows.temperature}


def of_sequences(numbers: Numbers, n: int, n_rows: int, device: torch.device) -> tuple[Tensor, Tensor]:
    """Seeds and first positions [n]."""
    seed, position = int64_of(numbers.seed, n, device), numbers.position
    if position is None:
        return seed, torch.arange(0, n * n_rows, n_rows, device=device)
    return seed, int64_of(position, n, device)


def _strides(given: Given, seed: Tensor, position: Tensor) -> tuple[int, ...]:
    """As ops/sampling/kernels/verified.py has them."""
    return (
        seed.stride(0), position.stride(0), *given.draft_tokens.stride(),
        0 if given.lengths is None else given.lengths.stride(0),
        *((0, 0) if given.parents is None else given.parents.stride()),
    )  # fmt: skip


def _cut(plan: DrawPlan, n: int, index: int) -> dict[str, int]:
    """How n rows are cut among programs."""
    own = plan_draws(n, plan.n_cols, 2, device_of(index))
    return {"n_parts": own.parts, "part_stretches": own.part_stretches}


def _prepare_tracing(given: Given, numbers: Numbers, order: Any, return_logprobs: Any) -> Speculation:
    from fused_softmax.ops.sampling.kernels.traced import _place, _trace

    (n, n_rows, n_cols), device = given.target_logits.shape, given.target_logits.device
    index, empty, spec = given.target_logits.get_device(), allocator(device), TraceSpec(rows=n_rows)

    def of_draws(given: Given, numbers: Numbers) -> tuple[Tensor, Sampling]:
        logits, options = _rows_of_target(given, numbers, order)
        return logits, replace(options, return_logprobs=return_logprobs)

    def of_a_call(given: Given, numbers: Numbers) -> dict[str, Any]:
        seed, position = of_sequences(numbers, n, n_rows, device)
        new = lambda *shape, dtype=torch.int64: empty(shape, (*shape[1:], 1), dtype)  # noqa: E731
        return {
            "drafts_ptr": given.draft_tokens, "lengths_ptr": given.lengths, "parents_ptr": given.parents,
            "seed_ptr": seed, "position_ptr": position, "seeds_ptr": new(n * n_rows), "positions_ptr": new(n * n_rows),
            "tokens_ptr": new(n, n_rows), "n_accepted_ptr": new(n), "valid_ptr": new(n, dtype=torch.bool),
            "nodes_ptr": None if given.parents is None else new(n, n_rows - 1),
            "logprobs_ptr": None if return_logprobs is None else new(n, n_rows, dtype=torch.float32),
        }  # fmt: skip

    its = of_a_call(given, numbers)
    like = its | {"strides": _strides(given, its["seed_ptr"], its["position_ptr"]), "n_cols": n_cols}
    like |= {
        "own_ptr": its["seeds_ptr"], "own_valid_ptr": empty((n * n_rows,), (1,), torch.bool),
        "own_logprobs_ptr": its["logprobs_ptr"],
    }  # fmt: skip
    place = _Kernel(_place, n, spec, 1, like, index)
    draw = prepared_of(*of_draws(given, numbers), its["seeds_ptr"], its["positions_ptr"], None)
    trace = _Kernel(_trace, n, spec, 1, like, index)
    del its, like  # a call that is kept holds no tensor

    def speculate(given: Given, numbers: Numbers) -> SpeculativeOutput:
        its = of_a_call(given, numbers)
        place(its)
        logits, options = of_draws(given, numbers)
        of_draw = Numbers.of(options, its["seeds_ptr"], its["positions_ptr"])
        drawn = draw(logits, of_draw, options.logit_bias, options.bitmask, options.row_indices, None)
        trace(its | {"own_ptr": drawn.tokens, "own_valid_ptr": drawn.valid, "own_logprobs_ptr": drawn.logprobs})
        names = "tokens_ptr", "n_accepted_ptr", "valid_ptr", "logprobs_ptr", "nodes_ptr"
        return SpeculativeOutput(*(its[name] for name in names))

    return speculate


def flattened(logits: Tensor) -> tuple[Tensor, Tensor | None]:
    """Rows [n, m, n_cols] as [rows, n_cols], and which of them they are; all in turn if None. Slices are not copied."""
    n, m, n_cols = logits.shape
    of_sequence, of_row, _ = logits.stride()
    if of_row > 0 and of_sequence % of_row == 0 and of_sequence > of_row * m and n:  # of more rows, some
        apart = of_sequence // of_row
        at = torch.arange(m, device=logits.device)
        rows = torch.arange(n, device=logits.device)[:, None] * apart + at
        return logits.as_strided(((n - 1) * apart + m, n_cols), logits.stride()[1:]), rows.flatten()
    return logits.reshape(n * m, n_cols), None


def _shared_masks(mask: Tensor | None) -> Tensor | None:
    """A mask of columns, of sequences or of rows, as draws read it. All draws of a sequence may share one row."""
    if mask is None or mask.ndim < 3:
        return mask
    return mask.squeeze(1) if mask.shape[1] == 1 else mask.flatten(0, 1)


def rows_of_masks(mask: Tensor | None, n: int, n_rows: int) -> Tensor | None:
    """A mask of columns, of sequences or of rows, [n_cols], [n, ...] or [n, n_rows, ...], for each row."""
    if mask is None or mask.ndim == 1:
        return mask
    return (mask[:, None] if mask.ndim == 2 else mask).expand(n, n_rows, -1).flatten(0, 1)


def _rows_of_target(given: Given, numbers: Numbers, order: Any) -> tuple[Tensor, Sampling]:
    n, n_rows, _ = given.target_logits.shape
    logits, rows = flattened(given.target_logits)
    own: Any = {name: of_rows(getattr(numbers, name), n, n_rows) for name in _FILTERS}
    bias, bits = map(_shared_masks, (given.logit_bias, given.bitmask))
    return logits, Sampling(**own, order=order, logit_bias=bias, bitmask=bits, row_indices=rows)


def _rows_of_drafts(given: Given, numbers: Numbers, order: Any) -> tuple[Tensor, Sampling]:
    n, n_rows, _ = given.target_logits.shape
    if given.draft_probs is not None:
        logits, rows = flattened(given.draft_probs)
        return logits, Sampling(row_indices=rows)
    assert given.draft_logits is not None
    logits, rows = flattened(given.draft_logits)
    own: Any = {name: of_rows(getattr(numbers, name), n, n_rows, n_rows - 1) for name in _FILTERS}
    return logits, Sampling(**own, order=order, row_indices=rows)


def _raw_rows(given: Given) -> tuple[Tensor, Sampling]:
    logits, rows = flattened(given.target_logits)
    return logits, Sampling(row_indices=rows)
