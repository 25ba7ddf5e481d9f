"""FlashInfer's names on fused_softmax."""

from flashinfer import sampling  # noqa: F401
