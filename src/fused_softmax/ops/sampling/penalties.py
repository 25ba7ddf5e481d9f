"""Launches of penalties: of rows of logits as they are, or as a draw has them."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax.core import launch
from fused_softmax.core.calls import allocator, bump_version
from fused_softmax.core.device import device_of
from fused_softmax.core.layout import overlap_like
from fused_softmax.core.plan import Device
from fused_softmax.core.runner import has_ptx
from fused_softmax.ops.sampling.kernels.spec import PenaltySpec
from fused_softmax.ops.sampling.launches import readable

_INTEGERS = (torch.int64, torch.int32)
_NUMBERS = (float, int)
# Columns of a slice, its warps, and the ids of a tile: 8 columns a thread, of which 64 registers hold the logits, their
# counts and what they become. Few rows have more programs by the narrow one; by the wide one ids are read less often.
_NARROW, _WIDE = (2048, 8, 512), (4096, 16, 1024)
_REGISTERS = 64  # which what ends within 8 columns takes more than by itself
_PROGRAMS = 2  # of a multiprocessor, from which on slices are wide
_VALUES = "length", "ids_row_stride", "ids_col_stride", "repetition", "presence", "frequency"  # that are given anew


class Penalties(NamedTuple):
    """Numbers, or tensors [] or [n_draws]."""

    repetition: Any
    presence: Any
    frequency: Any


_DEFAULTS = Penalties(1.0, 0.0, 0.0)


@dataclass(frozen=True)
class PenaltyPlan:
    """How rows are cut into slices, which have a program each: `slice` columns, and `tile` ids at a time."""

    n_draws: int
    n_cols: int
    slice: int
    num_warps: int
    tile: int

    @property
    def slices(self) -> int:
        return -(-self.n_cols // self.slice)


def plan_penalties(n_draws: int, n_cols: int, device: Device) -> PenaltyPlan:
    """The plan for penalties of rows of n_cols logits.

    >>> from fused_softmax.core.plan import H200
    >>> plan_penalties(8, 128256, H200).slices
    63
    """
    wide = n_draws * -(-n_cols // _WIDE[0]) >= _PROGRAMS * device.sm_count
    columns, num_warps, tile = _WIDE if wide else _NARROW
    return PenaltyPlan(n_draws, n_cols, columns, num_warps, tile)


def prepare_penalties(
    logits: Tensor, token_ids: Tensor, penalties: Penalties, out: Tensor | None = None, bias: Tensor | None = None,
    bitmask: Tensor | None = None, rows: Tensor | None = None, dtype: torch.dtype | None = None,
    plan: PenaltyPlan | None = None,
) -> Callable[..., Tensor]:  # fmt: skip
    """What penalizes rows like these, whose arguments were checked: of the first seven arguments, but for other ids.

    dtype: of a new result that draws are from, with `strides_of_draws`; otherwise it has the logits' and is contiguous.
    """
    (n_rows, n_cols), index = logits.shape, logits.get_device()
    n_draws = n_rows if rows is None else rows.shape[0]
    empty, shape = allocator(logits.device), (n_draws, n_cols)
    strides = (n_cols, 1) if dtype is None else strides_of_draws(n_cols)
    dtype = dtype or logits.dtype
    if not n_draws:
        return lambda *given: empty(shape, strides, dtype) if given[3] is None else given[3]
    plan = plan or plan_penalties(n_draws, n_cols, device_of(index))
    launches: dict[tuple, Callable[..., None]] = {}

    def launch_of(out, token_ids, read, penalties):
        logits, bias, bitmask, rows = read
        of_ids = token_ids.shape[1], token_ids.stride(0), token_ids.stride(1)
        lies = _lies_alike(out, logits)
        kind = (
            lies, out.data_ptr() % 16, out.stride(), token_ids.dtype, token_ids.data_ptr() % 16,
            all(-(2**31) <= each < 2**31 for each in of_ids),
        )  # fmt: skip
        found = launches.get(kind)
        if found is None:
            found = launches[kind] = _prepare(plan, index, n_rows, out, token_ids, read, penalties, of_ids, lies)
        tensors = [each for each in (out, logits, token_ids, bias, bitmask, rows, *penalties) if _is_tensor(each)]
        found(*tensors, *of_ids, *(default if _is_tensor(each) else each for each, default in _numbers(penalties)))

    if out is None:

        def call(logits, token_ids, penalties, out, bias, bitmask, rows):
            y = empty(shape, strides, dtype)
            launch_of(y, token_ids, readable(logits, bias, bitmask, rows), penalties)
            return y

        return call
    overlaps, writable = overlap_like(out, logits, *penalties), out.stride(1) == 1 or n_cols == 1

    def call_into(logits, token_ids, penalties, out, bias, bitmask, rows):
        read = readable(logits, bias, bitmask, rows)
        in_place = _lies_alike(out, read[0])
        apart = not writable or overlap_like(out, token_ids)(out, token_ids)
        if apart or (overlaps(out, logits, *penalties) and not (in_place and _lie_apart(out, penalties))):
            y = empty(shape, strides, dtype)
            launch_of(y, token_ids, read, penalties)
            return out.copy_(y)
        launch_of(out, token_ids, read, penalties)
        if not out.is_inference():
            bump_version((out,))  # autograd sees no write of a kernel's
        return out

    return call_into


def strides_of_draws(n_cols: int) -> tuple[int, int]:
    """Of rows that nobody else sees: each begins on 16 bytes."""
    return -(-n_cols // 8) * 8, 1


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor)


def _numbers(penalties: Penalties):
    return zip(penalties, _DEFAULTS, strict=True)


def _lies_alike(out: Tensor, logits: Tensor) -> bool:
    """Whether each result lies where its logit does."""
    return out.data_ptr() == logits.data_ptr() and out.dtype == logits.dtype and out.stride() == logits.stride()


def _lie_apart(out: Tensor, penalties: Penalties) -> bool:
    return not overlap_like(out, *penalties)(out, *penalties)


def _prepare(plan, index, n_rows, out, token_ids, read, penalties, of_ids, in_place):
    from fused_softmax.ops.sampling.kernels.penalties import _penalize

    logits, bias, bitmask, rows = read
    spec = PenaltySpec(
        slice=plan.slice, tile=plan.tile, whole_groups=plan.n_cols % 8 == 0, biased=bias is not None,
        bitmasked=bitmask is not None, packed=out.element_size() == 2, in_place=in_place, ptx=has_ptx(index),
    )  # fmt: skip
    tensors = {
        "out": out, "logits": logits, "ids": token_ids, "bias": bias, "bitmask": bitmask, "rows": rows,
    } | {name: each if _is_tensor(each) else None for name, each in penalties._asdict().items()}  # fmt: skip
    length, ids_row_stride, ids_col_stride = of_ids
    values = {
        "out_row_stride": out.stride(0), "logits_row_stride": logits.stride(0),
        "bias_row_stride": bias.stride(0) if bias is not None and bias.ndim == 2 else 0,
        "bitmask_row_stride": 0 if bitmask is None else bitmask.stride(0),
        "ids_row_stride": ids_row_stride, "ids_col_stride": ids_col_stride, "n_rows": n_rows, "n_cols": plan.n_cols,
        "n_slices": plan.slices, "length": length,
    }  # fmt: skip
    for (name, each), default in zip(penalties._asdict().items(), _DEFAULTS, strict=True):
        values[f"{name}_stride"] = each.stride(0) if _is_tensor(each) and each.ndim else 0
        values[name] = default if _is_tensor(each) else float(each)
    names = [name for name in _penalize.arg_names if name != "K"]
    pointers = [name.removesuffix("_ptr") for name in names if name.endswith("_ptr")]
    scalars = [name for name in names if not name.endswith("_ptr")]
    launched = launch.prepare(
        _penalize, plan.n_draws * plan.slices, [tensors[name] for name in pointers],
        [values[name] for name in scalars], {"K": spec}, device=index, num_warps=plan.num_warps,
        numbers=tuple(scalars.index(name) for name in _VALUES), plan=plan,
        **({"most_registers": _REGISTERS} if spec.ptx else {}),
    )  # fmt: skip
    return launched.__call__


def kinds_of(logits: Any, token_ids: Any, penalties: Penalties, rows: Any = None) -> tuple[Any, ...] | None:
    """What tells calls apart, for `find`, but for the ids; None where an argument has to be looked at more closely."""
    if token_ids.__class__ is not Tensor or not isinstance(logits, Tensor) or logits.ndim != 2:
        return None
    if token_ids.ndim != 2 or token_ids.dtype not in _INTEGERS or token_ids.device != logits.device:
        return None
    if token_ids.layout is not torch.strided:
        return None
    like = logits if rows is None else rows
    if not isinstance(like, Tensor) or not like.ndim or token_ids.shape[0] != like.shape[0]:
        return None
    kinds: list[Any] = []
    for each, least in zip(penalties, (1e-30, -1e30, -1e30), strict=True):
        if each.__class__ in _NUMBERS:
            if not least < each < 1e30:
                return None
            kinds.append("number")
        elif isinstance(each, Tensor):
            kinds.append(each)
        else:
            return None
    return tuple(kinds)
