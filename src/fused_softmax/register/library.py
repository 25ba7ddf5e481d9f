"""The operators as PyTorch's own: what tracing sees of a call, in the namespace torch.ops.fused_softmax.

An eager call never comes here; one that a compiler, export, vmap or a mode watches (`route`) is one node, which runs
the same kernels when its turn comes. On devices without kernels, where an exported program may land, it is composed of
torch's operations. torch.library has no place for rules of functorch's grad and jvp: `route` leaves those calls to
torch.
"""

from collections.abc import Callable
from functools import partial
from importlib.util import find_spec
from typing import Any

import torch

from fused_softmax.register.table import OPERATORS, Operator


def _register() -> torch.library.Library:
    library = torch.library.Library("fused_softmax", "DEF")
    for each in OPERATORS:
        _add(library, each)
    return library


listener: Callable[..., Any] | None = None  # hears of what runs: listener(name, run, args, kwargs)


def _add(library: torch.library.Library, each: Operator) -> None:
    # Results are contiguous however the input lies, so a compiler may lay that out as it likes.
    library.define(each.name + each.schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))

    def run(*args: Any, **kwargs: Any) -> Any:
        # Who called the operator has cast its arguments, and its own operations are not to be.
        with torch._C._DisableAutocast():
            return each.run(*args, **kwargs) if listener is None else listener(each.name, each.run, args, kwargs)

    library.impl(each.name, run, "CompositeExplicitAutograd")
    qualified = f"fused_softmax::{each.name}"
    torch.library.register_fake(qualified, each.fake, lib=library)
    if each.gradient is not None:
        torch.library.register_autograd(qualified, each.gradient, setup_context=each.save, lib=library)
    if each.batched is not None:
        operator = getattr(torch.ops.fused_softmax, each.name).default
        torch.library.register_vmap(qualified, partial(each.batched, operator), lib=library)


def _count_flops() -> None:
    """Tell torch.utils.flop_counter what the operators multiply.

    Without Triton torch's operations compute, which it counts, and its import would warn that Triton is missing.
    """
    if find_spec("triton") is None:
        return
    from torch.utils._python_dispatch import _get_current_dispatch_mode_stack
    from torch.utils.flop_counter import register_flop_formula

    flops = {getattr(torch.ops.fused_softmax, each.name): each.flops for each in OPERATORS if each.flops is not None}
    for operator, formula in flops.items():
        register_flop_formula(operator, get_raw=True)(formula)
    # A counter has copied the formulas that there were when it was made.
    for mode in _get_current_dispatch_mode_stack():
        getattr(getattr(mode, "counter", None), "flop_registry", {}).update(flops)


_library = _register()  # what it defines lives as long as it does
_count_flops()
