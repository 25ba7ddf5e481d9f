"""Launches of the kernels of draws: which of two ways a call takes, how rows meet the chip, and allocations.

Without filters a draw is one launch that reads each logit once. With filters, logprobs or kept bits, a first launch
reads each logit once and leaves every stretch's state and every lane's maximum. What follows it:

- where no boundary is needed, three launches judge the row's first arrivals (kernels/first.py). Without filters one of
  them finds the very first;
- where a row's maximum says what is kept, one launch draws of the lanes that matter (kernels/above.py);
- where top-k is small, one launch looks at the lanes of the greatest maxima (kernels/kept.py);
- where top-p judges what top-k left, or kept bits and log-probabilities are asked for, that launch and those that find
  a lower boundary (kernels/wide.py). They do nothing for finished rows.
"""

import math
from collections.abc import Callable
from dataclasses import replace
from operator import itemgetter
from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from fused_softmax.core import launch, workspace
from fused_softmax.core.calls import allocator
from fused_softmax.core.device import device_of
from fused_softmax.core.layout import as_bytes
from fused_softmax.core.runner import has_ptx, overlapping, overlaps
from fused_softmax.ops.sampling.kernels.spec import SampleSpec
from fused_softmax.ops.sampling.options import Sampling
from fused_softmax.ops.sampling.plan import DrawPlan, plan_draws
from fused_softmax.ops.sampling.reference import SampleOutput, unpacked

MOST_COLUMNS = 2**23 - 1  # the sum of their weights, of at most 2 ** 40 each, fits in int64
_COLUMNS = 2**24  # a column's number and its logit share 56 bits
_DRAWS = 2  # the use of slots
_UNIT, STRETCH = 2.0**40, 1024  # ops/sampling/kernels/common.py
_GRAIN_BITS = {torch.bfloat16: 16, torch.float16: 13}  # low bits of their numbers in fp32 that are always 0
_MOST_EARLY = 64  # draws up to which the second launch begins early: with more it would take room from the first
FEW = 64  # of top-k: so many logits the lanes of the greatest maxima always hold


class Numbers(NamedTuple):
    """Temperature, top_k, top_p, min_p, seed and position of a call: numbers, tensors, or None.

    position: None if draw i has position i.
    """

    temperature: Any
    top_k: Any
    top_p: Any
    min_p: Any
    seed: Any
    position: Any

    @classmethod
    def of(cls, options: Sampling, seed: int | Tensor, position: int | Tensor | None) -> "Numbers":
        return cls(options.temperature, options.top_k, options.top_p, options.min_p, seed, position)


class Prepared(NamedTuple):
    """launch: launches a kernel. wanted: picks its arguments from the values that `_OF_A_CALL` names."""

    launch: Callable[..., None]
    wanted: Callable[[tuple], tuple]


class Written(NamedTuple):
    """What the launches of a call write; None for what it does without.

    raws, listed: what kernels/report.py needs beside the scratch.
    """

    scratch: Tensor | None = None
    raws: Tensor | None = None
    listed: Tensor | None = None
    tokens: Tensor | None = None
    valid: Tensor | None = None
    logprobs: Tensor | None = None
    kept: Tensor | None = None
    top: Tensor | None = None
    top_tokens: Tensor | None = None
    rank: Tensor | None = None

    @property
    def output(self) -> SampleOutput:
        kept = None if self.kept is None else self.kept.view(torch.int32)
        found = self.logprobs, self.top, self.top_tokens, kept, self.rank
        return SampleOutput(self.tokens, self.valid, *found)  # type: ignore[arg-type]


NUMBERS = Numbers._fields
_DEFAULTS = Numbers(temperature=1.0, top_k=0, top_p=1.0, min_p=0.0, seed=0, position=0)
_HALVES = "seed_low", "seed_high", "position_low", "position_high"  # of numbers of 64 bits
_STRIDES = "logits", "bias", "bitmask", *NUMBERS, "tokens", "kept"  # as ops/sampling/kernels/common.py has them
READ = "logits", "bias", "bitmask", "rows"
_OF_A_CALL = *READ, *Written._fields, *NUMBERS, *_HALVES  # a launch picks its arguments from these


def is_few(top_k: Any) -> bool:
    """Whether the lanes of the greatest maxima hold all that top-k keeps."""
    return isinstance(top_k, int) and 0 < top_k <= FEW


def _halves(number: Any) -> tuple[int, int]:
    """The low and the high 32 bits of a 64-bit integer, signed; 0 if it is a tensor or None."""
    if number.__class__ is not int:
        return 0, 0
    return (number + 2**31) % 2**32 - 2**31, ((number >> 32) + 2**31) % 2**32 - 2**31


def of_a_call(read: tuple, written: Written, numbers: Numbers) -> tuple:
    """The values that `_OF_A_CALL` names."""
    return (*read, *written, *numbers, *_halves(numbers.seed), *_halves(numbers.position))


class Arguments:
    """A kernel's arguments by name, from a call's tensors and numbers; and which of them each call gives anew."""

    def __init__(self, read: tuple, written: Written, numbers: Numbers, n_rows: int, n_cols: int, plan: DrawPlan):
        given = dict(zip(_OF_A_CALL, of_a_call(read, written, numbers), strict=True))
        self._tensors = {name: value if isinstance(value, Tensor) else None for name, value in given.items()}
        self._anew: set[str] = set()  # of the numbers
        self._plan = plan
        self._by_draw = numbers.position is None
        self._scalars: dict[str, Any] = {
            "n_rows": n_rows,
            "n_cols": n_cols,
            "strides": tuple(map(self._stride, _STRIDES)),
        }
        for name, value, default in zip(NUMBERS, numbers, _DEFAULTS, strict=True):
            is_number = value is not None and self._tensors[name] is None
            self._scalars[name] = value if is_number else default
            if is_number:
                self._anew |= {name, f"{name}_low", f"{name}_high"}
        self._scalars |= {name: given[name] for name in _HALVES}

    @property
    def strides(self) -> tuple[int, ...]:
        """As ops/sampling/kernels/common.py has them."""
        return self._scalars["strides"]

    def _stride(self, name: str) -> int:
        """The stride along the first dim; 0 if all draws share the tensor."""
        tensor = self._tensors[name]
        if tensor is None:
            return int(name == "position" and self._by_draw)
        return 0 if tensor.ndim == 0 or (name == "bias" and tensor.ndim == 1) else tensor.stride(0)

    def prepare(
        self, kernel: Any, programs: int, spec: SampleSpec, device: int, num_warps: int, n_parts: int = 1,
        part_stretches: int = 1, follows: bool = False, layout: SampleSpec | None = None, **options: Any,
    ) -> Callable[[], "Prepared"]:  # fmt: skip
        """A function that prepares a launch for arguments like these, as `launch.together` takes it.

        layout: of the scratch, for a kernel that is told it apart.
        """
        names = [name for name in kernel.arg_names if name not in ("K", "S")]
        specs = {"K": replace(spec, follows=True) if follows else spec} | ({"S": layout} if layout else {})
        tensors = [name.removesuffix("_ptr") for name in names if name.endswith("_ptr")]
        scalars = [name for name in names if not name.endswith("_ptr")]
        numbers = [name for name in scalars if name in self._anew]
        known = self._scalars | {"n_parts": n_parts, "part_stretches": part_stretches}
        given = [name for name in tensors if self._tensors[name] is not None] + numbers

        def prepare() -> Prepared:
            launched = launch.prepare(
                kernel, programs, [self._tensors[name] for name in tensors], [known[name] for name in scalars],
                specs, device=device, num_warps=num_warps, numbers=tuple(map(scalars.index, numbers)), plan=self._plan,
                **overlapping(follows), **options,
            )  # fmt: skip
            return Prepared(launched.__call__, itemgetter(*map(_OF_A_CALL.index, given)))

        return prepare


def prepare_draws(
    logits: Tensor, options: Sampling, seed: int | Tensor, position: int | Tensor | None, out: Tensor | None,
    *, logprobs: bool = False, plan: DrawPlan | None = None,
) -> Callable[[Tensor, Numbers, Tensor | None, Tensor | None, Tensor | None, Tensor | None], SampleOutput]:  # fmt: skip
    """What draws for a call like this one, whose arguments were checked: of logits, numbers, bias, bitmask, rows, out.

    position: None if draw i has position i. logprobs: of the distribution drawn from.
    """
    draw, _ = prepare_launches(logits, options, seed, position, out, logprobs=logprobs, plan=plan)

    def call(logits, numbers, bias, bitmask, rows, out):
        return draw(logits, numbers, bias, bitmask, rows, out).output

    return call


def prepare_launches(
    logits: Tensor, options: Sampling, seed: int | Tensor, position: int | Tensor | None, out: Tensor | None,
    *, logprobs: bool = False, raws: bool = False, plan: DrawPlan | None = None,
) -> tuple[Callable[..., Written], SampleSpec]:  # fmt: skip
    """(what draws for a call like this one, of the arguments that `prepare_draws` names; its spec).

    raws: whether the sums of stretches at temperature 1 are left.
    """
    from fused_softmax.ops.sampling.kernels.plain import _draw

    n_rows, n_cols = logits.shape
    n_draws = n_rows if options.row_indices is None else options.row_indices.shape[0]
    index, device, empty = logits.get_device(), logits.device, allocator(logits.device)
    judged = leaves_states(options)
    filtered = judged or logprobs or raws
    of_draws, of_kept, keeps = (n_draws,), (n_draws, 4 * -(-n_cols // 32)), options.return_kept

    def results(out: Tensor | None) -> tuple[Tensor, Tensor]:
        tokens = empty(of_draws, (1,), torch.int64) if out is None else out
        return tokens, empty(of_draws, (1,), torch.bool)

    plan = plan or plan_draws(n_draws, n_cols, logits.element_size(), device_of(index))
    spec = spec_of(plan, options, index, filtered, logits.dtype, logprobs or options.return_kept)
    if raws and not judged:
        spec = replace(spec, first=True)
    given = logits, options.logit_bias, options.bitmask, options.row_indices
    read, numbers = readable(*given), Numbers.of(options, seed, position)
    as_given = all(a is b for a, b in zip(read, given, strict=True))

    def written(out: Tensor | None) -> Written:
        tokens, valid = results(out)
        if not filtered:
            return Written(_slots(index, n_draws) if spec.split else None, tokens=tokens, valid=valid)
        return Written(
            empty((n_draws * spec.scratch,), (1,), torch.int64),
            empty((n_draws * spec.room,), (1,), torch.int64) if raws else None, None, tokens, valid,
            empty(of_draws, (1,), torch.float32) if logprobs else None,
            torch.zeros(of_kept, dtype=torch.uint8, device=device) if keeps else None,
        )  # fmt: skip

    if not n_draws:
        return lambda logits, numbers, bias, bitmask, rows, out: written(out), spec

    arguments = Arguments(read, like := written(out), numbers, n_rows, n_cols, plan)
    if not filtered:
        preparing = [
            arguments.prepare(_draw, n_draws * plan.parts, spec, index, plan.num_warps, plan.parts, plan.part_stretches)
        ]
    elif spec.first and (logprobs or keeps):
        tokens_alone = Arguments(read, like._replace(logprobs=None, kept=None), numbers, n_rows, n_cols, plan)
        of_tokens = replace(spec, wide=spec.by_row and _is_of_rest(options))
        preparing = _launches_of_tokens(plan, of_tokens, tokens_alone, index)
        preparing += _launches_of_boundary(plan, replace(spec, by_row=False, given=True), arguments, index)
    elif spec.first:
        preparing = _launches_of_tokens(plan, spec, arguments, index, judged)
    elif spec.ranked:
        preparing = _launch_that_reads(plan, spec, arguments, index)
        preparing += _launches_of_boundary(plan, spec, arguments, index)
    else:
        preparing = _launches_of_maximum(plan, spec, arguments, index)
    launches = launch.together(*preparing)

    def draw(logits, numbers, bias, bitmask, rows, out):
        read = (logits, bias, bitmask, rows) if as_given else readable(logits, bias, bitmask, rows)
        its = written(out)
        values = of_a_call(read, its, numbers)
        for launched, wanted in launches:
            launched(*wanted(values))
        return its

    return draw, spec


def leaves_states(options: Sampling) -> bool:
    """Whether a draw leaves the states of its stretches, because of a filter or of kept bits."""
    return options.return_kept or any(each is not None for each in (options.top_k, options.top_p, options.min_p))


def _slots(index: int, n_draws: int) -> Tensor:
    if index < 0:
        return torch.zeros(2 * n_draws, dtype=torch.int64, device="cpu")
    return workspace.slots(index, n_draws, 2, _DRAWS)


def spec_of(
    plan: DrawPlan, options: Sampling, index: int, filtered: bool, dtype: torch.dtype, reports: bool = False
) -> SampleSpec:
    """The spec of draws. reports: whether the call asks for what is kept, or for log-probabilities of it."""
    temperature, top_k, top_p = options.temperature, options.top_k, options.top_p
    may_be_rest = _is_of_rest(options)
    may_be_greedy = isinstance(temperature, Tensor) or temperature == 0
    judged = filtered and (top_k is not None or top_p is not None or may_be_greedy)
    # Where top-p is 1 or more it does not judge what top-k left, and a tensor may have it so for some rows.
    by_row = filtered and (
        isinstance(top_k, Tensor) or (may_be_rest and isinstance(top_p, Tensor) and not is_few(top_k))
    )
    first = judged and (by_row or top_k is None or not (is_few(top_k) or may_be_rest))
    needs_boundary = first and reports
    ranked = by_row or needs_boundary or (judged and not first)
    wide = needs_boundary or (may_be_rest and not is_few(top_k))
    capacity = 2 * plan.capacity if wide else plan.capacity
    return SampleSpec(
        stretches=plan.stretches, whole_groups=plan.n_cols % 8 == 0, biased=options.logit_bias is not None,
        bitmasked=options.bitmask is not None, bias_draws=_draws_of_a_row(options.logit_bias, plan.n_draws),
        bitmask_draws=_draws_of_a_row(options.bitmask, plan.n_draws), split=plan.parts > 1 and not filtered,
        greedy=not filtered and not isinstance(temperature, Tensor) and temperature == 0,
        all_stretches=plan.all_stretches, room=plan.room, capacity=capacity,
        candidates=2 * capacity if ranked else 1, ranked=ranked,
        joint=options.order == "joint", first=first, by_row=by_row,
        counted=first and top_k is not None, wide=wide, listed=plan.listed if wide else 0, ptx=has_ptx(index),
        grain_bits=0 if options.logit_bias is not None else _GRAIN_BITS.get(dtype, 0),
    )  # fmt: skip


def _draws_of_a_row(mask: Tensor | None, n_draws: int) -> int:
    """How many draws, one after another, share a row of a bias or a bitmask."""
    return n_draws // mask.shape[0] if mask is not None and mask.ndim == 2 and mask.shape[0] else 1


def _is_of_rest(options: Sampling) -> bool:
    """Whether top-p judges what top-k leaves, by the mass of all that is left."""
    return options.top_k is not None and options.top_p is not None and options.order == "sequential"


def _launch_that_reads(plan: DrawPlan, spec: SampleSpec, arguments: Arguments, index: int) -> list:
    """The first launch of all draws with filters, as functions of `Arguments.prepare`.

    The functions below return such lists too.
    """
    from fused_softmax.ops.sampling.kernels.kept import _stretches

    n_parts = -(-plan.n_cols // (STRETCH * plan.stretches))
    leading = replace(spec, leads=overlaps(index))
    return [arguments.prepare(_stretches, plan.n_draws * n_parts, leading, index, plan.num_warps)]


def _launches_of_maximum(plan: DrawPlan, spec: SampleSpec, arguments: Arguments, index: int) -> list:
    """The launches of draws for which a row's maximum says what is kept."""
    from fused_softmax.ops.sampling.kernels.above import _draw_above

    n_parts = -(-plan.n_cols // (STRETCH * plan.above_stretches))
    above = replace(spec, stretches=plan.above_warps, part_stretches=plan.above_stretches)
    early, warps = overlaps(index) and plan.n_draws <= _MOST_EARLY, plan.above_warps
    return [
        *_launch_that_reads(plan, spec, arguments, index),
        arguments.prepare(_draw_above, plan.n_draws * n_parts, above, index, warps, n_parts, follows=early),
    ]


def _launches_of_tokens(
    plan: DrawPlan, spec: SampleSpec, arguments: Arguments, index: int, judged: bool = True
) -> list:
    """The launches of draws that are judged afterwards, or never."""
    from fused_softmax.ops.sampling.kernels.first import _propose

    launches = _launch_that_reads(plan, spec, arguments, index)
    if spec.by_row:
        return launches + _launches_of_boundary(plan, spec, arguments, index)
    follows = overlaps(index)
    leading = replace(spec, leads=follows)
    launches.append(arguments.prepare(_propose, plan.n_draws, leading, index, plan.propose_warps, follows=follows))
    return launches + (_launches_of_decision(plan, spec, arguments, index) if judged else [])


def _launches_of_decision(plan: DrawPlan, spec: SampleSpec, arguments: Arguments, index: int) -> list:
    """The launch that judges what earlier launches left open, and the one that draws again."""
    from fused_softmax.ops.sampling.kernels.first import _decide, _redraw

    follows, redraws = overlaps(index), spec.first and not spec.given
    deciding = replace(spec, stretches=plan.decide_warps, leads=follows and redraws)
    launches = [
        arguments.prepare(
            _decide, plan.n_draws * plan.decide_parts, deciding, index, plan.decide_warps, plan.decide_parts,
            plan.decide_stretches, follows,
        )
    ]  # fmt: skip
    if redraws:
        again = replace(spec, stretches=plan.redraw_warps)
        launches.append(arguments.prepare(_redraw, plan.n_draws, again, index, plan.redraw_warps, follows=follows))
    return launches


def _launches_of_boundary(plan: DrawPlan, spec: SampleSpec, arguments: Arguments, index: int) -> list:
    """The launches that find where filters end. They follow the one that reads the rows."""
    from fused_softmax.ops.sampling.kernels.kept import _choose
    from fused_softmax.ops.sampling.kernels.wide import _bound, _weigh

    follows, n_wide, cut = overlaps(index), plan.n_draws * plan.wide_parts, (plan.wide_parts, plan.wide_stretches)
    spec = replace(spec, leads=follows)
    of_choosing = replace(spec, stretches=plan.kept_warps, leads=follows and spec.opens)
    # Few rows take the second look: its registers must not lower the number of resident programs.
    capped: dict[str, Any] = {"maxnreg": registers_of_choosing()} if spec.wide and spec.ptx else {}
    launches = [
        arguments.prepare(_choose, plan.n_draws, of_choosing, index, plan.kept_warps, follows=follows, **capped)
    ]
    if spec.wide:
        of_bound = replace(spec, stretches=plan.bound_warps)
        launches += [
            arguments.prepare(_weigh, n_wide, spec, index, plan.num_warps, *cut, follows),
            arguments.prepare(_bound, plan.n_draws, of_bound, index, plan.bound_warps, follows=follows),
        ]
    if spec.opens:
        launches += _launches_of_decision(plan, spec, arguments, index)
    return launches


def registers_of_choosing() -> int:
    """Registers of a thread of `_choose` at most. Triton 3.6 needs 128, with which two programs are resident.

    Later versions would spill with so few.
    """
    return 128 if triton.__version__.startswith("3.6.") else 192


def log_probs_at(x: Tensor, lse: Tensor) -> Tensor:
    """x - lse in float64; 0 where both are inf."""
    return torch.where(x == lse, 0.0, x.double() - lse)


def raw_lse(logits: Tensor, options: Sampling, x: Tensor) -> Tensor:
    """float64 [n_draws]: the log-sum-exp of the logits as given, for the row of each draw; NaN for a row with two inf.

    x: these rows in float32.
    """
    from fused_softmax.ops.sampling.kernels.kept import _stretches

    n_draws, n_cols = x.shape
    index, n_stretches = logits.get_device(), -(-n_cols // STRETCH)
    plan = plan_draws(n_draws, n_cols, logits.element_size(), device_of(index))
    spec = spec_of(plan, Sampling(), index, True, logits.dtype)
    scratch = torch.empty(n_draws, spec.scratch, dtype=torch.int64, device=x.device)
    read, numbers = readable(logits, None, None, options.row_indices), Numbers(1.0, None, None, None, 0, 0)
    written = Written(scratch)
    if n_draws:
        programs = n_draws * -(-n_stretches // plan.stretches)
        arguments = Arguments(read, written, numbers, logits.shape[0], n_cols, plan)
        state = arguments.prepare(_stretches, programs, spec, index, plan.num_warps)()
        state.launch(*state.wanted(of_a_call(read, written, numbers)))
    s = scratch[:, spec.sums_at :][:, :n_stretches]
    m = scratch[:, spec.maxima_at :].view(torch.float32)[:, :n_stretches]
    top = m.amax(1, keepdim=True)
    total = (s.double() / _UNIT * (m.double() - top.double()).exp()).sum(1)
    lse = top.squeeze(1).double() + total.log()
    one_inf = ((x == math.inf).sum(1) == 1) & ~x.isnan().any(1)
    return lse.masked_fill((s < 0).any(1), math.nan).masked_fill(one_inf, math.inf)


def rows_of(logits: Tensor, options: Sampling) -> Tensor:
    """The row of each draw, in float32."""
    if options.row_indices is not None:
        logits = logits.index_select(0, options.row_indices.clamp(0, logits.shape[0] - 1))
    return logits.float() + 0.0  # -0.0 is 0.0 wherever columns are ordered


def judged_rows(x: Tensor, options: Sampling) -> Tensor:
    """Rows in float32 as filters judge them, but without the bitmask, which is in the kept bits."""
    return x if options.logit_bias is None else x + options.logit_bias.float()


def greatest(x: Tensor, n: int, kept: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """(values, columns) [n_draws, n] of the greatest logits of each row; of equal ones the lowest column first.

    kept: an int32 bitmask of the columns that count. The others count as -inf.
    """
    if kept is not None:
        x = torch.where(unpacked(kept, x.shape[1]), x, -math.inf)
    bits = x.contiguous().view(torch.int32)
    order = bits ^ ((bits >> 31) & 0x7FFFFFFF)
    cols = torch.arange(x.shape[1], device=x.device)
    code = (order.long() << 24) | (_COLUMNS - 1 - cols)
    cols = _COLUMNS - 1 - (code.topk(n, dim=1).values & (_COLUMNS - 1))
    return x.gather(1, cols), cols


def readable(
    logits: Tensor, bias: Tensor | None, bitmask: Tensor | None, rows: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """The tensors as kernels read them, their last dims contiguous, and bytes of bits."""
    logits = logits if logits.stride(1) == 1 or logits.shape[1] == 1 else logits.contiguous()
    if bias is not None and bias.stride(-1) != 1:
        bias = bias.contiguous()
    if bitmask is not None:
        bitmask = as_bytes(bitmask)
    return logits, bias, bitmask, rows if rows is None or rows.is_contiguous() else rows.contiguous()
