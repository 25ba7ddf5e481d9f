"""Liger's names on fused_softmax."""
