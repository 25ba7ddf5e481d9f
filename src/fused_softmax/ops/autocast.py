"""What torch.autocast does to each operator: one table, which says what torch's own lists say of the same operation.

An input of float64, or of no float dtype, is left alone, and so is a call whose tensors are on another device. Nothing
within an operator is cast: its arithmetic is its own, as that of torch's kernels is.
"""

from contextlib import AbstractContextManager, nullcontext
from typing import NamedTuple

import torch
from torch import Tensor


class Rule(NamedTuple):
    """What autocast does to an operator.

    devices: whose autocast does it. lowers: whether the tensors that are multiplied get autocast's dtype.
    result: the dtype of a result that a call asks no dtype and no out= for; None is the dtype of what is multiplied.
    """

    devices: tuple[str, ...] = ()
    lowers: bool = False
    result: torch.dtype | None = None


_EVERYWHERE = ("cuda", "cpu")
_NOTHING = Rule()
# As torch's for softmax, log_softmax, logsumexp, cross_entropy, linear and scaled_dot_product_attention.
TABLE = {
    "softmax": Rule(("cuda",), result=torch.float32),
    "log_softmax": Rule(("cuda",), result=torch.float32),
    "logsumexp": Rule(("cuda",), result=torch.float32),
    "segment_softmax": Rule(("cuda",), result=torch.float32),
    "segment_log_softmax": Rule(("cuda",), result=torch.float32),
    "segment_logsumexp": Rule(("cuda",), result=torch.float32),
    "cross_entropy": Rule(_EVERYWHERE, result=torch.float32),
    "linear_cross_entropy": Rule(_EVERYWHERE, lowers=True, result=torch.float32),
    "attention": Rule(_EVERYWHERE, lowers=True),
    "sample": _NOTHING,
    "speculative_sample": _NOTHING,
    "top_k_mask_logits": _NOTHING,
    "top_p_mask_logits": _NOTHING,
    "min_p_mask_logits": _NOTHING,
    "top_k_renorm_probs": _NOTHING,
    "top_p_renorm_probs": _NOTHING,
    "penalize": _NOTHING,
    "route": _NOTHING,
}


def result_dtype(name: str, input: Tensor, dtype: torch.dtype | None = None) -> torch.dtype:
    """The dtype of an operator's result: `dtype` if the call has one, autocast's choice, or the input's."""
    if dtype is not None:
        return dtype
    rule = TABLE[name]
    return rule.result if rule.result is not None and _applies(rule, input) else input.dtype


def lowered_dtype(name: str, input: Tensor) -> torch.dtype | None:
    """The dtype to which an operator's inputs are cast; None where they stay as they are."""
    rule = TABLE[name]
    return torch.get_autocast_dtype(input.device.type) if rule.lowers and _applies(rule, input) else None


def lowers(*tensors: Tensor) -> bool:
    """Whether autocast would cast each of these."""
    return all(each.dtype.is_floating_point and each.dtype != torch.float64 for each in tensors)


def _applies(rule: Rule, input: Tensor) -> bool:
    # Whether it is on is asked first of one whose lists are known: torch knows none for "meta", and raises.
    device = input.device.type
    return device in rule.devices and torch.is_autocast_enabled(device) and lowers(input)


def off(input: Tensor) -> AbstractContextManager:
    """A context in which torch's operations on tensors like this one compute in the dtypes that they are given."""
    device = input.device.type
    if device in _EVERYWHERE and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()
