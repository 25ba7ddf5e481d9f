"""Softmax kernels in Triton at the speed of the memory, for every row length, as a drop-in for PyTorch."""

import os

# Triton reads its variable when it is first imported, so ours has to speak before anything below imports it.
if os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1":
    os.environ.setdefault("TRITON_INTERPRET", "1")

from fused_softmax.ops.softmax import softmax

__all__ = ["softmax"]
__version__ = "0.1.0"
