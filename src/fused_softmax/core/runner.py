"""From a plan to launches: the one way that every kernel of this package is prepared and run.

A kernel's arguments are found by the names of its parameters: `x_ptr` is the tensor x, `x_row_stride` its stride,
`n_rows` and the like are the plan's. An operator says which tensors it has; no call site has a list of positions.
Of tensors whose rows, or outer indices, are numbered over several dims (`layout.rows_of`), that stride is a tuple.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import torch
import triton.language as tl
from torch import Tensor

from fused_softmax.core import launch, workspace
from fused_softmax.core.device import device_of
from fused_softmax.core.kernels.spec import Spec
from fused_softmax.core.launched import Launched
from fused_softmax.core.plan import RowPlan, fetches_ahead

TLDTYPES = {
    torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float64: tl.float64,
}  # fmt: skip
FP8 = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}  # read as bytes, held as fp16
READ = {*TLDTYPES, *FP8}  # by forward kernels, without a copy
# The launches of an exchange under the interpreter, which runs one program after another. In a single launch, each
# would compute the states of all programs that come after it.
IN_TURN: tuple[dict[str, bool], ...] = ({"collect": False}, {"publish": False})
_DIM_OF_STRIDE = {"row_stride": -2, "outer_stride": -3, "col_stride": -2}
_MOST_DIMS = {"row_stride": 2, "outer_stride": 3, "col_stride": 9}  # of a tensor whose stride is a single one


def spec_of(kind: Any, plan: RowPlan, cast_dtype: torch.dtype, device: int, *, itemsize: int, **fields: Any) -> Any:
    """The Spec of class `kind` for a row plan: its blocks, how its programs exchange, whether they fetch ahead.

    device: `tensor.get_device()`. itemsize: of an element as it is read. fields: what else the class has.
    """
    ptx = has_ptx(device)
    ahead = fetches_ahead(plan, device_of(device), itemsize, causal=fields.get("causal", False))
    if plan.strategy == "split":
        fields |= {"split": True, "lanes": plan.lanes, "copies": plan.copies, "poll_last_first": plan.poll_last_first}
    return kind(
        block_rows=plan.block_rows, block_cols=plan.block_cols, pieces=plan.pieces, full_pieces=plan.full_pieces,
        tile=plan.strategy == "tile", axis=int(plan.strategy == "tile"), vector=plan.vector,
        shifted=plan.alignment == "shifted", cast_dtype=TLDTYPES[cast_dtype], ptx=ptx, prefetch=ptx and ahead, **fields,
    )  # fmt: skip


def format_of(x: Tensor) -> dict[str, Any]:
    """The fields of a Spec that say what an input's bytes stand for; none where it is no fp8."""
    if x.dtype not in FP8:
        return {}
    device = x.get_device()
    able = has_ptx(device) and device_of(device).capability >= (8, 9)
    return {"fp8": FP8[x.dtype], "converts_fp8": able}


def has_ptx(device: int) -> bool:
    return device >= 0 and device_of(device).backend == "cuda"


def overlaps(device: int) -> bool:
    """Whether a launch may begin before the one before it has ended: see `core/kernels/exchange.py`."""
    return has_ptx(device) and device_of(device).capability >= (9, 0)


def overlapping(follows: bool) -> dict[str, bool]:
    """What Triton has to be told of a launch that may begin before the one before it has ended."""
    return {"launch_pdl": True} if follows else {}


def prepare(
    kernel: Any,
    plan: Any,
    spec: Spec,
    tensors: Mapping[str, Tensor | None],
    values: Mapping[str, Any] | None = None,
    *,
    device: int,
    numbers: Sequence[str] = (),
    programs: Callable[[Any], int] | None = None,
    num_warps: int | None = None,
    besides: int | None = None,
    leading: str | None = None,
    plan_for: Callable[[int], Any] | None = None,
    turns: Sequence[dict[str, bool]] = IN_TURN,
) -> Launched:
    """Compile `kernel` for a plan and tensors like these, and return what launches it.

    The call takes the kernel's tensors that are not None, in their order, and then the numbers.

    plan: None for a kernel whose sizes are all among the values; it then takes programs and num_warps.
    tensors: by name, in the kernel's order; None if a call does without one. Slots are not among them, unless the
        programs exchange with those of other GPUs (spec.peers).
    values: of parameters that neither the plan nor the tensors' strides give.
    numbers: the names of values that every launch gives anew, after the tensors.
    programs, num_warps: if they are not the plan's own.
    besides: registers of a thread besides those that hold a row, if `plan.most_registers` is to keep them few.
    leading: the value, if any, that grows with the number of rows. plan_for: the plan for another number of rows, or
        None; the plan's own `for_rows` unless told.
    turns: of the launches of an exchange under the interpreter, the fields that differ from the Spec.
    """
    names = _names(kernel)
    if "ahead" not in names.scalars:
        spec = replace(spec, prefetch=False)
    exchanges = spec.split and not spec.peers
    scalars = _scalars(names.scalars, plan, spec, tensors, values or {})
    if any(isinstance(each, tuple) for each in scalars):
        spec = replace(spec, nested=True, prefetch=False)
    options: dict[str, Any] = {"device": device, "num_warps": num_warps or plan.num_warps}
    if numbers:
        options["numbers"] = tuple(names.scalars.index(name) for name in numbers)
    options |= overlapping(spec.follows)
    if besides is not None and spec.ptx:
        options["most_registers"] = plan.most_registers(device_of(device), besides)
    count = programs or _programs_of

    def launch_of(spec, slots):
        given = [tensors.get(name, slots) if name == "slots" else tensors[name] for name in names.pointers]
        return launch.prepare(kernel, count(plan), given, scalars, {"K": spec}, plan=plan, **options)

    specs = [replace(spec, **only) for only in turns] if device < 0 and (exchanges or spec.peers) else [spec]
    slots = _slots(device, plan) if exchanges else None
    launches = [launch_of(each, slots) for each in specs]
    grows = {name: scalars[i] for i, name in enumerate(names.scalars) if name == leading}
    places = {name: i for i, name in enumerate(names.scalars) if name in ("n_rows", "n_programs") or name == leading}

    def for_rows(n, of):
        other = None if plan is None else (plan_for or plan.for_rows)(plan.n_rows // of * n)
        if other is None:
            return None
        grown = {name: value // of * n for name, value in grows.items()}
        values = {"n_rows": other.n_rows, "n_programs": other.programs, **grown}
        changed = {i: values[name] for name, i in places.items()}
        others = [each.again(count(other), changed) for each in launches]
        return None if None in others else _call_of(others, other, device, exchanges)

    return Launched(_call_of([each.__call__ for each in launches], plan, device, exchanges), for_rows)


def _call_of(launches, plan, device, exchanges):
    """What runs launches one after another. Under the interpreter, an exchange takes several."""
    if not exchanges:
        if len(launches) == 1:
            return launches[0]

        def call(*arguments):
            for each in launches:
                each(*arguments)

        return call
    slots, (groups, slots_per_group) = workspace.slots, plan.slots
    if device >= 0:
        (only,) = launches

        def exchanging(*arguments):
            only(slots(device, groups, slots_per_group), *arguments)

        return exchanging

    def in_turn(*arguments):
        slots = _slots(device, plan)
        for each in launches:
            each(slots, *arguments)

    return in_turn


def _slots(device: int, plan: Any) -> Tensor:
    groups, slots_per_group = plan.slots
    if device >= 0:
        return workspace.slots(device, groups, slots_per_group)
    return torch.zeros(groups * slots_per_group, dtype=torch.int64, device="cpu")


def _programs_of(plan):
    return plan.programs


class _Names:
    def __init__(self, kernel):
        self.pointers = [name[:-4] for name in kernel.arg_names if name.endswith("_ptr")]
        self.scalars = [name for name in kernel.arg_names if not name.endswith("_ptr") and name != "K"]


_names = cache(_Names)


def _scalars(names, plan, spec, tensors, values):
    sizes = ({} if plan is None else plan.sizes) | _misalignment(names, spec, tensors)
    scalars = []
    for name in names:
        tensor, _, stride = name.partition("_")
        if name in values:
            scalars.append(values[name])
        elif stride in _DIM_OF_STRIDE:
            scalars.append(_stride(tensors[tensor], stride, spec.vector))
        else:
            scalars.append(sizes[name])
    return tuple(scalars)


def _stride(tensor, name, vector):
    """A stride by its name; a nested one as Spec has it."""
    if len(tensor.shape) <= _MOST_DIMS[name]:
        return tensor.stride(_DIM_OF_STRIDE[name])
    return (*tensor.shape[1:3], *(tensor.stride(d) // vector * 2 + 1 for d in range(3)))


def _misalignment(names, spec, tensors):
    """Elements from a 16-byte boundary to the first one. If rows are shifted, all tensors share it."""
    if "misalignment" not in names:
        return {}
    first = next(tensors[name[: -len("_row_stride")]] for name in names if name.endswith("_row_stride"))
    vector = spec.vector if spec.fp8 is None else 16  # a prefetch counts on it
    return {"misalignment": first.data_ptr() // first.element_size() % vector}
