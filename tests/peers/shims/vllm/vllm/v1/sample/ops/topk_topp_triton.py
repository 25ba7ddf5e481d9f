import fused_softmax

_topk_topp = _topp_split_mask = _topp_split_stats = _topp_split_step = _apply_topp_split = None


def apply_top_k_top_p_triton(logits, k, p, has_topp_only_rows=True):
    """In place, as vLLM's."""
    masked = logits if k is None else fused_softmax.top_k_mask_logits(logits, k)
    masked = masked if p is None else fused_softmax.top_p_mask_logits(masked, p)
    return logits if masked is logits else logits.copy_(masked)
