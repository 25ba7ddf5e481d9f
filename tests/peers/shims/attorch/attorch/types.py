import torch

Device = torch.device | str
