"""Device code alone: kernels that read like their formulas, and the helpers that they share."""
