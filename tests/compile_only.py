"""The package's own compiler for GPUs that need not be present, by the name the tests know it by."""

from fused_softmax.profile.binary import TARGETS, Compiled, compile_for
from fused_softmax.profile.parse import amd_widths, ptx_widths

__all__ = ["TARGETS", "Compiled", "amd_widths", "compile_for", "ptx_widths"]
