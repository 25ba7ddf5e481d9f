"""PyTorch Geometric's softmax by `segment_softmax`, wherever a module has bound the name, while `enable(pyg=True)`.

A stand-in takes the place of torch_geometric.utils.softmax in every module that has it: in those that were imported
before, and, since they import it from there, in those that come later. `restore` looks for the stand-in in all modules
again. What still has it then, such as a local variable, gets PyG's own by it.
"""

import sys
from collections.abc import Callable
from functools import wraps
from importlib.util import find_spec
from typing import Any

from fused_softmax.core.route import is_plain, on_device, watcher_of
from fused_softmax.ops.segments import pyg
from fused_softmax.register.names import rebind

_real: Callable[..., Any] | None = None  # PyG's own, while the stand-in is in its place
_stand_in: Callable[..., Any] | None = None
listener: Callable[..., Any] | None = None  # hears of calls: listener(name, run, args, kwargs)


def check_there() -> None:
    """ImportError unless torch_geometric can be imported."""
    if "torch_geometric" not in sys.modules and find_spec("torch_geometric") is None:
        raise ImportError(
            "fused_softmax.enable(pyg=True) needs torch_geometric, which is not installed: pip install torch_geometric"
        )


def replace() -> None:
    """Put the stand-in in the place of PyG's softmax, everywhere."""
    global _real, _stand_in
    from torch_geometric.utils import softmax as found

    _real, _stand_in = found, _standing_in(found)
    rebind({id(_real): _stand_in}, __name__)


def restore() -> None:
    """The reverse."""
    global _real
    real, _real = _real, None
    rebind({id(_stand_in): real}, __name__)


def left_to_pyg(real: Callable, refused: str) -> Callable:
    """PyG's own, for a call that is not taken. refused: why, for `explain()`, which listens here."""
    return real


def _standing_in(real: Callable) -> Callable:
    def taken(src, index=None, ptr=None, num_nodes=None, dim=0):
        refused = pyg.refused(src, index, ptr, num_nodes, dim) or _watched(src)
        softmax = left_to_pyg(real, refused) if refused else pyg.softmax
        return softmax(src, index, ptr, num_nodes, dim)

    @wraps(real)
    def softmax(src, index=None, ptr=None, num_nodes=None, dim=0):
        if _real is None:
            return real(src, index, ptr, num_nodes, dim)
        args = src, index, ptr, num_nodes, dim
        return taken(*args) if listener is None else listener("torch_geometric.utils.softmax", taken, args, {})

    # By these names torch.jit.script compiles PyG's own.
    softmax.__script_if_tracing_wrapper = True  # type: ignore[attr-defined]
    softmax.__original_fn = real  # type: ignore[attr-defined]
    return softmax


def _watched(src: Any) -> str:
    if not is_plain(type(src)):
        return f"src is a {type(src).__name__}, not a plain tensor"
    if not on_device(src):
        watcher = watcher_of(src)
        return watcher.reason if watcher is not None else ""
    return ""
