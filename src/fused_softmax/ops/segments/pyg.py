"""softmax as PyTorch Geometric calls it, of this room's."""

from typing import Any

import torch
from torch import Tensor

from fused_softmax.core.described import typed
from fused_softmax.ops.segments import segments
from fused_softmax.ops.segments.options import raise_as

# What an error of segment_softmax calls them, and what this function does.
_NAMES = {"segment_softmax": "pyg.softmax", "input": "src", "offsets": "ptr", "n_segments": "num_nodes"}


def softmax(
    src: Tensor, index: Tensor | None = None, ptr: Tensor | None = None, num_nodes: int | None = None, dim: int = 0
) -> Tensor:
    """torch_geometric.utils.softmax: softmax of `src` over the elements of each node, by `segment_softmax`.

    src: [..., n, ...] with n elements, such as edges, in `dim`; float32, float16, bfloat16 or float64.
    index: [n], int64 or int32: each element's node, in any order. Not read if ptr is given.
    ptr: [num_nodes + 1], int64 or int32: the elements of node i are those from ptr[i] up to, and without, ptr[i + 1].
    num_nodes: with index, how many nodes there are. Not needed, and not read if ptr is given.
    dim: the dim of the elements.

    Returns the shape and dtype of src. PyG adds 1e-16 to each sum, which no float32 result shows. Gradients of any
    order; every run has the same bits.
    Raises NotImplementedError if neither index nor ptr is given, as PyG does, and segment_softmax's errors, in which
    arguments have their names here.

    >>> softmax(torch.ones(4), torch.tensor([0, 0, 1, 2]))
    tensor([0.5000, 0.5000, 1.0000, 1.0000])
    """
    if ptr is None and index is None:
        of_src = f"of shape {tuple(src.shape)}" if isinstance(src, Tensor) else typed(src)
        raise NotImplementedError(f"pyg.softmax: give index or ptr for src {of_src}, got neither")
    try:
        if ptr is not None:
            return segments.segment_softmax(src, _plain(ptr), dim=dim)
        return segments.segment_softmax(src, index=_plain(index), n_segments=num_nodes, dim=dim)
    except (TypeError, ValueError, IndexError, RuntimeError) as error:
        raise_as(error, _NAMES)


def _plain(tensor: Any) -> Any:
    """The tensor that a torch_geometric.Index holds."""
    return tensor.as_tensor() if isinstance(tensor, Tensor) and hasattr(tensor, "as_tensor") else tensor


def refused(src: Any, index: Any, ptr: Any, num_nodes: Any, dim: Any) -> str:
    """Why a call of PyG's is left to PyG's own softmax; "" if this one takes it."""
    if torch.compiler.is_compiling() or torch.jit.is_scripting():
        return "a compiler traces the call"
    if not isinstance(src, Tensor) or not src.dtype.is_floating_point or src.ndim == 0:
        return "src is no tensor of floats with a dim"
    if ptr is not None and ptr.ndim != 1:
        return f"ptr has {ptr.ndim} dims"
    if ptr is None and (index is None or index.ndim != 1):
        return "index is not of one dim"
    if ptr is None and not (isinstance(dim, int) and -src.ndim <= dim < src.ndim and len(index) == src.shape[dim]):
        return "index is not one of each element"  # as one that PyG broadcasts
    if ptr is None and not (num_nodes is None or isinstance(num_nodes, int)):
        return f"num_nodes is a {type(num_nodes).__name__}"
    return ""
