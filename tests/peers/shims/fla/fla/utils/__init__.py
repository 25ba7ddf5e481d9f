import torch

from fla.utils._testing import assert_close  # noqa: F401  its own

device, device_platform, device_torch_lib = "cuda", "nvidia", torch.cuda
