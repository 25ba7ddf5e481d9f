"""What transformers calls: attention of its models, after register(), and the draws of generate(), by sampler().

transformers is an extra: without it this package raises ImportError.
"""

from importlib.util import find_spec

if find_spec("transformers") is None:
    raise ImportError(
        "fused_softmax.hf needs the transformers package, which is not installed: pip install 'fused-softmax[hf]'"
    )

from fused_softmax.hf.attention import attention_forward, attention_mask, register
from fused_softmax.hf.generation import sampler

__all__ = ["attention_forward", "attention_mask", "register", "sampler"]
