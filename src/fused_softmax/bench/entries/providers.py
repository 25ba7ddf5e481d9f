"""What a provider is, the classics, and which plan our own calls follow. Others stand in the files of their families.

A provider is a function of a case. It imports what it needs and returns `call(*inputs)`. If the import fails, the
provider is absent, and the error is shown as the reason.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from fused_softmax.bench.cases import Case
from fused_softmax.bench.catalog import COMPILED, OWN, TORCH  # noqa: F401
from fused_softmax.core.plan import Alignment, Device, RowPlan, Strategy

if TYPE_CHECKING:
    from torch import Tensor

Call = Callable[..., Any]  # tensors to a tensor
Provider = Callable[[Case], Call]


def compiled(provider: Provider) -> Provider:
    """A provider under torch.compile, for one shape: its best case. The reset avoids the recompile limit."""
    import torch

    def provide(case: Case) -> Call:
        torch.compiler.reset()
        return torch.compile(provider(case), dynamic=False)

    return provide


def naive(case: Case) -> Call:
    from fused_softmax.classic import naive_softmax

    return naive_softmax


def persistent(case: Case) -> Call:
    from fused_softmax.classic import persistent_softmax

    return persistent_softmax


def hybrid(case: Case) -> Call:
    from fused_softmax.classic import hybrid_softmax

    return hybrid_softmax


def online(case: Case) -> Call:
    from fused_softmax.classic import online_softmax

    return online_softmax


CLASSIC: dict[str, Provider] = {"naive": naive, "persistent": persistent, "hybrid": hybrid, "online": online}
# This package with other options than the default: no peer of its own.
VARIANTS = frozenset(
    {"in one chunk", "chunks of 1024", "chunks of 256", "summed in place", "32 in place", "own kernels"}
)
NEEDS_GPU = frozenset({
    "persistent", "hybrid", "online", "liger", "quack", "sdpa cudnn", "sdpa efficient", "flex", "xformers",
    "flash-attn 3", "cuequivariance",
})  # fmt: skip


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
