import torch

import fused_softmax

fused_softmax.cross_entropy  # noqa: B018  the first use registers the operators
_ops = torch.ops.fused_softmax


def cross_entropy(
    x, target, lse_partial=None, weight=None, ignore_index=-100, reduction="mean", inplace_backward=False
):
    lse = None if lse_partial is None else fused_softmax.logsumexp(lse_partial, -1)
    return fused_softmax.cross_entropy(
        x, target, weight, ignore_index, reduction, inplace_backward=inplace_backward, dtype=torch.float32, lse=lse
    )


def cross_entropy_fwd(
    x, target, target_logit=None, weight=None, ignore_index=-100, return_lse=False, return_dx=False,
    inplace_backward=False,
):  # fmt: skip
    assert target_logit is None
    loss, _, m, ls, *_ = _ops.cross_entropy(x.detach(), target, weight, ignore_index, "none", dtype=torch.float32)
    out = [loss]
    if return_lse:
        out.append(m + ls)
    if return_dx:
        dx = _ops.cross_entropy_backward(
            x.detach(), target, m, ls, torch.ones_like(loss), None, None, weight, ignore_index, "none"
        )
        if inplace_backward:  # the operator changes no argument
            x.copy_(dx)
            dx = x
        out.append(dx)
    return tuple(out) if len(out) > 1 else loss


def cross_entropy_bwd(x, target, dloss, lse, weight=None, ignore_index=-100, inplace_backward=False):
    dx = _ops.cross_entropy_backward(
        x, target, lse, torch.zeros_like(lse), dloss, None, None, weight, ignore_index, "none"
    )
    return x.copy_(dx) if inplace_backward else dx
