"""Who is faster, torch's scaled_dot_product_attention or the kernels; and plain attention by cuDNN, through torch.

`plan/attention_sdpa.py` says which, with what was measured, and what `enable(attention=True)` takes from torch. Each
pass is handed over by itself, because output and lse are all that goes from one to the other. cuDNN's gradients may
differ in their last bits from run to run.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from fused_softmax.device import device_of
from fused_softmax.ops.attention_calls import Gradients, Inputs, Results
from fused_softmax.options_attention import MOST_DIM, Attention
from fused_softmax.plan.attention_sdpa import Entry, Pass, biased_of, entry_of
from fused_softmax.route import needs_grad

_forward = torch.ops.aten._scaled_dot_product_cudnn_attention.default
_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
switch = torch._C._get_cudnn_sdp_enabled  # whether the user lets cuDNN compute attention: part of what is kept


def is_plain(given: Inputs, how: Attention) -> bool:
    """Whether cuDNN computes the same: nothing beside query, key and value, and no bound but top-left causality."""
    n_queries, n_keys = given.query.shape[-2], given.key.shape[-2]
    causal = (how.left, how.right, how.offset(n_queries, n_keys)) == (None, 0, 0)
    return (
        all(each is None for each in given[3:])
        and (causal or not how.bounded)
        and how.softcap is None
        and not how.stats
        and how.scale > 0
        and given.query.ndim == 4
        and 0 not in given.query.shape
        and not any(0 in each.stride() for each in given[:3])  # broadcast
    )


def taken(which: Pass, given: Inputs, how: Attention) -> Entry | None:
    """The entry of the plan by which cuDNN has this pass, or None if the kernels of this package compute it."""
    query, key, value = given[:3]
    if how.deterministic or not is_plain(given, how) or not _has_cudnn(given, how):
        return None
    dims, lengths = (query.shape[-1], value.shape[-1]), (query.shape[-2], key.shape[-2])
    return entry_of(which, *dims, query.element_size(), *lengths, device_of(query.get_device()))


def _has_cudnn(given: Inputs, how: Attention) -> bool:
    """Whether torch would let cuDNN have it: the user's switches, layouts and versions."""
    if not given.query.is_cuda:
        return False
    cuda = torch.backends.cuda
    return cuda.can_use_cudnn_attention(cuda.SDPAParams(*given[:3], None, 0.0, how.right == 0, how.enable_gqa))


def takes_over(
    query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None, is_causal: bool, scale: float | None,
    enable_gqa: bool,
) -> bool:  # fmt: skip
    """Whether the kernels are to compute a call of torch's: where they are faster as measured, or torch composes it.

    What torch composes keeps all scores in memory. float32 stays with it, since its products here take no tensor core
    and nothing was measured; so does a call for which the user has switched a way of torch's off.
    """
    dims, lengths = (query.shape[-1], value.shape[-1]), (query.shape[-2], key.shape[-2])
    if query.element_size() != 2 or max(dims) > MOST_DIM or min(*dims, *lengths) == 0:
        return False
    if attn_mask is not None and attn_mask.dtype not in (torch.bool, torch.float32, query.dtype):
        return False
    cuda = torch.backends.cuda
    if not (cuda.flash_sdp_enabled() and cuda.mem_efficient_sdp_enabled() and cuda.math_sdp_enabled()):
        return False
    if attn_mask is not None and attn_mask.dtype != torch.bool and needs_grad(attn_mask):
        return biased_of(*dims, 2, *lengths, device_of(query.get_device())) is not None
    choice = torch._fused_sdp_choice(
        query, key, value, attn_mask, 0.0, is_causal, scale=scale, enable_gqa=enable_gqa
    )  # fmt: skip
    return choice == SDPBackend.MATH.value


def prepare_forward(given: Inputs, how: Attention, with_lse: bool) -> Callable[..., Results] | None:
    """As attention_calls.prepare_forward; None where cuDNN has no part in it."""
    if taken("forward", given, how) is None:
        return None
    rows, is_causal, scale = given.query.shape[:-1], how.right == 0, float(how.scale)

    def call(query: Tensor, key: Tensor, value: Tensor, *_: None) -> Results:
        output, lse, *_ = _forward(query, key, value, None, with_lse, 0.0, is_causal, scale=scale)
        return Results(output, lse.view(rows) if with_lse else None, None, None, None)  # type: ignore[arg-type]

    return call


def prepare_backward(
    given: Inputs, how: Attention, dlse: Tensor | None, asked: tuple[bool, ...]
) -> Callable[..., Gradients] | None:
    """As attention_calls.prepare_backward; None where cuDNN has no part in it, as in a gradient of lse."""
    if dlse is not None or not all(asked[:3]) or taken("backward", given, how) is None:
        return None
    n_queries, n_keys = given.query.shape[-2], given.key.shape[-2]
    is_causal, scale = how.right == 0, float(how.scale)

    def call(do, dlse, output, lse, query, key, value, *_) -> Gradients:
        unused = torch.empty(2, dtype=torch.int64, device=query.device).unbind()  # of dropout
        dq, dk, dv = _backward(
            do if do.stride(-1) == 1 else do.contiguous(), query, key, value, output, lse.unsqueeze(-1), *unused, None,
            None, None, n_queries, n_keys, 0.0, is_causal, scale=scale,
        )  # fmt: skip
        return Gradients(dq, dk, dv, None, None, None)

    return call
