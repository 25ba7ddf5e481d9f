"""Who is measured. A provider is a function without arguments that imports what it needs and returns softmax(x),
taking and returning a 2-D tensor. One that cannot be imported is absent, and its error is the reason that is shown.
"""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fused_softmax.plan import Alignment, Device, RowPlan, Strategy

if TYPE_CHECKING:
    from torch import Tensor

    Softmax = Callable[[Tensor], Tensor]


def fused_softmax() -> "Softmax":
    from fused_softmax import softmax

    return softmax


def torch_softmax() -> "Softmax":
    import torch

    return lambda x: torch.softmax(x, dim=-1)


def torch_compile() -> "Softmax":
    """Compiled for the one shape it then meets: its best case. The reset keeps it off dynamo's recompile limit."""
    import torch

    torch.compiler.reset()
    return torch.compile(lambda x: torch.softmax(x, dim=-1), dynamic=False)


def naive() -> "Softmax":
    from fused_softmax.classic import naive_softmax

    return naive_softmax


def persistent() -> "Softmax":
    from fused_softmax.classic import persistent_softmax

    return persistent_softmax


def hybrid() -> "Softmax":
    from fused_softmax.classic import hybrid_softmax

    return hybrid_softmax


def online() -> "Softmax":
    from fused_softmax.classic import online_softmax

    return online_softmax


def liger() -> "Softmax":
    from liger_kernel.ops.softmax import LigerSoftmaxFunction

    return LigerSoftmaxFunction.apply


def quack() -> "Softmax":
    from quack.softmax import softmax

    return softmax


PROVIDERS: dict[str, Callable[[], "Softmax"]] = {
    "fused_softmax": fused_softmax,
    "torch": torch_softmax,
    "torch.compile": torch_compile,
    "naive": naive,
    "persistent": persistent,
    "hybrid": hybrid,
    "online": online,
    "liger": liger,
    "quack": quack,
}
OWN = "fused_softmax"
NEEDS_GPU = frozenset({"persistent", "hybrid", "online", "liger", "quack"})


def forced(strategy: Strategy, x: "Tensor") -> "Softmax":
    """fused_softmax by one strategy, whatever the planner would choose for a tensor like x."""
    from fused_softmax.device import device_of
    from fused_softmax.ops.softmax import softmax_forward
    from fused_softmax.plan import candidate

    n_rows, n_cols = x.shape
    itemsize, device = x.element_size(), device_of(x.get_device())
    plan = candidate(strategy, n_rows, n_cols, itemsize, device, alignment=alignment(n_cols, itemsize))
    return lambda x: softmax_forward(x, plan=plan)


def plan_on(device: Device, n_rows: int, n_cols: int, itemsize: int) -> RowPlan:
    """The plan fused_softmax follows on a device for contiguous rows."""
    from fused_softmax.plan import plan_rows

    return plan_rows(n_rows, n_cols, itemsize, device, alignment=alignment(n_cols, itemsize))


def plan_of(x: "Tensor") -> dict[str, Any] | None:
    """The same for a tensor, as a dict; None on a CPU, which takes ATen."""
    if not x.is_cuda:
        return None
    from fused_softmax.device import device_of

    n_rows, n_cols = x.shape
    return dataclasses.asdict(plan_on(device_of(x.get_device()), n_rows, n_cols, x.element_size()))


def alignment(n_cols: int, itemsize: int) -> Alignment:
    """How contiguous rows lie in fresh tensors, which start on 16 bytes: as the operator finds it for such tensors."""
    if n_cols * itemsize % 16 == 0:
        return "even"
    return "shifted" if n_cols * itemsize >= 32 else "scalar"
