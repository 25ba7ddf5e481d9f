"""softmax, log_softmax and their gradients on rows and columns: the plan and the kernel, prepared for tensors at hand.

Each `prepare_...` returns a Run, which takes any tensors like these, of the same alignment.
"""

import math
from dataclasses import replace

import torch
from torch import Tensor

from fused_softmax.core.device import device_of
from fused_softmax.core.kernels.spec import ADDED_MASK, GradientSpec, ScoreSpec
from fused_softmax.core.layout import alignment_of, held_bytes, sizes_of
from fused_softmax.core.plan import H200, VECTOR_BYTES, RowPlan, plan_rows
from fused_softmax.core.runner import TLDTYPES, Run, format_of, has_ptx, prepare, spec_of
from fused_softmax.ops.softmax import reference
from fused_softmax.ops.softmax.kernels.causal import _causal_forward
from fused_softmax.ops.softmax.kernels.column_tiles import ColumnSpec
from fused_softmax.ops.softmax.kernels.columns import _column_backward, _column_forward
from fused_softmax.ops.softmax.kernels.forward import _part_forward, _stream_forward, _stream_state, _tile_forward
from fused_softmax.ops.softmax.kernels.gradient import _part_backward, _stream_backward, _stream_dot, _tile_backward
from fused_softmax.ops.softmax.plan import ColumnPlan, plan_columns
from fused_softmax.ops.softmax.scores import PLAIN, PLAIN_COLUMNS, ScoreLayout, Scores, scores_against

_SAME_SUMS = 1024  # columns to which x of 2 bytes gives the bits of x in the result's dtype
_LENGTHS = 4  # of causal rows, each with code of its own


def plan_forward(x: Tensor, y: Tensor, scores: Scores = PLAIN) -> RowPlan:
    """The planner's choice for rows x and y [n_rows, n_cols]."""
    n_rows, n_cols = sizes_of(x)
    if held_bytes(x) < held_bytes(y) and n_cols <= _SAME_SUMS:
        x, y = y, x  # the plan for what is written sums in the order that an input of its dtype is summed in
    # The dtype of what is held: of the arithmetic where that is fp64, or where sums with a mask are held and not x.
    itemsize = 8 if torch.float64 in (x.dtype, y.dtype) else max(held_bytes(x), 4 if scores.added else 0)
    # A greedy row takes more registers than a causal ladder counts on.
    causal = scores.is_causal and not scores.greedy
    gpu = device_of(x.get_device())
    return plan_rows(n_rows, n_cols, itemsize, gpu, alignment=alignment_of(x, y), causal=causal)


def prepare_forward(
    x: Tensor, y: Tensor, plan: RowPlan | None = None, *, log: bool = False, scores: Scores = PLAIN,
    shape: tuple[int, ...] | None = None,
) -> Run:  # fmt: skip
    """What launches `plan`, or the planner's, on rows [n_rows, n_cols]: run(x, y, mask, scale, sink), less None.

    x: as `layout.rows_of` has it, as are inputs everywhere here; an output has one row stride.
    shape: the input's own, against which mask, scale and sink broadcast; x's unless told. A scale that is a number
    comes last, with each run. A sink is a tensor (`Scores.exact`).
    """
    if plan is None:
        plan = plan_forward(x, y, scores)
    device = x.get_device()
    layout = scores_against(scores, shape or tuple(x.shape))
    numbers = ("scale",) if isinstance(scores.scale, float) else ()
    kind = layout.kind | format_of(x)
    spec = spec_of(ScoreSpec, plan, y.dtype, device, itemsize=x.element_size(), log=log, **kind)
    tensors = {"x": x, "y": y, "mask": layout.mask, "scale": layout.scale, "sink": layout.sink}
    values = layout.values
    if plan.strategy == "tile":
        spec = replace(spec, edges_first=spec.shifted and (plan.pieces > 1 or y.dtype == torch.bfloat16))
        return prepare(_tile_forward, plan, spec, tensors, values, device=device, numbers=numbers)
    if plan.strategy == "row" and scores.is_causal:
        spec = replace(spec, causal_step=-(-plan.pieces // _LENGTHS))
        return prepare(_causal_forward, plan, spec, tensors, values, device=device, numbers=numbers)
    if plan.strategy == "stream":
        return _prepare_stream(plan, spec, x, y, layout, numbers)
    if plan.strategy == "row":
        spec = replace(spec, shared_dims=layout.shared_dims)
    capped = scores.mask is None and not scores.is_causal  # a mask takes more registers
    return prepare(_part_forward, plan, spec, tensors, values, device=device, numbers=numbers, capped=capped)


def _prepare_stream(plan: RowPlan, spec: ScoreSpec, x: Tensor, y: Tensor, layout: ScoreLayout, numbers) -> Run:
    state_dtype = torch.float64 if y.dtype == torch.float64 else torch.float32
    shape = (2, plan.n_rows, -(-plan.parts // 4) * 4)  # rows of states on 16 bytes, so that m and s are aligned alike
    states = torch.empty(shape, dtype=state_dtype, device=x.device)
    scored = {"mask": layout.mask, "scale": layout.scale, "sink": layout.sink}
    index = x.get_device()
    spec = replace(spec, greedy=False)
    of_state = {"x": x, "m": states[0], "s": states[1], **scored}
    bare = replace(spec, log=False, zero_masked_rows=False, sink=False)
    first = prepare(_stream_state, plan, bare, of_state, layout.values, device=index, numbers=numbers)
    of_result = {"x": x, "y": y, "m": states[0], "s": states[1], **scored}
    spec = replace(spec, lanes=plan.lanes)
    second = prepare(_stream_forward, plan, spec, of_result, layout.values, device=index, numbers=numbers)
    device = x.device
    tensors = [layout.mask, layout.scale]
    before = sum(each is not None for each in tensors)  # of the arguments, those that the sink follows
    after = before + (layout.sink is not None)

    def run(x, y, *scored):
        m, s = torch.empty(shape, dtype=state_dtype, device=device)
        first(x, m, s, *scored[:before], *scored[after:])
        second(x, y, m, s, *scored)

    return Run(run, lambda plan: None)


def keep_first_max(x: Tensor, y: Tensor, log: bool, scores: Scores) -> None:
    """The rows of scale 0 among rows that stream: no kernel does it for them, torch's operations do."""
    greedy = reference.log_softmax if log else reference.softmax
    one_hot = greedy(
        x, dtype=y.dtype, **scores.arguments() | {"scale": 0.0}, arithmetic=torch.promote_types(y.dtype, torch.float32)
    )
    y.copy_(torch.where(torch.as_tensor(scores.scale, device=x.device) == 0, one_hot, y))


def plan_backward(dy: Tensor, y: Tensor, dx: Tensor) -> RowPlan:
    n_rows, n_cols = sizes_of(y)
    gpu = device_of(y.get_device())
    return plan_rows(n_rows, n_cols, y.element_size(), gpu, alignment=alignment_of(y, dy, dx), inputs=2)


def prepare_backward(
    dy: Tensor, y: Tensor, dx: Tensor, plan: RowPlan | None = None, *, log: bool = False, hides: bool = False,
    scaled: bool = False,
) -> Run:  # fmt: skip
    """What launches `plan`, or the planner's, on rows [n_rows, n_cols]: run(dy, y, dx), and the factor if scaled.

    dy, y: as `layout.rows_of` has them together.
    hides: elements that a mask hid, which are -inf in a log_softmax for it, have no gradient.
    """
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
        return prepare(_part_backward, plan, spec, tensors, values, device=device, numbers=numbers, capped=True)

    state_dtype = torch.float64 if y.dtype == torch.float64 else torch.float32
    shape, torch_device = (plan.n_rows, plan.parts), y.device
    d = torch.empty(shape, dtype=state_dtype, device=torch_device)
    of_dot = replace(spec, out_dtype=None, scaled=False)
    first = prepare(_stream_dot, plan, of_dot, {"dy": dy, "y": y, "d": d}, device=device)
    spec, tensors = replace(spec, lanes=plan.lanes), tensors | {"d": d}
    second = prepare(_stream_backward, plan, spec, tensors, values, device=device, numbers=numbers)

    def run(dy, y, dx, *factor):
        d = torch.empty(shape, dtype=state_dtype, device=torch_device)
        first(dy, y, d)
        second(dy, y, dx, d, *factor)

    return Run(run, lambda plan: None)


def prepare_columns(
    x: Tensor, y: Tensor, *, log: bool = False, layout: ScoreLayout = PLAIN_COLUMNS, plan: ColumnPlan | None = None
) -> Run | None:
    """What runs the forward on views [n_outer, n_cols, n_inner]: run(x, y, mask, scale), less None.

    None where no plan holds the columns, or where a scale of 0 would take the first maximum of several programs.
    layout: of mask and scale (`scores_against_columns`). A scale that is a number comes last, with each run.
    """
    # Measured on sm_90, where log_softmax lost by it; for sm_80 Triton 3.6 spills.
    unpack = not log and device_of(x.get_device()).capability[0] == H200.capability[0]
    how = {"log": log, "unpack_bf16": unpack, "holds": True, **layout.kind}
    scored = {"mask": layout.mask, "scale": layout.scale}
    numbers = ("scale",) if how.get("scaled") and layout.scale is None else ()
    return run_columns(
        _column_forward, {"x": x}, {"y": y}, y.dtype, how, plan, scored=scored, values=layout.values, numbers=numbers
    )  # fmt: skip


def prepare_columns_backward(
    dy: Tensor, y: Tensor, dx: Tensor, *, log: bool = False, hides: bool = False, scaled: bool = False,
    plan: ColumnPlan | None = None,
) -> Run | None:  # fmt: skip
    """The same for the gradient dx: run(dy, y, dx), and the factor if scaled. hides: as `prepare_backward`'s."""
    how = {"log": log, "out_dtype": TLDTYPES[dx.dtype], "holds": True, "hides": hides, "scaled": scaled}
    values, numbers = {"factor": 1.0 if scaled else None}, ("factor",) if scaled else ()
    return run_columns(
        _column_backward, {"dy": dy, "y": y}, {"dx": dx}, y.dtype, how, plan, values=values, numbers=numbers
    )  # fmt: skip


def run_columns(
    kernel, inputs, output, cast_dtype, how, plan: ColumnPlan | None, *, scored=None, values=None, numbers=()
) -> Run | None:
    """What runs a kernel over a strided dim of tensors [n_outer, n_cols, n_inner]; None where no plan holds it.

    The tensors are as `layout.columns_of` has them together.
    how: the ColumnSpec's other fields; holds: whether a program holds what it reads until all is reduced. scored: mask
    and scale by name, if the kernel has them. values, numbers: as `runner.prepare`'s.
    """
    tensors = {**inputs, **output}
    x, (result,) = list(inputs.values())[-1], output.values()
    device, holds = x.get_device(), how["holds"]
    gpu = device_of(device)
    strides = [stride for tensor in tensors.values() for stride in tensor.stride()[:-1]]
    nested = len(x.shape) > 3  # of its strides Triton knows what K.vector says alone
    vector = access_of(list(tensors.values()), strides, x) if holds or nested or x.element_size() < 4 else 1
    if plan is None:
        *outer, n_cols, n_inner = x.shape
        n_outer = math.prod(outer)
        wide = result.dtype == torch.float64 or n_cols <= _SAME_SUMS
        itemsize = max(held_bytes(x), held_bytes(result)) if wide else held_bytes(x)
        if how.get("mask") == ADDED_MASK:  # sums with it are held, and not x
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
    given = tensors | (scored or {})
    return prepare(kernel, plan, spec, given, values, device=device, numbers=numbers, capped=plan.itemsize < 8)


def access_of(tensors: list[Tensor], strides: list[int], x: Tensor) -> int:
    """How many elements lie side by side at an aligned address, wherever a program reads or writes."""
    if any(tensor.data_ptr() % VECTOR_BYTES for tensor in tensors):
        return 1
    narrowest = min(held_bytes(tensor) for tensor in tensors)
    return math.gcd(VECTOR_BYTES // narrowest, x.shape[-1], *strides)
