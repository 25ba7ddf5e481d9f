"""The operators as PyTorch's own: what tracing sees of a call, in the namespace torch.ops.fused_softmax.

An eager call never comes here; one that a compiler, export, vmap or a mode watches (`route`) is one node, which runs
the same kernels when its turn comes. On devices without kernels, where an exported program may land, it is composed of
torch's operations. torch.library has no place for rules of functorch's grad and jvp: `route` leaves those calls to
torch.
"""

from functools import partial

import torch

from fused_softmax.register.table import OPERATORS, Operator


def _register() -> torch.library.Library:
    library = torch.library.Library("fused_softmax", "DEF")
    for each in OPERATORS:
        _add(library, each)
    return library


def _add(library: torch.library.Library, each: Operator) -> None:
    # Results are contiguous however the input lies, so a compiler may lay that out as it likes.
    library.define(each.name + each.schema, tags=(torch.Tag.pt2_compliant_tag, torch.Tag.flexible_layout))
    library.impl(each.name, each.run, "CompositeExplicitAutograd")
    qualified = f"fused_softmax::{each.name}"
    torch.library.register_fake(qualified, each.fake, lib=library)
    if each.gradient is not None:
        torch.library.register_autograd(qualified, each.gradient, setup_context=each.save, lib=library)
    if each.batched is not None:
        operator = getattr(torch.ops.fused_softmax, each.name).default
        torch.library.register_vmap(qualified, partial(each.batched, operator), lib=library)


_library = _register()  # what it defines lives as long as it does
