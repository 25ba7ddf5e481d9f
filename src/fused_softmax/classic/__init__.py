"""The kernels this project grew from, each whole in its own file: baselines for the bench, and a course in four steps.

Every one is a function of a float tensor [n_rows, n_cols] that returns softmax over the last dim, new and contiguous.
Traffic in elements, M rows by N columns; what a cache serves is counted too.

    naive_softmax       8MN + 4M     five passes of torch, every intermediate through memory
    persistent_softmax  2MN          a program walks many rows, each held whole in registers
    hybrid_softmax      2MN or 4MN   one block a row while it fits, else three passes over tiles
    online_softmax      3MN          maximum and sum in one pass over tiles, output in a second

The three kernels are forward only: they record no gradient. They run on CUDA tensors, and on CPU tensors under Triton's
interpreter. For AMD they are compiled, for gfx942, and untested on hardware. An n_cols that is no multiple of 16 costs
them their wide loads, which is how they were found, and is left so.
"""

from fused_softmax.classic.hybrid import hybrid_softmax
from fused_softmax.classic.naive import naive_softmax, naive_traffic
from fused_softmax.classic.online import online_softmax
from fused_softmax.classic.persistent import persistent_softmax

__all__ = ["hybrid_softmax", "naive_softmax", "naive_traffic", "online_softmax", "persistent_softmax"]
