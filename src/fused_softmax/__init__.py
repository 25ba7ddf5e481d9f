"""Softmax kernels in Triton at the speed of the memory, for every row length, as a drop-in for PyTorch."""

from fused_softmax.ops.softmax import softmax

__all__ = ["softmax"]
__version__ = "0.1.0"
