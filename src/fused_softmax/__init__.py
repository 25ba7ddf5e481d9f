"""Softmax kernels in Triton at the speed of the memory, for every row length, as a drop-in for PyTorch.

The import is quick: PyTorch is imported, and the operators are registered, with the first public name that is used.
"""

import os
import sys

# Each of `typing` and `importlib.util` takes longer than all of this file.
TYPE_CHECKING = False

# Triton reads its flag when a kernel is decorated, so this stands before the first import that reaches one.
if os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1":
    os.environ.setdefault("TRITON_INTERPRET", "1")


def _found(name: str) -> bool:
    """Whether a package can be imported, as `importlib.util.find_spec` says it."""
    if name in sys.modules:
        return sys.modules[name] is not None
    return any(finder.find_spec(name, None) for finder in sys.meta_path if hasattr(finder, "find_spec"))


if not _found("triton"):
    from fused_softmax.without_triton import install

    install()

__all__ = [
    "AttentionOutput",
    "CrossEntropyOutput",
    "LogProbOutput",
    "LogProbStats",
    "RouteOutput",
    "SampleOutput",
    "SpeculativeOutput",
    "TokenStats",
    "attention",
    "cross_entropy",
    "disable",
    "divergence",
    "enable",
    "enabled",
    "explain",
    "linear_cross_entropy",
    "linear_divergence",
    "linear_log_prob",
    "log_prob",
    "log_softmax",
    "logsumexp",
    "min_p_mask_logits",
    "nn",
    "penalize",
    "route",
    "sample",
    "segment_log_softmax",
    "segment_logsumexp",
    "segment_softmax",
    "softmax",
    "speculative_sample",
    "top_k_mask_logits",
    "top_k_renorm_probs",
    "top_p_mask_logits",
    "top_p_renorm_probs",
    "warmup",
]
__version__ = "0.2.0"

if TYPE_CHECKING:
    from fused_softmax import nn
    from fused_softmax.ahead import warmup
    from fused_softmax.explanation import explain
    from fused_softmax.ops.attention.attention import AttentionOutput, attention
    from fused_softmax.ops.losses.cross_entropy import cross_entropy
    from fused_softmax.ops.losses.divergence import divergence
    from fused_softmax.ops.losses.linear_cross_entropy import linear_cross_entropy
    from fused_softmax.ops.losses.linear_divergence import linear_divergence
    from fused_softmax.ops.losses.linear_log_prob import linear_log_prob
    from fused_softmax.ops.losses.log_prob import LogProbOutput, LogProbStats, log_prob
    from fused_softmax.ops.losses.output import CrossEntropyOutput, TokenStats
    from fused_softmax.ops.routing.route import RouteOutput, route
    from fused_softmax.ops.sampling.filters import (
        min_p_mask_logits,
        penalize,
        top_k_mask_logits,
        top_k_renorm_probs,
        top_p_mask_logits,
        top_p_renorm_probs,
    )
    from fused_softmax.ops.sampling.sample import SampleOutput, sample
    from fused_softmax.ops.sampling.speculative import SpeculativeOutput, speculative_sample
    from fused_softmax.ops.segments.segments import segment_log_softmax, segment_logsumexp, segment_softmax
    from fused_softmax.ops.softmax.logsumexp import logsumexp
    from fused_softmax.ops.softmax.softmax import log_softmax, softmax
    from fused_softmax.register.patch import disable, enable, enabled
else:
    # A type checker would take any name for one of the package's.

    _HOMES = {
        "nn": ("nn",),
        "explanation": ("explain",),
        "ops.attention.attention": ("AttentionOutput", "attention"),
        "ops.losses.cross_entropy": ("cross_entropy",),
        "ops.losses.output": ("CrossEntropyOutput", "TokenStats"),
        "ops.losses.divergence": ("divergence",),
        "ops.losses.linear_cross_entropy": ("linear_cross_entropy",),
        "ops.losses.linear_divergence": ("linear_divergence",),
        "ops.losses.linear_log_prob": ("linear_log_prob",),
        "ops.losses.log_prob": ("LogProbOutput", "LogProbStats", "log_prob"),
        "ops.softmax.logsumexp": ("logsumexp",),
        "ops.routing.route": ("RouteOutput", "route"),
        "ops.sampling.sample": ("SampleOutput", "sample"),
        "ops.sampling.speculative": ("SpeculativeOutput", "speculative_sample"),
        "ops.sampling.filters": (
            "min_p_mask_logits", "penalize", "top_k_mask_logits", "top_k_renorm_probs", "top_p_mask_logits",
            "top_p_renorm_probs",
        ),
        "ops.segments.segments": ("segment_log_softmax", "segment_logsumexp", "segment_softmax"),
        "ops.softmax.softmax": ("log_softmax", "softmax"),
        "register.patch": ("disable", "enable", "enabled"),
        "ahead": ("warmup",),
    }  # fmt: skip

    def __getattr__(name):
        """A public name at its first use: all of them are then plain attributes, and the operators are registered."""
        if name not in __all__:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        from importlib import import_module

        import_module(f"{__name__}.register.library")
        for home, names in _HOMES.items():
            module = import_module(f"{__name__}.{home}")
            for each in names:
                found = globals()[each] = module if home == each else getattr(module, each)
                if callable(found) and not isinstance(found, type):
                    found.__module__ = __name__  # so that who unpickles a function has the operators too
        return globals()[name]

    def __dir__():
        return list(__all__)
