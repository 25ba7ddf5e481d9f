"""cut-cross-entropy's names on fused_softmax; utils.py and constants.py come from its checkout.

impl: "cce" is linear_cross_entropy as it chooses, "cce_exact" is it by 64 rows at a time, "torch_compile" is its traced
operator.
"""

import torch

import fused_softmax

_traced = torch.compile(fused_softmax.linear_cross_entropy, backend="aot_eager", fullgraph=True, dynamic=False)


def linear_cross_entropy(
    e, c, targets, bias=None, ignore_index=-100, softcap=None, reduction="mean", shift=0, return_lse=False, impl="cce"
):
    if shift := int(shift):
        e, targets = e[..., :-shift, :], targets[..., shift:]
    function = _traced if impl == "torch_compile" else fused_softmax.linear_cross_entropy
    out = function(
        e, c, targets, linear_bias=bias, reduction=reduction, ignore_index=ignore_index, softcap=softcap,
        return_lse=return_lse, dtype=torch.float32, chunk_size=64 if impl == "cce_exact" else None,
    )  # fmt: skip
    return (out.loss, out.lse) if return_lse else out
