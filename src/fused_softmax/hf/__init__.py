"""What transformers calls: models by apply(), attention after register(), and the draws of generate(), by sampler().

transformers is an extra. Importing this package does not need it; a call without it raises ImportError.
"""

from fused_softmax.hf.attention import attention_forward, attention_mask, register
from fused_softmax.hf.generation import sampler
from fused_softmax.hf.models import Applied, apply

__all__ = ["Applied", "apply", "attention_forward", "attention_mask", "register", "sampler"]
