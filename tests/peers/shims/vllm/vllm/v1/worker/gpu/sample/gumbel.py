import fused_softmax

_uniform64_from_random53 = murmur3_hash32 = None  # vLLM's own noise


def gumbel_sample(logits, expanded_idx_mapping, temperature, seed, pos, apply_temperature, is_drafting, use_fp64=False):
    """Drafts have seeds of their own."""
    rows = expanded_idx_mapping.long()
    assert apply_temperature
    return fused_softmax.sample(logits, temperature[rows], seed=seed[rows] ^ is_drafting << 40, position=pos).tokens
