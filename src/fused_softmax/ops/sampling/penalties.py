"""Launches of penalties: of rows of logits as they are, or as a draw has them."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax.core import launch
from fused_softmax.core.calls import allocator, bump_version
from fused_softmax.core.device import device_of
from fused_softmax.core.layout import overlap_like
from fused_softmax.core.plan import Device
from fused_softmax.core.runner import has_ptx, overlapping, overlaps
from fused_softmax.ops.sampling.kernels.spec import PenaltySpec
from fused_softmax.ops.sampling.launches import readable

_INTEGERS = (torch.int64, torch.int32)
_NUMBERS = (float, int)
_BLOCK, _WARPS = 2048, 4  # columns of a block, with which blocks are written as fast as a copy
_TILE, _ROW_WARPS = 2048, 32  # ids of a row that are read at a time: so many that their accesses overlap
_BLOCK_TILE = 512  # ids that a block searches at a time for its columns
_SHARE = 0.75  # of L2, for the rows of a turn
_MARKED, _HELD = 64, 16  # tiles whose first ids a lane marks, a bit each; bytes of logits that it holds in place
# The arguments that each launch gets anew.
_VALUES = "first_draw", "length", "ids_row_stride", "ids_col_stride", "repetition", "presence", "frequency"


class Penalties(NamedTuple):
    """Numbers, or tensors [] or [n_draws]."""

    repetition: Any
    presence: Any
    frequency: Any


_DEFAULTS = Penalties(1.0, 0.0, 0.0)


@dataclass(frozen=True)
class PenaltyPlan:
    """How rows are written: whole blocks of `block` columns; and `parts` parts of a row by tiles of its ids.

    turn: how many rows take both launches before the next rows do.
    """

    n_draws: int
    n_cols: int
    block: int
    tile: int
    parts: int
    turn: int

    @property
    def blocks(self) -> int:
        """Blocks of a row."""
        return -(-self.n_cols // self.block)

    @property
    def part_cols(self) -> int:
        return -(-self.blocks // self.parts) * self.block

    def most_ids(self, element_size: int, in_place: int) -> int:
        """How many ids a row may have, if only their columns are to be counted. With more, whole blocks are counted."""
        tiles = _HELD // element_size if in_place else _MARKED
        return min(tiles * self.tile, PenaltySpec.counted)


def plan_penalties(n_draws: int, n_cols: int, bytes_of_column: int, device: Device) -> PenaltyPlan:
    """The plan for penalties of rows of n_cols logits.

    bytes_of_column: bytes of a logit and its result; 0 in place.

    >>> from fused_softmax.core.plan import H200
    >>> plan_penalties(8, 128256, 4, H200).parts, plan_penalties(256, 128256, 4, H200).turn
    (16, 91)
    """
    turn = max(1, min(n_draws, int(_SHARE * device.l2_bytes) // max(1, n_cols * bytes_of_column)))
    blocks = -(-n_cols // _BLOCK)
    parts = max(1, min(blocks, device.sm_count // turn))
    return PenaltyPlan(n_draws, n_cols, _BLOCK, _TILE, parts, turn)


def prepare_penalties(
    logits: Tensor, token_ids: Tensor, penalties: Penalties, out: Tensor | None = None, bias: Tensor | None = None,
    bitmask: Tensor | None = None, rows: Tensor | None = None, dtype: torch.dtype | None = None,
) -> Callable[..., Tensor]:  # fmt: skip
    """What penalizes rows like these, whose arguments were checked: call(the first seven arguments, with any ids).

    dtype: of a new result that is drawn from, and has `strides_of_draws`. Without it a new result has the logits' dtype
    and is contiguous.
    """
    (n_rows, n_cols), index = logits.shape, logits.get_device()
    n_draws = n_rows if rows is None else rows.shape[0]
    empty, shape = allocator(logits.device), (n_draws, n_cols)
    strides = (n_cols, 1) if dtype is None else strides_of_draws(n_cols)
    dtype = dtype or logits.dtype
    if not n_draws:
        return lambda *given: empty(shape, strides, dtype) if given[3] is None else given[3]
    bytes_of_column = logits.element_size() + dtype.itemsize
    plans = [plan_penalties(n_draws, n_cols, each, device_of(index)) for each in (bytes_of_column, 0)]
    most_ids = [each.most_ids(dtype.itemsize, in_place) for in_place, each in enumerate(plans)]
    launches: dict[tuple, list[Callable[..., None]]] = {}

    def launch_of(out, token_ids, read, penalties):
        logits, bias, bitmask, rows = read
        of_ids = token_ids.shape[1], token_ids.stride(0), token_ids.stride(1)
        in_place = _lies_alike(out, logits)
        plan, by_block = plans[in_place], of_ids[0] > most_ids[in_place]
        kind = (
            in_place, by_block, out.data_ptr() % 16, out.stride(), token_ids.dtype, token_ids.data_ptr() % 16,
            all(-(2**31) <= each < 2**31 for each in of_ids),
        )  # fmt: skip
        found = launches.get(kind)
        if found is None:
            found = launches[kind] = _prepare(
                plan, index, n_rows, out, token_ids, read, penalties, of_ids, in_place, by_block
            )
        tensors = [each for each in (out, logits, token_ids, bias, bitmask, rows, *penalties) if _is_tensor(each)]
        numbers = [default if _is_tensor(each) else each for each, default in _numbers(penalties)]
        for first in range(0, n_draws, plan.turn):
            for each in found:
                each(*tensors, first, *of_ids, *numbers)

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
    """The strides of rows that nobody else sees: each begins on 16 bytes."""
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


def _prepare(plan, index, n_rows, out, token_ids, read, penalties, of_ids, in_place, by_block):
    from fused_softmax.ops.sampling.kernels.penalties import _penalize

    logits, bias, bitmask, rows = read
    begins_early = overlaps(index) and not in_place
    spec = PenaltySpec(
        block=plan.block, tile=plan.tile, whole_groups=plan.n_cols % 8 == 0, biased=bias is not None,
        bitmasked=bitmask is not None, packed=out.element_size() == 2, in_place=in_place, by_block=by_block,
        ptx=has_ptx(index),
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
        "n_draws": plan.n_draws, "part_cols": plan.part_cols, "first_draw": 0, "length": length,
    }  # fmt: skip
    for (name, each), default in zip(penalties._asdict().items(), _DEFAULTS, strict=True):
        values[f"{name}_stride"] = each.stride(0) if _is_tensor(each) and each.ndim else 0
        values[name] = default if _is_tensor(each) else float(each)
    names = [name for name in _penalize.arg_names if name != "K"]
    pointers = [name.removesuffix("_ptr") for name in names if name.endswith("_ptr")]
    scalars = [name for name in names if not name.endswith("_ptr")]

    def preparing(programs: int, num_warps: int, **of_launch: Any) -> Callable[[], Any]:
        own = replace(spec, **of_launch)
        return partial(
            launch.prepare, _penalize, programs, [tensors[name] for name in pointers],
            [values[name] for name in scalars], {"K": own}, device=index, num_warps=num_warps,
            numbers=tuple(scalars.index(name) for name in _VALUES), plan=plan, **overlapping(own.follows),
        )  # fmt: skip

    blocks, n_parts = plan.turn * plan.blocks, -(-plan.n_cols // plan.part_cols)
    of_rows = preparing(plan.turn * n_parts, _ROW_WARPS, follows=begins_early)
    if by_block:
        made = [preparing(blocks, _WARPS, streams=True, tile=_BLOCK_TILE)]
    elif in_place:
        made = [of_rows]
    else:
        made = [preparing(blocks, _WARPS, streams=True, leads=begins_early), of_rows]
    return [each.__call__ for each in launch.together(*made)]


def kinds_of(logits: Any, token_ids: Any, penalties: Penalties, rows: Any = None) -> tuple[Any, ...] | None:
    """What tells calls apart for `find`, except the ids; None if an argument has to be looked at more closely."""
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
