import pytest
import torch


def large_gpu_mark(min_gb):
    short = torch.cuda.get_device_properties(0).total_memory < min_gb << 30
    return pytest.mark.skipif(short, reason=f"needs {min_gb} GiB")
