"""TRL's names on fused_softmax."""
