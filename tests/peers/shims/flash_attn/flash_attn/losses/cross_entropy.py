import torch

import fused_softmax


class CrossEntropyLoss(torch.nn.Module):
    def __init__(
        self, ignore_index=-100, reduction="mean", label_smoothing=0.0, logit_scale=1.0, lse_square_scale=0.0,
        inplace_backward=False, process_group=None, return_z_loss=False,
    ):  # fmt: skip
        super().__init__()
        self.ignore_index, self.reduction, self.inplace_backward = ignore_index, reduction, inplace_backward
        self.return_z_loss = return_z_loss
        self.options = {
            "label_smoothing": label_smoothing, "scale": logit_scale, "lse_square_scale": lse_square_scale,
            "return_z_loss": return_z_loss, "inplace_backward": inplace_backward, "group": process_group,
        }  # fmt: skip

    def forward(self, input, target, precomputed_lse=None):
        if self.inplace_backward and input.is_leaf:
            input = input.clone()  # no leaf is written over
        out = fused_softmax.cross_entropy(
            input, target, None, self.ignore_index, self.reduction, dtype=torch.float32, lse=precomputed_lse,
            **self.options,
        )  # fmt: skip
        return (out.loss, out.z_loss) if self.return_z_loss else out
