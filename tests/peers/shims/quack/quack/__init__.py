"""QuACK's names on fused_softmax."""
