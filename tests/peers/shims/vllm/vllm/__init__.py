"""vLLM's names on fused_softmax.

From its checkout come its masks by a sort, which tests compare with, its bad words, and the classes of metadata. All
else that these files and the tests import is here, and does nothing.
"""

import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from unittest.mock import MagicMock

import peers_plugin
import torch
import triton

sys.path.append(str(Path(peers_plugin.__file__).parent / "shims" / "flashinfer"))  # with which vLLM samples


def _module(name, **names):
    sys.modules[f"vllm.{name}"] = module = ModuleType(f"vllm.{name}")
    module.__path__ = []
    module.__dict__.update(names)


def _stub(name):
    return type(name, (), {})


def _padded(rows, pad, device, dtype, pin_memory=False):
    rows = [torch.tensor(row, dtype=dtype, device=device) for row in rows]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_value=pad)


CompletionOutput = _stub("CompletionOutput")
_platform = SimpleNamespace(
    device_type="cuda", device_count=lambda: 1, is_cuda=lambda: True, is_cuda_alike=lambda: True,
    is_rocm=lambda: False, is_cpu=lambda: False, is_xpu=lambda: False, get_device_capability=lambda: (9, 0),
    num_compute_units=lambda _: 132,
)  # fmt: skip
_module("envs", VLLM_USE_FLASHINFER_SAMPLER=False)
_module("_aiter_ops", rocm_aiter_ops=None)
_module("config", ReasoningConfig=_stub("ReasoningConfig"))
_module("config.model", PROCESSED_LOGPROBS_MODES=("processed_logits", "processed_logprobs"), LogprobsMode=str)
_module("logger", init_logger=lambda _: MagicMock())
_module("platforms", CpuArchEnum=MagicMock(), current_platform=_platform)
_module("platforms.interface", DeviceCapability=tuple)
_module("triton_utils", HAS_TRITON=True, tl=triton.language, triton=triton)
_module("utils")
_module("utils.platform_utils", is_pin_memory_available=lambda: False)
_module("utils.torch_utils", set_random_seed=torch.manual_seed, make_tensor_with_pad=_padded)
_module("v1.attention")
_module("v1.attention.backends")
_module(
    "v1.attention.backends.flashinfer", FlashInferBackend=SimpleNamespace(supports_compute_capability=lambda _: True)
)
_module(
    "v1.sample.logits_processor",
    **{name: _stub(name) for name in ("BatchUpdate", "LogitsProcessor", "LogitsProcessors")},
)
_module("v1.sample.thinking_budget_state", ThinkingBudgetStateHolder=_stub("ThinkingBudgetStateHolder"))
