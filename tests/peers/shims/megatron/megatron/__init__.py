"""Megatron's names on fused_softmax."""
