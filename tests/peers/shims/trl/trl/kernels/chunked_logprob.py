import torch  # noqa: F401  whose mm a test replaces

import fused_softmax

TOKEN_CHUNK_SIZE = 4096
STATS = "log_sum_sq_probs", "mean_logits", "is_top1"


class ChunkedLogProbFunction:
    @staticmethod
    def apply(
        hidden, weight, bias, targets, temperature, chunk_size, final_logit_softcapping=None, logit_scale=1.0,
        outputs=("entropy", *STATS),
    ):  # fmt: skip
        """chunk_size: of the vocabulary, which is never cut here."""
        out = fused_softmax.linear_log_prob(
            hidden, weight, targets, linear_bias=bias, scale=logit_scale, softcap=final_logit_softcapping,
            temperature=temperature, return_entropy="entropy" in outputs, return_lse=True,
            return_stats=[name for name in STATS if name in outputs], chunk_size=TOKEN_CHUNK_SIZE, logits="recompute",
        )  # fmt: skip
        return out.log_prob, out.entropy, *(out.stats or (None,) * len(STATS))
