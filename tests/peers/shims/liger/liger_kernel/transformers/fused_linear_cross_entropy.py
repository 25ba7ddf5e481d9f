import torch

from liger_kernel.transformers.functional import liger_fused_linear_cross_entropy


class LigerFusedLinearCrossEntropyLoss(torch.nn.Module):
    def __init__(self, ce_weight=None, **options):
        super().__init__()
        self.ce_weight, self.options = ce_weight, options

    def forward(self, lin_weight, input, target, bias=None):
        return liger_fused_linear_cross_entropy(input, lin_weight, target, bias, self.ce_weight, **self.options)
