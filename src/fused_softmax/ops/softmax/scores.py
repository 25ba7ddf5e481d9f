"""What is done to scores before a softmax: checked once, laid out against the input, and given to a launch.

z = x * scale + mask.  A bool mask keeps where it is True; causal keeps column j of query i where j - i <= n_keys -
n_queries, so that the last query sees every key (bottom-right aligned). What is not kept is -inf.
A scale of 0 is temperature 0: the row's first maximum alone is kept, and scaled by 1.
A sink is one more score of every row, which is neither scaled nor masked and has no column: it counts in the sum alone.
"""

import itertools
import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from fused_softmax.core.checks import DTYPES, arithmetic_in, broadcast
from fused_softmax.core.described import described, typed
from fused_softmax.core.kernels.spec import ADDED_MASK, BOOL_MASK, NO_MASK
from fused_softmax.core.layout import Order, coalesced, last
from fused_softmax.core.options import Options, is_bool, option, refuse_batch_invariant

MaskedRows = Literal["nan", "zero"]


_LEAST = 2.0**-149  # of fp32, above 0


@dataclass(frozen=True)
class Scores(Options):
    """scale, mask, causality and sink of one call, in torch's terms.

    scale: a number, or a tensor that broadcasts against the input with its last dim 1.
    mask: bool or of a float dtype; broadcasts against the input, and is never expanded in memory.
    masked_rows: what a row gets that keeps nothing: NaN, or probabilities of zero.
    never_zero: whether a scale tensor is known to hold no 0.
    moved: whether scale, mask or sink came from another device, and is a copy.
    sink: a number, or a tensor that broadcasts as a scale does.
    batch_invariant: whether a row's bits are to follow from the row alone, and not from how many stand beside it.
    """

    scale: float | Tensor | None = option(None, "float?", by_row=True)
    mask: Tensor | None = option(None, "Tensor?")
    is_causal: bool = option(False, "bool")
    masked_rows: MaskedRows = option("nan", "str")
    sink: float | Tensor | None = option(None, "float?", by_row=True)
    batch_invariant: bool = option(False, "bool", of_kernels=True)
    never_zero: bool = False
    moved: bool = False

    @property
    def plain(self) -> bool:
        """Whether nothing is done to the scores."""
        return self is PLAIN or is_plain(self.scale, self.mask, self.is_causal, self.masked_rows, self.sink)

    @property
    def greedy(self) -> bool:
        """Whether a row may have scale 0."""
        return not self.never_zero if isinstance(self.scale, Tensor) else self.scale == 0

    @property
    def rules(self) -> dict[str, Any]:
        """The options that a kept call has, and its arguments do not."""
        return {name: getattr(self, name) for name in ("is_causal", "masked_rows", "batch_invariant")}

    @property
    def hides(self) -> bool:
        """Whether an element that is -inf may have been masked, and then has no gradient."""
        return self.mask is not None or self.is_causal or self.masked_rows == "zero"

    @property
    def added(self) -> bool:
        """Whether the kernels hold sums in fp32, and not the elements they read."""
        return self.mask is not None and self.mask.dtype != torch.bool

    @property
    def per_row(self) -> Tensor | None:
        """The scale of each row, where it is a tensor."""
        return self.scale if isinstance(self.scale, Tensor) else None

    @property
    def number(self) -> float:
        """The scale of all rows as a kernel is given it, in 32 bits; 1 where it is a tensor or there is none."""
        return 1.0 if self.scale is None or isinstance(self.scale, Tensor) else kernel_number(self.scale)

    @property
    def tensors(self) -> list[Tensor]:
        """Those among mask, scale and sink."""
        return list(self.by_name.values())

    @property
    def by_name(self) -> dict[str, Tensor]:
        """The same by the names of the arguments."""
        given = {"mask": self.mask, "scale": self.scale, "sink": self.sink}
        return {argument: each for argument, each in given.items() if isinstance(each, Tensor)}

    def operator_arguments(self) -> tuple:
        """The last arguments of a registered operator; left out where all are defaults."""
        return () if self.plain else self.traced()

    @property
    def of_kernels(self) -> dict[str, bool]:
        """Its arguments behind those, by name."""
        return {"batch_invariant": True} if self.batch_invariant else {}

    def along(self, dim: int, shape: tuple[int, ...]) -> "Scores":
        """For the input with `dim` moved last: its mask, scale and sink moved likewise, as views."""
        if self.plain or dim % len(shape) == len(shape) - 1:
            return self
        given: dict[str, Any] = {"scale": self.scale, "mask": self.mask, "sink": self.sink}
        for name, each in given.items():
            if isinstance(each, Tensor):
                given[name] = each.expand(shape).movedim(dim, -1)
        return replace(self, **given)

    def exact(self, dtype: torch.dtype, device: torch.device) -> "Scores":
        """The scores as kernels take them: the sink is a tensor, and so is the scale if the arithmetic has 64 bits.

        A kernel's own number has 32 bits.
        """
        scores = self
        if self.sink is not None and not isinstance(self.sink, Tensor):
            scores = replace(scores, sink=torch.full((), self.sink, dtype=arithmetic_in(dtype), device=device))
        if not isinstance(self.scale, float) or dtype != torch.float64:
            return scores
        number = torch.full((), self.scale, dtype=torch.float64, device=device)
        return replace(scores, scale=number, never_zero=self.scale != 0)

    def laid_out(self, dim: int, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> "ScoreLayout":
        """How these lie against the rows of an input of `shape` along `dim`, for a result of `dtype`."""
        if self.plain:
            return PLAIN_ROWS
        moved = (*(size for i, size in enumerate(shape) if i != dim % len(shape)), shape[dim]) if shape else shape
        return scores_against((self.along(dim, shape) if shape else self).exact(dtype, device), moved)


PLAIN, PLAIN_IN_ANY_BATCH = Scores(), Scores(batch_invariant=True)


def kernel_number(number: float) -> float:
    """A number as 32 bits hold it. It does not become 0 by rounding, because 0 has a meaning of its own."""
    return math.copysign(_LEAST, number) if 0 < abs(number) < _LEAST else float(number)


def is_plain(scale: Any, mask: Any, is_causal: Any, masked_rows: Any, sink: Any = None) -> bool:
    return scale is None and mask is None and is_causal is False and masked_rows == "nan" and sink is None


def kind_of_scale(scale: Any) -> Any:
    """What a kept call depends on of a scale: whether a number is 0 or 1; anything else itself."""
    if type(scale) is float or type(scale) is int:
        return "0" if scale == 0 else "1" if scale == 1 else "number"
    return scale


def kind_of_sink(sink: Any) -> Any:
    """What a kept call depends on of a sink: that a number is one; anything else itself."""
    return "number" if type(sink) is float or type(sink) is int else sink


def scores_of(
    name: str, input: Tensor, dim: int, scale: Any, mask: Any, is_causal: Any, masked_rows: Any, sink: Any = None,
    batch_invariant: Any = False,
) -> Scores:  # fmt: skip
    """The Scores of a call, or an error that names the argument."""
    is_bool(name, "batch_invariant", batch_invariant)
    if is_plain(scale, mask, is_causal, masked_rows, sink):
        return PLAIN_IN_ANY_BATCH if batch_invariant else PLAIN
    shape, given = tuple(input.shape), (scale, mask, sink)
    if masked_rows not in ("nan", "zero"):
        raise ValueError(f'{name}: masked_rows must be "nan" or "zero", got {described(masked_rows)}')
    is_bool(name, "is_causal", is_causal)
    last = input.ndim > 0 and dim % input.ndim == input.ndim - 1
    if is_causal and input.ndim < 2:
        raise ValueError(f"{name}: is_causal needs at least 2 dims [..., queries, keys], got input of shape {shape}")
    if is_causal and not last:
        raise ValueError(f"{name}: is_causal is over the last dim, got dim={dim} of input of shape {shape}")
    if mask is not None:
        if not isinstance(mask, Tensor):
            raise TypeError(f"{name}: mask must be a Tensor, not {type(mask).__name__}")
        if mask.dtype != torch.bool and mask.dtype not in DTYPES:
            raise TypeError(
                f"{name}: mask must be bool (True keeps) or of 16 to 64 bit floats (added), got {mask.dtype}"
            )
        mask = broadcast(name, "mask", mask, input, shape)
    scale, sink = (
        _of_rows(name, argument, each, input, dim) for argument, each in (("scale", scale), ("sink", sink))
    )  # fmt: skip
    if isinstance(scale, float) and scale == 1:
        scale = None
    moved = any(isinstance(a, Tensor) and a is not b for a, b in zip(given, (scale, mask, sink), strict=True))
    if batch_invariant and torch.is_grad_enabled():
        for argument, each in (("scale", scale), ("sink", sink)):
            if isinstance(each, Tensor) and each.requires_grad:
                refuse_batch_invariant(name, f"{argument} requires grad, which torch's operations sum over the row")
    return Scores(
        scale, mask, is_causal, masked_rows, moved=moved, sink=sink, batch_invariant=batch_invariant
    )  # fmt: skip


def _of_rows(name: str, argument: str, given: Any, input: Tensor, dim: int) -> float | Tensor | None:
    """A number for all rows, or a tensor of one a row on the input's device, or an error that names the argument."""
    if given is None:
        return None
    if not isinstance(given, Tensor):
        if isinstance(given, bool) or not isinstance(given, Real):
            raise TypeError(f"{name}: {argument} must be a number or a Tensor, not {typed(given)}")
        return float(given)
    if given.dtype not in DTYPES:
        raise TypeError(f"{name}: {argument} must be of 16 to 64 bit floats, got {given.dtype}")
    shape = tuple(input.shape)
    given = broadcast(name, argument, given, input, shape)
    from_end = dim % max(1, input.ndim) - input.ndim
    single = given.ndim < max(1, -from_end) or given.shape[from_end] == 1 or given.stride(from_end) == 0
    if given.ndim and input.ndim and not single and shape[dim] != 1:
        along = tuple(1 if i == dim % input.ndim else size for i, size in enumerate(shape))
        got = tuple(given.shape)
        raise ValueError(
            f"{name}: {argument} must have one value a row, in a shape that broadcasts to {along}, got shape {got}"
        )
    return given


_KEPT_BYTES = 16 << 20  # of a mask that L2 keeps beside the rows that stream through it


@dataclass(frozen=True)
class ScoreLayout:
    """How mask, scale and sink lie against the rows of an input [n_rows, n_cols], for the kernels.

    scores: what is laid out, with a sink that is a tensor (`Scores.exact`).
    A row's number splits into up to three indices, of which n_1 and n_2 are the sizes of the last two. Strides are
    along these indices.

    mask, scale, sink: the tensors, or None. values: a kernel's arguments by name.
    kind: the fields of its ScoreSpec that the scores decide.
    shared_dims: on how many of the last indices a row of the mask depends, if not on the index before them; else 0.
    copied: whether one of these is a copy, which another call has to make anew.
    leading: the value, if any, that counts the rows' leading index, and so grows with the input's leading size.
    """

    scores: Scores
    mask: Tensor | None
    scale: Tensor | None
    sink: Tensor | None
    values: dict[str, Any]
    kind: dict[str, Any]
    shared_dims: int = 0
    copied: bool = False
    leading: str | None = None

    @property
    def tensors(self) -> tuple[Tensor, ...]:
        """A launch's, in the kernels' order."""
        return tuple(each for each in (self.mask, self.scale, self.sink) if each is not None)

    @property
    def numbers(self) -> tuple[str, ...]:
        """The names of the values that every launch gives anew."""
        return ("scale",) if isinstance(self.scores.scale, float) else ()


_NAMES = (
    "n_1", "n_2", "mask_0", "mask_1", "mask_2", "mask_col_stride", "scale_0", "scale_1", "scale_2", "n_queries",
)  # fmt: skip


_SINK = ("sink_0", "sink_1", "sink_2")


_COLUMN_NAMES = ("mask_outer", "mask_col", "mask_inner", "scale_outer", "scale_inner", "scale")


PLAIN_ROWS = ScoreLayout(PLAIN, None, None, None, dict.fromkeys((*_NAMES, *_SINK, "scale")), {})


PLAIN_COLUMNS = ScoreLayout(PLAIN, None, None, None, dict.fromkeys(_COLUMN_NAMES), {})


def scores_against(scores: Scores, shape: tuple[int, ...]) -> ScoreLayout:
    """The layout of scores for an input of `shape` whose rows run along its last dim."""
    if scores.plain:
        return PLAIN_ROWS
    shape = shape or (1,)
    mask = scores.mask
    given = (mask, *(each if isinstance(each, Tensor) else None for each in (scores.scale, scores.sink)))
    views = [None if t is None else t.expand(shape) for t in given]
    sizes, strides = coalesced(shape[:-1], _leading_strides(views, shape))
    copied = len(sizes) > 3
    if scores.batch_invariant:
        alone = [view if view is None or _stands_alone(view) else _padded(view) for view in views]
        sizes, strides = coalesced(shape[:-1], _leading_strides(alone, shape))
        copied = len(sizes) > 3 or any(a is not b for a, b in zip(alone, views, strict=True))
        views = alone
    if len(sizes) > 3:  # three indices do not describe it
        views = [None if view is None else _dense(view) for view in views]
        sizes, strides = coalesced(shape[:-1], _leading_strides(views, shape))
    shared = 0
    if views[0] is not None and len(sizes) > 1 and strides[0][0] == 0 and not scores.batch_invariant:
        distinct = math.prod(size for size, stride in zip(shape, views[0].stride(), strict=True) if stride)
        shared = len(sizes) - 1 if distinct * views[0].element_size() > _KEPT_BYTES else 0
    leading = {1: "n_2", 2: "n_1"}.get(len(sizes))
    sizes = (1,) * (3 - len(sizes)) + sizes
    strides = [(0,) * (3 - len(each)) + each for each in strides]
    col_stride = 0 if views[0] is None else views[0].stride(-1)
    n_queries = shape[-2] if scores.is_causal else 1
    values = dict(zip(_NAMES, (*sizes[1:], *strides[0], col_stride, *strides[1], n_queries), strict=True))
    # None without a sink: the kernel then has no argument for it, and stays as it was compiled.
    values |= dict(zip(_SINK, (None,) * 3 if views[2] is None else strides[2], strict=True))
    kind = _kind_of(scores) | {"causal": scores.is_causal, "sink": views[2] is not None}
    values |= {"scale": scores.number}
    return ScoreLayout(scores, views[0], views[1], views[2], values, kind, shared, copied, leading)


def scores_against_columns(scores: Scores, shape: tuple[int, ...], dim: int, order: Order) -> ScoreLayout | None:
    """The layout of scores for an input whose `dim` runs along the middle of [n_outer, n_cols, n_inner].

    order: of the other dims, as `columns_of` has it. None where mask or scale have no such strides, and where the call
    has a sink or is causal.
    """
    if scores.plain:
        return PLAIN_COLUMNS
    if scores.is_causal or scores.sink is not None:
        return None
    mask, scale = scores.mask, scores.per_row
    of_mask, of_scale = (_strides_of_columns(each, shape, dim, order) for each in (mask, scale))
    if of_mask is None or of_scale is None:
        return None
    values = dict(zip(_COLUMN_NAMES, (*of_mask, of_scale[0], of_scale[2], scores.number), strict=True))
    kind = _kind_of(scores) | {
        "mask_cols": bool(of_mask[1]),
        "mask_inner": bool(of_mask[2]),
        "scale_inner": bool(of_scale[2]),
        "mask_vector": 1 if mask is None else _vector_of(mask, of_mask),
    }
    return ScoreLayout(scores, mask, scale, None, values, kind)


def _strides_of_columns(
    x: Tensor | None, shape: tuple[int, ...], dim: int, order: Order
) -> tuple[int, int, int] | None:  # fmt: skip
    """Strides of x, which broadcasts to shape, as a view [n_outer, n_cols, n_inner] of such an order of dims.

    None where it has no such view; 0 where there is no x.
    """
    if x is None:
        return 0, 0, 0
    view = x.expand(shape)
    for dims in order:
        if any(view.stride(b) != view.stride(a) * shape[a] for a, b in itertools.pairwise(dims)):
            return None
    outer, inner = (view.stride(dims[0]) if dims else 0 for dims in order)
    return outer, view.stride(dim), inner


def _vector_of(mask: Tensor, strides: tuple[int, int, int]) -> int:
    """Elements of a mask that lie side by side at an aligned address, wherever a program reads; at most 16 bytes."""
    if strides[2] != 1 or mask.data_ptr() % 16:
        return 1
    return math.gcd(16 // mask.element_size(), *strides[:2])


def _kind_of(scores: Scores) -> dict[str, Any]:
    """The fields of a Spec that scores decide, however they lie."""
    mask = scores.mask
    return {
        "mask": NO_MASK if mask is None else BOOL_MASK if mask.dtype == torch.bool else ADDED_MASK,
        "scaled": scores.scale is not None,
        "greedy": scores.greedy,
        "zero_masked_rows": scores.masked_rows == "zero",
    }


def _dense(view: Tensor) -> Tensor:
    """A copy in which all neighbours of the leading dims merge. Its last dim is no larger than that of the view."""
    return view.contiguous() if view.stride(-1) else view[..., :1].contiguous().expand(view.shape)


def _leading_strides(views, shape):
    return [(0,) * (len(shape) - 1) if view is None else view.stride()[:-1] for view in views]


def _stands_alone(view: Tensor) -> bool:
    """Whether Triton compiles the same kernel for these values in any batch: 16 divides the strides of all rows."""
    *leading, last = view.stride()
    return view.data_ptr() % 16 == 0 and last in (0, 1) and not any(stride % 16 for stride in leading)


def _padded(view: Tensor) -> Tensor:
    """A copy that `_stands_alone`. What a view has many times has one place in it."""
    sizes = [size if stride else 1 for size, stride in zip(view.shape, view.stride(), strict=True)]
    alone = view[tuple([slice(size) for size in sizes])]
    padded = view.new_empty((*sizes[:-1], -(-sizes[-1] // 16) * 16))[..., : sizes[-1]]
    return padded.copy_(alone).expand(view.shape)


SCALE, MASK, SINK = "scale", "mask", "sink"

_MOST_NUMBERS = 64
_numbers: dict[tuple[float, torch.dtype, torch.device], Tensor] = {}


def supplier(scores: Scores, layout: ScoreLayout, dim: int, dtype: torch.dtype, input: Tensor):
    """What makes a launch's last arguments of a call's scale, mask and sink: see `supplied`. None if it has none.

    SCALE, MASK or SINK if a launch takes that one alone, as the caller gave it.
    """
    masked, scaled, sunk = (each is not None for each in (scores.mask, scores.scale, scores.sink))
    if not (masked or scaled or sunk):
        return None
    device, shape, copied, rules = input.device, tuple(input.shape), layout.copied, scores.rules
    moved_shape = tuple(last(input, dim).shape)
    per_row, sinks = isinstance(scores.scale, Tensor), isinstance(scores.sink, Tensor)
    wide = scaled and not per_row and dtype == torch.float64  # a kernel's number has 32 bits
    if not (copied or scores.moved or wide) and masked + scaled + sunk == 1 and (sinks or not sunk):
        return MASK if masked else SCALE if scaled else SINK

    def supply(scale, mask, sink):
        if copied:
            given = Scores(scale if scaled else None, mask, sink=sink, **rules).along(dim, shape).exact(dtype, device)
            tensors = scores_against(given, moved_shape).tensors
        else:
            tensors = (mask.to(device),) if masked else ()
            if per_row:
                tensors += (scale.to(device),)
            elif wide:
                tensors += (torch.full((), scale, dtype=torch.float64, device=device),)
            if sunk:
                tensors += (sink.to(device) if sinks else _number(sink, arithmetic_in(dtype), device),)
        return (*tensors, scale) if scaled and not per_row and not wide else tensors

    return supply


def supplied(supply, scale, mask, sink=None) -> tuple:
    """A launch's last arguments."""
    if supply is None:
        return ()
    if supply is SCALE or supply is MASK or supply is SINK:
        return (scale if supply is SCALE else mask if supply is MASK else sink,)
    return supply(scale, mask, sink)


def _number(value: float, dtype: torch.dtype, device: torch.device) -> Tensor:
    """A number in memory, for a kernel to read.

    A few of them are kept for good, for launches of any stream and of any graph.
    """
    key = (value, dtype, device)
    kept = _numbers.get(key)
    if kept is not None:
        return kept
    # A number that a graph captures is written when the graph runs, in the graph's memory. No other launch may read it.
    capturing = device.type == "cuda" and torch.cuda.is_current_stream_capturing()
    if capturing or len(_numbers) >= _MOST_NUMBERS or value != value:  # a NaN would never be found again
        return torch.full((), value, dtype=dtype, device=device)
    # A copy from the host is over before this returns; a fill would be on the current stream alone.
    return _numbers.setdefault(key, torch.tensor(value, dtype=dtype, device=device))
