"""Errors name a tensor by its shape and dtype, and never print its values, which may be many or private."""

import inspect

import pytest
import torch

import fused_softmax
from fused_softmax.core.described import described, typed

VALUE = 7654.25
SPOKEN = "7654"
X, T, W = torch.randn(3, 5), torch.tensor([1, 2, 0]), torch.randn(5, 5)
Q = torch.randn(1, 2, 4, 8)
P = X.softmax(-1)
ROW, CUT = {"input": X[:, 0]}, {"offsets": torch.tensor([0, 3])}
CALLS = {  # each with what it needs
    "softmax": {"input": X, "dim": -1},
    "log_softmax": {"input": X, "dim": -1},
    "logsumexp": {"input": X, "dim": -1},
    "cross_entropy": {"input": X, "target": T},
    "linear_cross_entropy": {"input": X, "linear_weight": W, "target": T},
    "log_prob": {"input": X, "target": T},
    "linear_log_prob": {"input": X, "linear_weight": W, "target": T},
    "divergence": {"input": X, "target": X},
    "linear_divergence": {"input": X, "linear_weight": W, "target_input": X, "target_weight": W},
    "sample": {"logits": X},
    "speculative_sample": {"target_logits": torch.randn(2, 3, 5), "draft_tokens": torch.zeros(2, 2, dtype=torch.long)},
    "penalize": {"logits": X, "token_ids": torch.zeros(3, 2, dtype=torch.long)},
    "top_k_mask_logits": {"logits": X, "top_k": 2},
    "top_p_mask_logits": {"logits": X, "top_p": 0.5},
    "min_p_mask_logits": {"logits": X, "min_p": 0.5},
    "top_k_renorm_probs": {"probs": P, "top_k": 2},
    "top_p_renorm_probs": {"probs": P, "top_p": 0.5},
    "attention": {"query": Q, "key": Q, "value": Q},
    "route": {"logits": X, "k": 2},
    "segment_softmax": ROW | CUT,
    "segment_log_softmax": ROW | CUT,
    "segment_logsumexp": ROW | CUT,
    "warmup": {"calls": [], "device": "h100"},
}


WRONGS = {
    "a tensor": lambda: wrong(), "a tuple": lambda: (wrong(), wrong()), "a list": lambda: [wrong(), 0],
    "a dict": lambda: {"of": wrong()}, "an array": lambda: wrong().numpy(),
}  # fmt: skip


def wrong():
    return torch.full((2, 3), VALUE)


def test_every_function_is_tried():
    functions = {name for name in fused_softmax.__all__ if inspect.isfunction(getattr(fused_softmax, name))}
    assert functions - {"enable", "disable", "enabled", "explain"} == CALLS.keys()


@pytest.mark.parametrize("kind", WRONGS)
@pytest.mark.parametrize("name", CALLS)
def test_no_error_prints_the_values_of_a_tensor(name, kind):
    function, said = getattr(fused_softmax, name), []
    parameters = inspect.signature(function).parameters.values()
    arguments = [each.name for each in parameters if each.kind is not inspect.Parameter.VAR_KEYWORD]
    for argument in arguments:
        try:
            function(**CALLS[name] | {argument: WRONGS[kind]()})
        except Exception as error:
            said.append(f"{argument}: {error}")
    assert not [each for each in said if SPOKEN in each]
    assert len(said) > len(arguments) // 3


def test_what_errors_say_of_an_argument():
    assert described(wrong()) == "Tensor of shape (2, 3), torch.float32 on cpu"
    assert typed(torch.nn.Parameter(wrong())) == "Parameter of shape (2, 3), torch.float32 on cpu"
    assert typed(wrong().numpy()).startswith("ndarray of shape (2, 3), float32")
    assert described((wrong(), None)) == "(Tensor of shape (2, 3), torch.float32 on cpu, None)"
    assert (described("avg"), typed(0.5), described(torch.float16)) == ("'avg'", "float (0.5)", "torch.float16")
    assert len(described("x" * 10_000)) < 200
