import torch

from liger_kernel.transformers.functional import liger_cross_entropy


class LigerCrossEntropyLoss(torch.nn.Module):
    def __init__(self, weight=None, **options):
        super().__init__()
        self.weight, self.options = weight, options

    def forward(self, input, target):
        return liger_cross_entropy(input, target, self.weight, **self.options)
