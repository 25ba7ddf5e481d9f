"""The rules of sampling as a registered operator: what runs, and its fake. Tokens have no gradient, nor has a draw.

An operator takes no generator, so a call draws its seed first. Seeds and positions are tensors here.
"""

import torch

from fused_softmax.core.route import on_device
from fused_softmax.ops.sampling import reference
from fused_softmax.ops.sampling.launches import MOST_COLUMNS
from fused_softmax.ops.sampling.one_device import draws_of
from fused_softmax.ops.sampling.options import Sampling

# Results that are not asked for are empty. A number of rows counts where there is no tensor of it.
SAMPLE = (
    f"(Tensor logits, Tensor seed, Tensor position, {Sampling.schema()}) -> "
    "(Tensor tokens, Tensor valid, Tensor logprobs, Tensor top_logprobs, Tensor top_tokens, Tensor kept, "
    "Tensor rank)"
)
_DTYPES = torch.int64, torch.bool, torch.float32, torch.float32, torch.int64, torch.int32, torch.int64


def sample(logits, seed, position, *given):
    options = Sampling.of_traced(given)
    with torch._C.DisableTorchFunction():  # a mode of functions has seen the call
        if on_device(logits) and logits.shape[1] <= MOST_COLUMNS:
            found = tuple(draws_of(logits, options, seed, position))
        else:
            found = tuple(reference.sample(logits, seed, position, **options.options()))
        return tuple(
            logits.new_empty(0, dtype=dtype) if each is None else each.contiguous()
            for each, dtype in zip(found, _DTYPES, strict=True)
        )


def fake_sample(logits, seed, position, *given):
    options = Sampling.of_traced(given)
    n_draws = logits.shape[0] if options.row_indices is None else options.row_indices.shape[0]
    n_top = options.top_logprobs
    shapes = (
        [n_draws], [n_draws], [n_draws], [n_draws, n_top], [n_draws, n_top], [n_draws, -(-logits.shape[1] // 32)],
        [n_draws],
    )  # fmt: skip
    asked = options.asked(*range(7))
    return tuple(
        logits.new_empty([0] if i is None else shape, dtype=dtype)
        for i, shape, dtype in zip(asked, shapes, _DTYPES, strict=True)
    )
