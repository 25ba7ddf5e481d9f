import torch

import fused_softmax

fused_softmax.softmax  # noqa: B018  the first use registers the operators


def softmax(x):
    return fused_softmax.softmax(x, -1)


def softmax_fwd(x):
    return fused_softmax.softmax(x, -1)


def softmax_bwd(dy, y):
    return torch.ops.fused_softmax.softmax_backward(dy, y, -1)
