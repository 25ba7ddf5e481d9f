"""Who is faster, torch's scaled_dot_product_attention or the kernels; and plain attention by cuDNN, through torch.

`plan/sdpa.py` says which, with what was measured, and what `enable(attention=True)` takes from torch. Each
pass is handed over by itself, because output and lse are all that goes from one to the other. cuDNN's gradients may
differ in their last bits from run to run.

`forward_plan` and `backward_plan` say which passes go there, or why one does not; `wrong_for`, which calls cuDNN gets
wrong. Two more things are wrong where nothing can be asked of a call:

- torch keeps cuDNN's graph of a gradient by the layouts of query, key and value, and uses it for outputs and gradients
  of any layout: whoever came first has fixed them (aten/src/ATen/native/cudnn/MHA.cpp). So graphs here are apart from
  torch's own, by a dropout of -0.0, and all gradients of one kind get the layouts of the first.
- Weights in its gradient are computed from lse, which is rounded. They lose digits where scores are tens of thousands:
  1 % at 2e5, half of them at 1e7. The kernels of this package lose none; `deterministic=True` asks for them.
"""

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

from fused_softmax.core.calls import contiguous_strides
from fused_softmax.core.device import device_of
from fused_softmax.core.route import needs_grad
from fused_softmax.ops.attention.call import Backward, Forward, Gradients, Inputs, Results
from fused_softmax.ops.attention.call import Pass as AttentionPass
from fused_softmax.ops.attention.options import MOST_DIM, Attention
from fused_softmax.ops.attention.plan.sdpa import Entry, Pass, biased_of, entry_of

_APART = -0.0  # dropout, as torch tells its graphs: of equal numbers, but not of equal bits
_forward = torch._scaled_dot_product_cudnn_attention  # torch.ops.aten's takes the host 3 us longer
_backward = torch.ops.aten._scaled_dot_product_cudnn_attention_backward.default
MOST_ELEMENTS = 2**31
switch = torch._C._get_cudnn_sdp_enabled  # whether the user lets cuDNN compute attention: part of what is kept


def forward_plan(asked: Forward) -> Entry | str:
    return _entry("forward", asked)


def backward_plan(asked: Backward) -> Entry | str:
    if asked.dlse is not None:
        return "lse has a gradient"
    if not all(asked.wanted[:3]):
        return "query, key and value do not all have a gradient"
    if asked.output.numel() >= MOST_ELEMENTS:
        return "2 ** 31 elements or more"
    return _entry("backward", asked)


def _entry(which: Pass, asked: AttentionPass) -> Entry | str:
    """The entry of the plan by which cuDNN has this pass, or why the kernels of this package compute it."""
    given, how = asked.given, asked.how
    query, key, value = given.query, given.key, given.value
    if how.deterministic:
        return "the same bits are asked for at every run"
    refused = not_plain(given, how) or wrong_for(query, key, value)
    if refused:
        return refused
    if asked.gpu is None and not _has_cudnn(given, how):
        return "torch does not let cuDNN have the call: it is switched off, or knows no such tensors"
    gpu = device_of(query.get_device()) if asked.gpu is None else asked.gpu
    lengths = query.shape[-2], key.shape[-2]
    n_heads = query.shape[:-2].numel()
    return entry_of(which, query.shape[-1], value.shape[-1], query.element_size(), n_heads, *lengths, gpu)


def not_plain(given: Inputs, how: Attention) -> str | None:
    """What in a call cuDNN does not compute; None for query, key and value with top-left causality at most."""
    query = given.query
    beside = [name for name, each in given._asdict().items() if each is not None][3:]
    causal = (how.left, how.right, how.offset(query.shape[-2], given.key.shape[-2])) == (None, 0, 0)
    whys = {
        f"it has {' and '.join(beside)}": bool(beside),
        "its window is not top-left causality": how.bounded and not causal,
        "it has a softcap": how.softcap is not None,
        "statistics are asked for": bool(how.stats),
        "its scale is not positive": how.scale <= 0,
        "its tensors do not have four dims": query.ndim != 4,
        "there is nothing to compute": 0 in query.shape,
    }
    return next((why for why, holds in whys.items() if holds), None)


def wrong_for(*tensors: Tensor) -> str | None:
    """Why cuDNN would be wrong with query, key, value, an output or its gradient, without a word; None if it is right.

    One H100, torch 2.11, cuDNN 9.19, bf16, against float64, 64 and 128 dims (measured/attention.md, "What cuDNN is
    given").
    Wrong: outputs by their own size where query, key or value began 2 or 8 bytes off 16, or their rows lay so; such a
    gradient of the output ended in an error or took the process with it. Gradients of the last heads of a query of
    2 ** 31 elements. Right: gaps of whole vectors between heads and batches, heads beside each other, GQA of 1 to 8
    queries a key, 128 to 4001 queries and keys, scales of 1e-3 to 10, values and gradients of 1e-4 to 3e4, all
    multiples of 8 from 56 to 128 dims, fp16. It refuses other dims itself.
    """
    for each in tensors:
        if 0 in each.stride():
            return "a tensor is broadcast"
        dims = [(size, step) for size, step in zip(each.shape, each.stride(), strict=True) if size > 1]
        steps = [step * each.element_size() for _, step in dims[: -1 if each.shape[-1] > 1 else None]]
        whole = each.stride(-1) == 1 or each.shape[-1] == 1
        if each.data_ptr() % 16 or not whole or any(step % 16 for step in steps):
            return "rows that do not begin on 16 bytes"
        if sum((size - 1) * step for size, step in dims) >= MOST_ELEMENTS:
            return "2 ** 31 elements or more"
    return None


def _has_cudnn(given: Inputs, how: Attention) -> bool:
    """Whether torch would let cuDNN have it: the user's switches, layouts and versions."""
    # Of a tensor without memory torch would ask a driver, which need not be here.
    if given.query.device.type != "cuda":
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


def prepare_forward(asked: Forward, entry: Entry) -> Callable[..., Results]:
    rows, is_causal, scale = asked.given.query.shape[:-1], asked.how.right == 0, float(asked.how.scale)
    with_lse = asked.with_lse

    def call(query: Tensor, key: Tensor, value: Tensor, *_: None) -> Results:
        output, lse = _forward(query, key, value, None, with_lse, _APART, is_causal, scale=scale)[:2]
        return Results(output, lse.view(rows) if with_lse else None, None, None, None)  # type: ignore[arg-type]

    return call


def prepare_backward(asked: Backward, entry: Entry) -> Callable[..., Gradients]:
    given, how = asked.given, asked.how
    layouts = _layouts_of(given, how, asked.output, asked.do)
    of_output, of_do = (_laid_out(each, layout) for each, layout in zip((asked.output, asked.do), layouts, strict=True))
    n_queries, n_keys = given.query.shape[-2], given.key.shape[-2]
    is_causal, scale = how.right == 0, float(how.scale)

    def call(do, dlse, output, lse, query, key, value, *_) -> Gradients:
        unused = torch.empty(2, dtype=torch.int64, device=query.device).unbind()  # of dropout
        dq, dk, dv = _backward(
            of_do(do), query, key, value, of_output(output), lse.unsqueeze(-1), *unused, None, None, None, n_queries,
            n_keys, _APART, is_causal, scale=scale,
        )  # fmt: skip
        return Gradients(dq, dk, dv, None, None, None)

    return call


_layouts: dict[tuple, tuple[tuple[int, ...], tuple[int, ...]]] = {}


def _layouts_of(given: Inputs, how: Attention, output: Tensor, do: Tensor) -> tuple[tuple[int, ...], ...]:
    """The strides of output and its gradient that all gradients of this kind have: those of the first.

    A kind is what torch keeps a graph by. These entries live as long as torch's graphs do, which is for ever.
    """
    query, key, value = given[:3]
    kind = (
        query.dtype, query.device, how.right == 0, query.shape, key.shape, value.shape, query.stride(), key.stride(),
        value.stride(),
    )  # fmt: skip
    own = tuple(contiguous_strides(each.shape) if wrong_for(each) else each.stride() for each in (output, do))
    return _layouts.setdefault(kind, own)  # type: ignore[arg-type]


def _laid_out(like: Tensor, strides: tuple[int, ...]) -> Callable[[Tensor], Tensor]:
    """What gives tensors like this one the strides; it copies those that have others, or do not begin on 16 bytes."""
    if like.stride() == strides and not wrong_for(like):
        return lambda tensor: tensor
    return lambda tensor: torch.empty_strided(
        tensor.shape, strides, dtype=tensor.dtype, device=tensor.device
    ).copy_(tensor)  # fmt: skip
