import torch

import fused_softmax


class FusedCrossEntropyLoss(torch.nn.Module):
    def __init__(
        self, ignore_index=-100, reduction="mean", label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0,
        logit_softcapping=None, inplace_backward=False, process_group=None, return_z_loss=False,
    ):  # fmt: skip
        super().__init__()
        self.reduction, self.return_z_loss = reduction, return_z_loss
        self.options = {
            "ignore_index": ignore_index, "label_smoothing": label_smoothing, "scale": logit_scale,
            "lse_square_scale": lse_square_scale, "softcap": logit_softcapping, "group": process_group,
            "inplace_backward": inplace_backward, "return_z_loss": return_z_loss,
        }  # fmt: skip

    def forward(self, input, target):
        out = fused_softmax.cross_entropy(input, target, reduction=self.reduction, dtype=torch.float32, **self.options)
        return (out.loss, out.z_loss) if self.return_z_loss else out


class FusedLinearCrossEntropyLoss(torch.nn.Module):
    def __init__(
        self, ignore_index=-100, label_smoothing=0.0, logit_scale=1.0, logit_softcapping=None, num_chunks=8,
        reduction="mean", use_l2warp=False, l2_penalty_factor=1e-4, accumulate_grad_in_fp32=True,
    ):  # fmt: skip
        super().__init__()
        assert not use_l2warp
        self.num_chunks = num_chunks
        self.options = {
            "ignore_index": ignore_index, "label_smoothing": label_smoothing, "scale": logit_scale,
            "softcap": logit_softcapping, "reduction": reduction,
            "accumulate": "fp32" if accumulate_grad_in_fp32 else "input",
        }  # fmt: skip

    def forward(self, x, target, weight, bias=None):
        return fused_softmax.linear_cross_entropy(
            x.view(-1, x.shape[-1]), weight, target.view(-1), linear_bias=bias, dtype=torch.float32, **self.options
        )
