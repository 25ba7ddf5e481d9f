"""The kernels that this project grew from: baselines for the bench, and a course in four steps.

Each kernel stands whole in its own file. Each function takes a float tensor [n_rows, n_cols] and returns a new,
contiguous tensor with softmax over the last dim. The table gives the traffic in elements for M rows by N columns,
including accesses that a cache serves.

    naive_softmax       8MN + 4M     five passes in torch; every intermediate goes through memory
    persistent_softmax  2MN          a program walks many rows and holds each whole in registers
    hybrid_softmax      2MN or 4MN   one block for a row that fits, else three passes over tiles
    online_softmax      3MN          maximum and sum in one pass over tiles, the output in a second

The three kernels are forward only: they record no gradient. They run on CUDA tensors, and on CPU tensors under Triton's
interpreter. They compile for AMD (gfx942) but are untested on its hardware. If n_cols is not a multiple of 16, they
lose their wide loads, as the originals did.
"""

from fused_softmax.classic.hybrid import hybrid_softmax
from fused_softmax.classic.naive import naive_softmax, naive_traffic
from fused_softmax.classic.online import online_softmax
from fused_softmax.classic.persistent import persistent_softmax

__all__ = ["hybrid_softmax", "naive_softmax", "naive_traffic", "online_softmax", "persistent_softmax"]
