"""flash-attn's names on fused_softmax."""
