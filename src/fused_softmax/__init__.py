"""Softmax kernels in Triton at the speed of the memory, for every row length, as a drop-in for PyTorch."""

import os

# Triton reads its flag when a kernel is decorated, so this stands before the first import that reaches one.
if os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1":
    os.environ.setdefault("TRITON_INTERPRET", "1")

from fused_softmax.ops.softmax import softmax

__all__ = ["softmax"]
__version__ = "0.1.0"
