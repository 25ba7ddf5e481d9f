"""What makes a provider's call, and which plan our own calls follow. `catalog.PROVIDERS` has the providers."""

import sys
from collections.abc import Callable
from importlib import import_module
from importlib.util import find_spec, module_from_spec
from types import ModuleType
from typing import TYPE_CHECKING, Any

from fused_softmax.bench.cases import Case
from fused_softmax.core.plan import Alignment, Device, RowPlan, Strategy

if TYPE_CHECKING:
    from torch import Tensor

Call = Callable[..., Any]  # tensors to a tensor
Maker = Callable[[Case], Call]


def compiled(maker: Maker) -> Maker:
    """The call under torch.compile, for one shape: its best case. The reset avoids the recompile limit."""
    import torch

    def provide(case: Case) -> Call:
        torch.compiler.reset()
        return torch.compile(maker(case), dynamic=False)

    return provide


def without_init(name: str) -> ModuleType:
    """A module of an installed package, without the __init__ of the packages around it, which may import much more."""
    parts = name.split(".")
    for package in (".".join(parts[:i]) for i in range(1, len(parts))):
        if package not in sys.modules:
            if (spec := find_spec(package)) is None:
                raise ModuleNotFoundError(f"No module named {package!r}", name=package)
            sys.modules[package] = module_from_spec(spec)
    return import_module(name)


def forced(strategy: Strategy, x: "Tensor") -> Call:
    """fused_softmax with one strategy, whatever the planner would choose for a tensor like x."""
    from fused_softmax.core.device import device_of
    from fused_softmax.core.plan import candidate
    from fused_softmax.ops.softmax.calls import forward_by_plan

    n_rows, n_cols = x.shape
    itemsize, device = x.element_size(), device_of(x.get_device())
    plan = candidate(strategy, n_rows, n_cols, itemsize, device, alignment=alignment(n_cols, itemsize))
    return lambda x: forward_by_plan(x, plan)


def plan_on(device: Device, n_rows: int, n_cols: int, itemsize: int, inputs: int = 1) -> RowPlan:
    """The plan that fused_softmax follows on a device for contiguous rows. inputs=2 is for its gradient."""
    from fused_softmax.core.plan import plan_rows

    return plan_rows(n_rows, n_cols, itemsize, device, alignment=alignment(n_cols, itemsize), inputs=inputs)


def plan_of(case: Case, x: "Tensor", inputs: int) -> dict[str, Any] | None:
    """The plan for a case on x's device, as a dict. None on a CPU, which takes ATen."""
    if not x.is_cuda:
        return None
    from fused_softmax.core.device import device_of

    device = device_of(x.get_device())
    return plan_on(device, case.n_rows, case.n_cols, case.itemsize, inputs).data()


def alignment(n_cols: int, itemsize: int) -> Alignment:
    """The alignment that the operator finds for contiguous rows of a fresh tensor, which starts on 16 bytes."""
    if n_cols * itemsize % 16 == 0:
        return "even"
    return "shifted" if n_cols * itemsize >= 32 else "scalar"
