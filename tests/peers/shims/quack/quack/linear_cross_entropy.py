import torch
import torch.nn.functional as F

import fused_softmax


def linear_cross_entropy_func_ref(x, weight, bias, target, ignore_index=-100, reduction="mean"):
    return F.cross_entropy(F.linear(x, weight, bias), target, ignore_index=ignore_index, reduction=reduction)


def scaled_exp_lce_supported(x, weight, chunk_size, reduction):
    return True


def chunked_linear_cross_entropy(
    x, weight, target, chunk_size=4096, ignore_index=-100, reduction="mean", tuned=True, use_scaled_exp=None
):
    """With use_scaled_exp, blocks and chunks as fused_softmax chooses them; without, chunks of chunk_size rows."""
    return fused_softmax.linear_cross_entropy(
        x, weight, target, ignore_index=ignore_index, reduction=reduction, dtype=torch.float32,
        chunk_size=None if use_scaled_exp else chunk_size,
    )  # fmt: skip


def scaled_exp_linear_cross_entropy(x, weight, target, chunk_size=4096, ignore_index=-100, reduction="mean"):
    return chunked_linear_cross_entropy(x, weight, target, chunk_size, ignore_index, reduction)
