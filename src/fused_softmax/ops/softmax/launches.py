"""The launches of softmax, log_softmax, logsumexp and their gradients: a plan and its kernel, for tensors at hand.

Each `prepare_...` returns what takes any tensors like these, of the same alignment.
"""

import math
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from fused_softmax.core.device import device_of
from fused_softmax.core.kernels.spec import ADDED_MASK, GradientSpec, ScoreSpec
from fused_softmax.core.launch import together
from fused_softmax.core.launched import Launched, compose
from fused_softmax.core.layout import alignment_alone, alignment_of, held_bytes, sizes_of
from fused_softmax.core.plan import COLUMN_POSITIONS, H200, VECTOR_BYTES, RowPlan, plan_reduction, plan_rows
from fused_softmax.core.runner import TLDTYPES, format_of, has_ptx, prepare, spec_of
from fused_softmax.ops.softmax import reference
from fused_softmax.ops.softmax.column_plan import ColumnPlan, plan_columns
from fused_softmax.ops.softmax.scores import PLAIN_COLUMNS, PLAIN_ROWS, ScoreLayout, Scores

_SAME_SUMS = 1024  # columns to which x of 2 bytes gives the bits of x in the result's dtype
_LENGTHS = 4  # of causal rows, each with code of its own


def plan_forward(
    x: Tensor, y: Tensor, layout: ScoreLayout = PLAIN_ROWS, batch_invariant: bool = False
) -> RowPlan:  # fmt: skip
    """The planner's choice for rows x and y [n_rows, n_cols]. batch_invariant: x is `rows_alone`."""
    scores, (n_rows, n_cols) = layout.scores, sizes_of(x)
    if held_bytes(x) < held_bytes(y) and n_cols <= _SAME_SUMS:
        x, y = y, x  # the plan for the result's dtype, so that sums are in the order of an input of that dtype
    # The dtype of what is held: the arithmetic's if that is fp64, or if sums with a mask are held and not x.
    itemsize = 8 if torch.float64 in (x.dtype, y.dtype) else max(held_bytes(x), 4 if scores.added else 0)
    # A greedy row takes more registers than a causal ladder counts on.
    causal = scores.is_causal and not scores.greedy
    gpu = device_of(x.get_device())
    alignment = alignment_alone(x, y) if batch_invariant else alignment_of(x, y)
    return plan_rows(
        n_rows, n_cols, itemsize, gpu, alignment=alignment, causal=causal, batch_invariant=batch_invariant
    )  # fmt: skip


def prepare_forward(
    x: Tensor, y: Tensor, plan: RowPlan | None = None, layout: ScoreLayout = PLAIN_ROWS, *, log: bool = False
) -> Launched:
    """What launches `plan`, or the planner's, on rows [n_rows, n_cols].

    It is call(x, y, mask, scale, sink), without those that are None. x: as `layout.rows_of` gives it, as are inputs
    everywhere here; an output has one row stride. A scale that is a number comes last, with each call.
    """
    from fused_softmax.ops.softmax.kernels.causal import _causal_forward
    from fused_softmax.ops.softmax.kernels.forward import _part_forward, _tile_forward

    if plan is None:
        plan = plan_forward(x, y, layout)
    device, scores, kind = x.get_device(), layout.scores, layout.kind | format_of(x)
    spec = spec_of(ScoreSpec, plan, y.dtype, device, itemsize=x.element_size(), log=log, **kind)
    tensors = {"x": x, "y": y, "mask": layout.mask, "scale": layout.scale, "sink": layout.sink}
    how: dict[str, Any] = {"values": layout.values, "device": device, "numbers": layout.numbers}
    how["leading"] = layout.leading
    if plan.strategy == "tile":
        spec = replace(spec, edges_first=spec.shifted and (plan.pieces > 1 or y.dtype == torch.bfloat16))
        return prepare(_tile_forward, plan, spec, tensors, **how)
    if plan.strategy == "row" and scores.is_causal:
        spec = replace(spec, causal_step=-(-plan.pieces // _LENGTHS))
        return prepare(_causal_forward, plan, spec, tensors, **how)
    if plan.strategy == "stream":
        return _prepare_stream(plan, spec, x, y, layout)
    if plan.strategy == "row":
        spec = replace(spec, shared_dims=layout.shared_dims)
    return prepare(_part_forward, plan, spec, tensors, besides=_besides(plan, scores), **how)


def _besides(plan: RowPlan, scores: Scores) -> int:
    """Registers of a thread besides those that hold a row, as compiled."""
    masks = scores.mask is not None or scores.is_causal
    if plan.itemsize != 2:
        return 28 if masks else 20
    besides = 52 if masks else 20 if scores.scale is None else 36
    return besides + (4 if plan.alignment == "shifted" else 0)


def _prepare_stream(plan: RowPlan, spec: ScoreSpec, x: Tensor, y: Tensor, layout: ScoreLayout) -> Launched:
    from fused_softmax.ops.softmax.kernels.forward import _stream_forward, _stream_state

    state_dtype = torch.float64 if y.dtype == torch.float64 else torch.float32
    shape = (2, plan.n_rows, -(-plan.parts // 4) * 4)  # rows of states on 16 bytes, so that m and s are aligned alike
    states = torch.empty(shape, dtype=state_dtype, device=x.device)
    scored = {"mask": layout.mask, "scale": layout.scale, "sink": layout.sink}
    how: dict[str, Any] = {"values": layout.values, "device": x.get_device(), "numbers": layout.numbers}
    spec = replace(spec, greedy=False)
    of_state = {"x": x, "m": states[0], "s": states[1], **scored}
    bare = replace(spec, log=False, zero_masked_rows=False, sink=False)
    of_result = {"x": x, "y": y, "m": states[0], "s": states[1], **scored}
    spec = replace(spec, lanes=plan.lanes)
    first, second = together(
        partial(prepare, _stream_state, plan, bare, of_state, **how),
        partial(prepare, _stream_forward, plan, spec, of_result, **how),
    )
    device = x.device
    before = sum(each is not None for each in (layout.mask, layout.scale))  # of the arguments, those before the sink
    after = before + (layout.sink is not None)

    def build(_, first, second):
        def call(x, y, *scored):
            m, s = torch.empty(shape, dtype=state_dtype, device=device)
            first(x, m, s, *scored[:before], *scored[after:])
            second(x, y, m, s, *scored)

        return call

    return compose(build, first, second)


def keep_first_max(x: Tensor, y: Tensor, scores: Scores, *, log: bool) -> None:
    """The results of rows of scale 0 among rows that stream, by torch's operations: no kernel does it for them."""
    greedy = reference.log_softmax if log else reference.softmax
    one_hot = greedy(
        x, dtype=y.dtype, **scores.formula() | {"scale": 0.0}, arithmetic=torch.promote_types(y.dtype, torch.float32)
    )
    y.copy_(torch.where(torch.as_tensor(scores.scale, device=x.device) == 0, one_hot, y))


def plan_backward(dy: Tensor, y: Tensor, dx: Tensor, batch_invariant: bool = False) -> RowPlan:
    """The planner's choice for rows [n_rows, n_cols]. batch_invariant: dy and y are `rows_alone`."""
    n_rows, n_cols = sizes_of(y)
    gpu = device_of(y.get_device())
    alignment = alignment_alone(y, dy, dx) if batch_invariant else alignment_of(y, dy, dx)
    return plan_rows(
        n_rows, n_cols, y.element_size(), gpu, alignment=alignment, inputs=2, batch_invariant=batch_invariant
    )  # fmt: skip


def prepare_backward(
    dy: Tensor, y: Tensor, dx: Tensor, plan: RowPlan | None = None, *, log: bool = False, hides: bool = False,
    scaled: bool = False,
) -> Launched:  # fmt: skip
    """What launches `plan`, or the planner's, on rows [n_rows, n_cols]: call(dy, y, dx), and the factor if scaled.

    dy, y: as `layout.rows_of` gives them together.
    hides: whether elements that a mask hid, which are -inf in a log_softmax, have no gradient.
    """
    from fused_softmax.ops.softmax.kernels.gradient import _part_backward, _stream_backward, _stream_dot, _tile_backward

    if plan is None:
        plan = plan_backward(dy, y, dx)
    device = y.get_device()
    spec = spec_of(
        GradientSpec, plan, y.dtype, device, itemsize=16 // plan.vector, out_dtype=TLDTYPES[dx.dtype], log=log,
        hides=hides, scaled=scaled, stream=plan.strategy == "stream",
    )  # fmt: skip
    tensors = {"dy": dy, "y": y, "dx": dx}
    values, numbers = {"factor": 1.0}, ("factor",) if scaled else ()
    if plan.strategy == "tile":
        return prepare(_tile_backward, plan, spec, tensors, values, device=device, numbers=numbers)
    if plan.strategy != "stream":
        return prepare(_part_backward, plan, spec, tensors, values, device=device, numbers=numbers, besides=16)

    state_dtype = torch.float64 if y.dtype == torch.float64 else torch.float32
    shape, torch_device = (plan.n_rows, plan.parts), y.device
    d = torch.empty(shape, dtype=state_dtype, device=torch_device)
    of_dot = replace(spec, out_dtype=None, scaled=False)
    spec, tensors = replace(spec, lanes=plan.lanes), tensors | {"d": d}
    first, second = together(
        partial(prepare, _stream_dot, plan, of_dot, {"dy": dy, "y": y, "d": d}, device=device),
        partial(prepare, _stream_backward, plan, spec, tensors, values, device=device, numbers=numbers),
    )

    def build(_, first, second):
        def call(dy, y, dx, *factor):
            d = torch.empty(shape, dtype=state_dtype, device=torch_device)
            first(dy, y, d)
            second(dy, y, dx, d, *factor)

        return call

    return compose(build, first, second)


def prepare_columns(
    x: Tensor, y: Tensor, layout: ScoreLayout = PLAIN_COLUMNS, *, log: bool = False, plan: ColumnPlan | None = None
) -> Launched | None:
    """What runs the forward on views [n_outer, n_cols, n_inner]: call(x, y, mask, scale), without those that are None.

    None if no plan holds the columns, or if rows of scale 0 would need the first maximum of several programs.
    layout: of mask and scale (`scores_against_columns`). A scale that is a number comes last, with each call.
    """
    from fused_softmax.ops.softmax.kernels.columns import _column_forward

    # Measured on sm_90, where log_softmax lost by it; for sm_80 Triton 3.6 spills.
    unpack = not log and device_of(x.get_device()).capability[0] == H200.capability[0]
    how = {"log": log, "unpack_bf16": unpack, "holds": True, **layout.kind}
    return _over_columns(_column_forward, {"x": x}, {"y": y}, y.dtype, how, plan, layout)


def prepare_columns_backward(
    dy: Tensor, y: Tensor, dx: Tensor, *, log: bool = False, hides: bool = False, scaled: bool = False,
    plan: ColumnPlan | None = None,
) -> Launched | None:  # fmt: skip
    """The same for the gradient dx: call(dy, y, dx), and the factor if scaled. hides: as `prepare_backward`'s."""
    from fused_softmax.ops.softmax.kernels.columns import _column_backward

    how = {"log": log, "out_dtype": TLDTYPES[dx.dtype], "holds": True, "hides": hides, "scaled": scaled}
    of_factor: dict[str, Any] = {
        "values": {"factor": 1.0 if scaled else None},
        "numbers": ("factor",) if scaled else (),
    }
    return _over_columns(_column_backward, {"dy": dy, "y": y}, {"dx": dx}, y.dtype, how, plan, **of_factor)


def _over_columns(
    kernel: Any, inputs: dict[str, Tensor], output: dict[str, Tensor], cast_dtype: torch.dtype, how: dict[str, Any],
    plan: ColumnPlan | None, layout: ScoreLayout | None = None, **options: Any,
) -> Launched | None:  # fmt: skip
    """What runs a kernel over a strided dim of tensors [n_outer, n_cols, n_inner]; None where no plan holds it.

    The tensors are as `layout.columns_of` has them together.
    how: the ColumnSpec's other fields; holds: whether a program holds what it reads until all is reduced. layout: of
    mask and scale, if the kernel has them. options: `runner.prepare`'s.
    """
    from fused_softmax.ops.softmax.kernels.column_tiles import ColumnSpec

    tensors = {**inputs, **output}
    x, (result,) = list(inputs.values())[-1], output.values()
    device, holds = x.get_device(), how["holds"]
    gpu = device_of(device)
    strides = [stride for tensor in tensors.values() for stride in tensor.stride()[:-1]]
    nested = len(x.shape) > 3  # Triton knows of its strides only what K.vector says
    vector = access_of(list(tensors.values()), strides, x) if holds or nested or x.element_size() < 4 else 1
    if plan is None:
        *outer, n_cols, n_inner = x.shape
        n_outer = math.prod(outer)
        wide = result.dtype == torch.float64 or n_cols <= _SAME_SUMS
        itemsize = max(held_bytes(x), held_bytes(result)) if wide else held_bytes(x)
        if how.get("mask") == ADDED_MASK:  # with an added mask, sums are held and not x
            itemsize = max(itemsize, 4)
        plan = plan_columns(
            n_outer, n_cols, n_inner, itemsize, gpu, inputs=len(inputs), holds=holds, access=vector,
            masked=bool(how.get("mask") or how.get("hides")),
        )  # fmt: skip
    if plan is None or (how.get("greedy") and plan.parts > 1):
        return None
    spec = ColumnSpec(
        block_cols=plan.block_cols, block_inner=plan.block_inner, pieces=plan.pieces,
        full_pieces=plan.full_pieces if holds else 0, whole=plan.n_inner % plan.block_inner == 0, vector=vector,
        cast_dtype=TLDTYPES[cast_dtype], ptx=has_ptx(device), split=plan.parts > 1, lanes=plan.lanes,
        **format_of(x), **how,
    )  # fmt: skip
    given: dict[str, Tensor | None] = {**tensors}
    if layout is not None:
        given |= {"mask": layout.mask, "scale": layout.scale}
        options = {"values": layout.values, "numbers": layout.numbers}
    return prepare(kernel, plan, spec, given, device=device, besides=0 if plan.itemsize < 8 else None, **options)


def access_of(tensors: list[Tensor], strides: list[int], x: Tensor) -> int:
    """How many elements lie side by side at an aligned address, wherever a program reads or writes."""
    if any(tensor.data_ptr() % VECTOR_BYTES for tensor in tensors):
        return 1
    narrowest = min(held_bytes(tensor) for tensor in tensors)
    return math.gcd(VECTOR_BYTES // narrowest, x.shape[-1], *strides)


def prepare_logsumexp_columns(x: Tensor, lse: Tensor, *, plan: ColumnPlan | None = None) -> Launched | None:
    """What reduces views [n_outer, n_cols, n_inner] to lse [n_outer, 1, n_inner]; None where no plan holds them."""
    from fused_softmax.ops.softmax.kernels.columns import _column_logsumexp

    how = {"positions": COLUMN_POSITIONS, "holds": False}
    return _over_columns(_column_logsumexp, {"x": x}, {"lse": lse}, lse.dtype, how, plan)


def plan_logsumexp(x: Tensor, layout: ScoreLayout = PLAIN_ROWS, batch_invariant: bool = False) -> RowPlan:
    """The planner's choice for rows x [n_rows, n_cols]. batch_invariant: they are `rows_alone`."""
    itemsize = max(held_bytes(x), 4 if layout.scores.added else 0)
    n_rows, n_cols = sizes_of(x)
    alignment = alignment_alone(x) if batch_invariant else alignment_of(x)
    return plan_reduction(
        n_rows, n_cols, itemsize, device_of(x.get_device()), alignment=alignment, batch_invariant=batch_invariant
    )  # fmt: skip


def prepare_logsumexp(
    x: Tensor, lse: Tensor, plan: RowPlan | None = None, layout: ScoreLayout = PLAIN_ROWS
) -> Launched:
    """What reduces rows x [n_rows, n_cols] into lse, contiguous: call(x, lse, mask, scale, sink), those there are.

    x is rounded to lse's dtype as it is read. A scale that is a number comes last, with each call.
    """
    from fused_softmax.ops.softmax.kernels.logsumexp import _part_logsumexp, _tile_logsumexp

    plan = plan_logsumexp(x, layout) if plan is None else plan
    device = x.get_device()
    kind = {name: value for name, value in layout.kind.items() if name != "zero_masked_rows"}
    spec = spec_of(ScoreSpec, plan, lse.dtype, device, itemsize=x.element_size(), **kind, **format_of(x))
    # The body of a short odd row in one piece keeps its layout if its edges are loaded after it.
    spec = replace(spec, full_pieces=0, edges_first=spec.tile and spec.shifted and plan.pieces > 1)
    tensors = {"x": x, "lse": lse, "mask": layout.mask, "scale": layout.scale, "sink": layout.sink}
    kernel = _tile_logsumexp
    if plan.strategy != "tile":
        kernel, spec = _part_logsumexp, replace(spec, axis=1, prefetch=spec.prefetch and plan.prefetch > 0)
    return prepare(
        kernel, plan, spec, tensors, layout.values, device=device, numbers=layout.numbers, leading=layout.leading
    )  # fmt: skip


def plan_logsumexp_backward(x: Tensor, dx: Tensor, layout: ScoreLayout = PLAIN_ROWS) -> RowPlan:
    """The planner's choice for rows x and dx [n_rows, n_cols]."""
    itemsize = max(x.element_size(), 4 if layout.scores.added else 0)
    n_rows, n_cols = sizes_of(x)
    gpu = device_of(x.get_device())
    return plan_reduction(n_rows, n_cols, itemsize, gpu, alignment=alignment_of(x, dx), writes=True)


def prepare_logsumexp_backward(
    x: Tensor, lse: Tensor, dlse: Tensor, dx: Tensor, plan: RowPlan | None = None, layout: ScoreLayout = PLAIN_ROWS,
    *, hides: bool = False,
) -> Launched:  # fmt: skip
    """What writes exp(z - lse) * dlse of rows [n_rows, n_cols]: call(x, lse, dlse, dx, mask, scale).

    Those that do not exist are left out. hides: whether a row whose dlse is 0 gets 0, NaN or not. It is so for scores
    that hide elements.
    """
    from fused_softmax.ops.softmax.kernels.logsumexp import _logsumexp_backward

    device = x.get_device()
    plan = plan_logsumexp_backward(x, dx, layout) if plan is None else plan
    kind = layout.kind | {"greedy": False, "hides": hides or layout.scores.hides}
    spec = spec_of(ScoreSpec, plan, x.dtype, device, itemsize=x.element_size(), **kind)
    spec = replace(spec, tile=True, axis=1, full_pieces=0, ptx=False, edges_first=False)
    tensors = {"x": x, "lse": lse, "dlse": dlse, "dx": dx, "mask": layout.mask, "scale": layout.scale}
    return prepare(
        _logsumexp_backward, plan, spec, tensors, layout.values, device=device, numbers=layout.numbers,
        leading=layout.leading,
    )  # fmt: skip
