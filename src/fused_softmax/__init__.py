"""Softmax kernels in Triton at the speed of the memory, for every row length, as a drop-in for PyTorch."""

import os

# Triton reads its flag when a kernel is decorated, so this stands before the first import that reaches one.
if os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1":
    os.environ.setdefault("TRITON_INTERPRET", "1")

import fused_softmax.register.library  # noqa: F401
from fused_softmax import nn
from fused_softmax.ops.cross_entropy import cross_entropy
from fused_softmax.ops.linear_cross_entropy import linear_cross_entropy
from fused_softmax.ops.logsumexp import logsumexp
from fused_softmax.ops.sampling import SampleOutput, SpeculativeOutput, sample, speculative_sample
from fused_softmax.ops.sampling_filters import (
    min_p_mask_logits,
    penalize,
    top_k_mask_logits,
    top_k_renorm_probs,
    top_p_mask_logits,
    top_p_renorm_probs,
)
from fused_softmax.ops.softmax import log_softmax, softmax
from fused_softmax.register.patch import disable, enable, enabled

__all__ = [
    "SampleOutput",
    "SpeculativeOutput",
    "cross_entropy",
    "disable",
    "enable",
    "enabled",
    "linear_cross_entropy",
    "log_softmax",
    "logsumexp",
    "min_p_mask_logits",
    "nn",
    "penalize",
    "sample",
    "softmax",
    "speculative_sample",
    "top_k_mask_logits",
    "top_k_renorm_probs",
    "top_p_mask_logits",
    "top_p_renorm_probs",
]
__version__ = "0.1.0"
