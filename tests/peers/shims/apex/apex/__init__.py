"""Apex's names on fused_softmax."""
