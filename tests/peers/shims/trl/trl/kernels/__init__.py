import fused_softmax
from trl.kernels.chunked_logprob import ChunkedLogProbFunction  # noqa: F401


def selective_log_softmax_and_entropy(logits, index, temperature=1.0, row_mask=None):
    target = index if row_mask is None else index.masked_fill(row_mask == 0, -100)
    return fused_softmax.log_prob(logits, target, temperature=temperature, return_entropy=True)[:2]
