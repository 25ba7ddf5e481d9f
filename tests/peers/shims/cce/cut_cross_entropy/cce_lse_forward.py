import torch

import fused_softmax


def cce_lse_forward_kernel(e, c, bias=None, softcap=None):
    target = torch.zeros(e.shape[0], dtype=torch.int64, device=e.device)
    return fused_softmax.linear_cross_entropy(
        e, c, target, linear_bias=bias, reduction="none", softcap=softcap, return_lse=True, dtype=torch.float32
    ).lse
