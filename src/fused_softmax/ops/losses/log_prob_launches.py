"""Prepared launches of the log-probabilities of rows of logits, and of their gradient.

The forward pass has the same bits for a row in any batch: see `plan_alone`. The gradient has no sums but those of a
row's targets.
"""

from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fused_softmax.core.calls import allocator, kept
from fused_softmax.core.checks import arithmetic_of
from fused_softmax.core.device import device_of
from fused_softmax.core.launch import together
from fused_softmax.core.launched import Launched, compose
from fused_softmax.core.layout import alignment_of
from fused_softmax.core.plan import RowPlan, plan_alone, plan_reduction
from fused_softmax.core.runner import prepare, spec_of
from fused_softmax.ops.losses.kernels.spec import LossSpec
from fused_softmax.ops.losses.launches import blocks_of, picked_of, with_whole_rows
from fused_softmax.ops.losses.options import EVERY, Kept, LogProb

STATS = ("log_sum_sq_probs", "mean_logits", "is_top1")
STATISTICS = tuple(f"stats.{name}" for name in STATS)
HAVE = "log_prob, entropy and lse have one"
_NUMBERS = ("factor", "hidden", "cap")
_READ_NUMBERS = ("factor", "cap")  # of a kernel that masks columns past a row's end
_LIST_NUMBERS = ("n_kept", "first_row")
_SHARD_NUMBERS = ("origin", "n_classes")
_LIST_COLS, _LIST_WARPS = 1024, 4  # of a tile of listed columns, in any batch
# Pieces of a part, in the gradient of rows over lists. Parts of 4 pieces of 1024 bf16 take 742 us, of 8 pieces 824, of
# 32 pieces 1028 (torch's memset 735).
_LIST_PIECES = 4
_LIST_PROGRAMS = 64  # programs that share a list, if rows are few


class Asked(NamedTuple):
    """What a call wants beside log-probabilities. states: m and ls of every row, for a gradient."""

    entropy: bool = False
    lse: bool = False
    log_sum_sq_probs: bool = False
    mean_logits: bool = False
    is_top1: bool = False
    states: bool = False


class LogProbRows(NamedTuple):
    """Of rows [n]: m and ls, whose sum is lse; log-probabilities [n, k]; and what else is asked for, or None.

    In a shard, log-probabilities of classes that other shards have are +inf, and the mean over kept columns is [2, n]:
    the sum of their logits, and their number.
    """

    m: Tensor | None
    ls: Tensor | None
    log_prob: Tensor
    entropy: Tensor | None
    lse: Tensor | None
    log_sum_sq_probs: Tensor | None
    mean_logits: Tensor | None
    is_top1: Tensor | None


class GivenLogits(NamedTuple):
    """The tensors of a call as kernels take them: targets [n, k], or [n], and temperatures [n], contiguous.

    shard: (first column, number of columns of the whole row) of a shard. Targets and kept columns are of the whole row.
    """

    x: Tensor
    target: Tensor
    temperature: Tensor | None
    numbers: Tensor | None
    kept: Kept = EVERY
    shard: tuple[int, int] | None = None

    @property
    def tensors(self) -> tuple[Tensor | None, ...]:
        return *self[:4], *self.kept[:3]

    @property
    def kind(self) -> tuple:
        """What kept calls depend on of this, beside what they see of the tensors."""
        return self.kept.kind, self.shard is not None, self.crosses

    @property
    def crosses(self) -> bool:
        """Whether the bits of a shard's neighbouring columns may lie in two bytes."""
        return self.shard is not None and self.kept.bits is not None and self.shard[0] % 8 > 0

    @property
    def of_launch(self) -> dict[str, int]:
        """`numbers_of_launch` by their names in kernels."""
        of_list = zip(_LIST_NUMBERS, self.kept.numbers, strict=False)
        return dict((*of_list, *zip(_SHARD_NUMBERS, self.shard or (), strict=False)))

    @property
    def numbers_of_launch(self) -> tuple[int, ...]:
        """The numbers of a list and of a shard that each launch gets anew."""
        return *self.kept.numbers, *(self.shard or ())

    @property
    def n_targets(self) -> int:
        """Targets of a row."""
        return self.target.shape[1] if self.target.ndim > 1 else 1

    def values(self, options: LogProb) -> dict[str, Any]:
        """Kernels' arguments by name."""
        stride = None if self.kept.bits is None else self.kept.bits.stride(0)
        of_launch = dict.fromkeys((*_LIST_NUMBERS, *_SHARD_NUMBERS)) | self.of_launch
        return options.loss.values() | of_launch | {"n_targets": self.n_targets, "bits_row_stride": stride}


_GIVEN = "x", "target", "temperature", "numbers", "ids", "offsets", "bits"  # GivenLogits.tensors


def given_of(
    x: Tensor, target: Tensor, temperature: Tensor | None, options: LogProb, kept: Kept = EVERY,
    shard: tuple[int, int] | None = None,
) -> GivenLogits:  # fmt: skip
    """temperature: of each row, where it is not a number."""
    kept = kept if kept is EVERY else kept.for_kernels()
    return GivenLogits(x, target, temperature, options.loss.exact_numbers(x), kept, shard)


def aligned(x: Tensor, kept: Kept = EVERY) -> Tensor:
    """Rows, each of which starts on 16 bytes if so many columns can. Otherwise they would be summed in another order.

    Listed columns are read one by one, wherever rows start.
    """
    vector = 16 // x.element_size()
    rows = with_whole_rows(x)
    if kept.ids is not None:
        return rows
    even = rows.data_ptr() % 16 == 0 and (len(rows) == 1 or rows.stride(0) % vector == 0)
    return rows if even or x.shape[1] % vector else rows.clone(memory_format=torch.contiguous_format)


def forward(given: GivenLogits, options: LogProb, asked: Asked) -> LogProbRows:
    """The log-probabilities of `aligned` rows."""
    key = *options.key, *asked, given.kind
    tensors = given.x, given.target, given.temperature, given.kept.bits
    call = kept("log_probs", key, tensors, prepare_log_probs, given, options, asked)
    return call(given, options.numbers[0])


def prepare_log_probs(given: GivenLogits, options: LogProb, asked: Asked, plan: RowPlan | None = None) -> Launched:
    """What runs the kernels on tensors like these: call(given, numbers) -> LogProbRows."""
    from fused_softmax.ops.losses.kernels.log_prob import _log_probs, _merge_log_probs

    x, device = given.x, given.x.get_device()
    n_rows, n_cols = x.shape
    several, arithmetic, empty = tuple(given.target.shape[1:]), arithmetic_of(x), allocator(x.device)
    listed = given.kept.ids is not None
    plan = plan or plan_alone(n_rows, _LIST_COLS if listed else n_cols, x.element_size(), device_of(device))
    if listed:
        plan = replace(plan, block_cols=_LIST_COLS, pieces=1, vector=1, num_warps=_LIST_WARPS)
    moments = asked.log_sum_sq_probs or asked.mean_logits
    spec = replace(
        _spec(given, options, plan), stats=asked.entropy, finds=asked.is_top1, moments=moments, axis=1, full_pieces=0
    )  # fmt: skip

    in_two = asked.mean_logits and spec.shard and spec.truncated

    def states_of(n):
        if plan.parts == 1:
            return None, None
        of_parts = empty((7 if moments else 4, n, plan.parts), (n * plan.parts, plan.parts, 1), arithmetic)
        return of_parts, empty((n, plan.parts), (plan.parts, 1), torch.int32) if asked.is_top1 else None

    of_row = *[asked.states] * 2, asked.entropy, asked.lse, asked.log_sum_sq_probs, asked.mean_logits and not in_two

    def rows_of(n):
        of_targets = (n, *several), (*several, 1)
        log_prob = empty(*of_targets, arithmetic)
        m, ls, entropy, lse, log_sq, mean = [empty((n,), (1,), arithmetic) if wanted else None for wanted in of_row]
        mean = empty((2, n), (n, 1), arithmetic) if in_two else mean
        top = empty(*of_targets, torch.bool) if asked.is_top1 else None
        return LogProbRows(m, ls, log_prob, entropy, lse, log_sq, mean, top)

    names = (*_GIVEN, "states", "found", "m", "ls", "log_prob", "entropy", "lse", "log_sq", "mean", "top")
    arranged = (*given.tensors, *states_of(n_rows), *rows_of(n_rows))
    tensors = dict(zip(names, arranged, strict=True))
    values = given.values(options) | {"n_cols": n_cols}
    more = tuple(given.of_launch)
    numbers = (*_NUMBERS, *more)
    preparing = [partial(prepare, _log_probs, plan, spec, tensors, values, device=device, numbers=numbers)]
    if plan.parts > 1:
        lanes = triton.next_power_of_2(plan.parts)
        block = max(1, min(16, 1024 // max(lanes, spec.targets)))
        merging = replace(spec, block_rows=block, lanes=lanes, block_cols=1, pieces=1, vector=1)
        programs = partial(blocks_of, block)
        preparing.append(
            partial(
                prepare, _merge_log_probs, plan, merging, tensors, values, device=device, numbers=numbers,
                programs=programs, num_warps=4,
            )
        )  # fmt: skip
    picked = picked_of(arranged)

    def build(n, *launches):
        def call(given, numbers):
            rows = rows_of(n)
            arguments = picked((*given.tensors, *states_of(n), *rows))
            if more:
                numbers = *numbers, *given.numbers_of_launch
            for each in launches:
                each(*arguments, *numbers)
            return rows

        return call

    return compose(build, *together(*preparing), n=n_rows, by_row=True)


def _spec(given: GivenLogits, options: LogProb, plan: RowPlan) -> LossSpec:
    kind = options.loss.kind() | {"targets": triton.next_power_of_2(given.n_targets)}
    kind |= {"listed": given.kept.ids is not None, "masked": given.kept.bits is not None}
    kind |= {"shard": given.shard is not None, "crosses": given.crosses}
    if given.temperature is not None:
        kind["scaled"] = True
    x = given.x
    return spec_of(LossSpec, plan, x.dtype, x.get_device(), itemsize=x.element_size(), **kind)


class Gradients(NamedTuple):
    """The incoming gradients of log-probabilities, as the targets lie, of entropy [n] and of lse [n].

    They are in the dtype of the arithmetic.
    """

    log_prob: Tensor | None
    entropy: Tensor | None
    lse: Tensor | None


def backward(
    given: GivenLogits, m: Tensor, ls: Tensor, entropy: Tensor | None, gradients: Gradients, options: LogProb,
    dx: Tensor | None = None,
) -> Tensor:  # fmt: skip
    """The gradient of rows [n, n_cols], columns contiguous. dx: where it goes, which may be the logits; new if None.

    entropy: of the rows, if it has a gradient.
    """
    x = given.x
    if dx is None:
        dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if not x.numel():
        return dx
    arithmetic = arithmetic_of(x)
    gradients = Gradients(*[each if each is None else each.to(arithmetic).contiguous() for each in gradients])
    entropy = None if gradients.entropy is None else entropy
    beside = (m, ls, entropy, *gradients)
    tensors = x, dx, given.target, given.temperature, entropy, *gradients, given.kept.bits
    call = kept(*gradient_key(options, given.kind), tensors, _prepare_gradient, given, dx, beside, options)
    return call(given, dx, beside, options.numbers[1])


def gradient_key(options: LogProb, of_given: tuple) -> tuple[str, tuple]:
    """The name and options of a kept gradient. of_given: `GivenLogits.kind`."""
    return "log_prob_gradient", (*options.key, of_given)


_OF_RESULTS = "m", "ls", "entropy", "dlog_prob", "dentropy", "dlse"


def _prepare_gradient(given: GivenLogits, dx: Tensor, beside: tuple, options: LogProb) -> Launched:
    """What writes the gradient: call(given, dx, (m, ls, entropy, and those of the results), numbers) -> dx."""
    from fused_softmax.ops.losses.kernels.log_prob import _log_prob_gradient

    x, device = given.x, given.x.get_device()
    n_rows, n_cols = x.shape
    plan = plan_reduction(
        n_rows, n_cols, x.element_size(), device_of(device), alignment=alignment_of(x, dx), writes=True,
        capped=options.softcap is not None,
    )  # fmt: skip
    if given.kept.ids is not None:
        return _prepare_listed(given, dx, beside, options, plan)
    spec = replace(
        _spec(given, options, plan), stats=beside[2] is not None, tile=True, axis=1, full_pieces=0
    )  # fmt: skip

    def arranged(given, dx, beside):
        return given.x, dx, *given.tensors[1:], *beside

    of_call = arranged(given, dx, beside)
    tensors = dict(zip(("x", "dx", *_GIVEN[1:], *_OF_RESULTS), of_call, strict=True))
    picked, more = picked_of(of_call), tuple(given.of_launch)

    def build(_, launch):
        def call(given, dx, beside, numbers):
            if more:
                numbers = *numbers, *given.numbers_of_launch
            launch(*picked(arranged(given, dx, beside)), *numbers)
            return dx

        return call

    launched = prepare(
        _log_prob_gradient, plan, spec, tensors, given.values(options), device=device,
        numbers=(*_READ_NUMBERS, *more),
    )  # fmt: skip
    return compose(build, launched, n=n_rows, by_row=True)


def _prepare_listed(given: GivenLogits, dx: Tensor, beside: tuple, options: LogProb, plan: RowPlan) -> Launched:
    """What writes the gradient of rows that are normalised over lists, in two launches."""
    from fused_softmax.ops.losses.kernels.log_prob_listed import _listed_gradient, _write_listed

    x, device, empty = given.x, given.x.get_device(), allocator(given.x.device)
    block = 32 * _LIST_WARPS * 16 // x.element_size()
    plan = replace(
        plan, block_rows=1, block_cols=block, pieces=1, part_cols=_LIST_PIECES * block,
        parts=-(-plan.n_cols // (_LIST_PIECES * block)), num_warps=_LIST_WARPS,
    )  # fmt: skip
    spec = replace(_spec(given, options, plan), stats=beside[2] is not None, tile=True, axis=1, full_pieces=0)

    def of_rows(n):
        """Programs that share a row's list."""
        return max(1, min(_LIST_PROGRAMS, 4 * device_of(device).sm_count // n))

    n_rows, shared = len(x), of_rows(len(x))
    values = given.values(options) | {"n_programs_of_row": shared}

    def waiting(given):
        """(buffer for the gradients of listed columns; NaN if offsets fall, and then each row's fill)."""
        n, n_kept = given.x.shape[0], given.kept.ids.shape[0]
        return empty((n_kept,), (1,), given.x.dtype), torch.zeros(1 + n, dtype=torch.float32, device=given.x.device)

    def arranged(given, beside, gradients, fill):
        return given.x, gradients, fill, *given.tensors[1:], *beside

    gradients, fill = waiting(given)
    of_call = arranged(given, beside, gradients, fill)
    tensors = dict(zip(("x", "values", "fill", *_GIVEN[1:], *_OF_RESULTS), of_call, strict=True))
    picked, more = picked_of(of_call), tuple(given.of_launch)
    first, then = together(
        partial(
            prepare, _listed_gradient, plan, spec, tensors, values, device=device, numbers=(*_READ_NUMBERS, *more),
            programs=lambda plan: plan.n_rows * shared,
            plan_for=lambda n: plan.for_rows(n) if of_rows(n) == shared else None,
        ),
        partial(prepare, _write_listed, plan, spec, tensors | {"dx": dx}, values, device=device, numbers=more),
    )  # fmt: skip

    def build(_, first, then):
        def call(given, dx, beside, numbers):
            gradients, fill = waiting(given)
            more = given.numbers_of_launch
            first(*picked(arranged(given, beside, gradients, fill)), *numbers, *more)
            then(dx, gradients, fill, given.kept.ids, given.kept.offsets, *more)
            return dx

        return call

    return compose(build, first, then, n=n_rows, by_row=True)
