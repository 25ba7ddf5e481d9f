"""A pytest plugin that makes "cuda" mean the CPU, whose tensors Triton's interpreter takes and rounds as a GPU does."""

from types import SimpleNamespace

import torch
from torch.overrides import TorchFunctionMode

# Under a mode torch's operations compute, but this one changes nothing that kernels see. calls.py asks at its import.
torch._C._is_torch_function_mode_enabled = lambda: False

from fused_softmax.trace.recorder.as_a_gpu import CORRECTIONS  # noqa: E402
from fused_softmax.trace.recorder.shortcuts import SHORTCUTS  # noqa: E402

for holder, attribute, changed in (*CORRECTIONS, *SHORTCUTS):
    setattr(holder, attribute, changed(holder.__dict__[attribute]))

SAID = {
    "is_available": True, "is_initialized": False, "is_bf16_supported": True, "device_count": 1,
    "get_device_capability": (9, 0), "synchronize": None, "empty_cache": None, "manual_seed": None,
    "manual_seed_all": None,
    "get_device_properties": SimpleNamespace(name="CPU", total_memory=1 << 36, major=9, minor=0),
}  # fmt: skip
for name, value in SAID.items():
    setattr(torch.cuda, name, lambda *_, value=value, **__: value)
torch.accelerator.current_device_index, torch.accelerator.synchronize = lambda: 0, lambda: None


def on_cpu(value):
    if isinstance(value, str | torch.device) and str(value).startswith("cuda"):
        return torch.device("cpu") if isinstance(value, torch.device) else "cpu"
    return value


def with_cpu(function):
    def call(*args, **kwargs):
        return function(*map(on_cpu, args), **{name: on_cpu(value) for name, value in kwargs.items()})

    return call


# A mode does not see calls of these.
torch.nn.Module.to = with_cpu(torch.nn.Module.to)
torch.autocast.__init__ = with_cpu(torch.autocast.__init__)
torch.set_default_device = with_cpu(torch.set_default_device)


class _Generator(type):
    def __call__(cls, *args, **kwargs):
        return with_cpu(torch._C.Generator)(*args, **kwargs)

    def __instancecheck__(cls, value):
        return isinstance(value, torch._C.Generator)


class Generator(metaclass=_Generator):
    """torch.Generator, always on the CPU."""


torch.Generator = Generator


class OnCPU(TorchFunctionMode):
    def __torch_function__(self, function, types, args=(), kwargs=None):
        return args[0] if function is torch.Tensor.cuda else with_cpu(function)(*args, **kwargs or {})


def pytest_sessionstart():
    OnCPU().__enter__()
