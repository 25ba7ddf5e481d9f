import torch

import fused_softmax


class LigerSoftmax(torch.nn.Module):
    def forward(self, x):
        return fused_softmax.softmax(x, -1)
