"""Errors name a tensor by its shape and dtype, and never print its values, which may be many or private."""

import pytest
import torch

import fused_softmax
from fused_softmax.core.described import described, typed

VALUE = 7654.25
SPOKEN = "7654"
X, T, W = torch.randn(3, 5), torch.tensor([1, 2, 0]), torch.randn(5, 5)
Q = torch.randn(1, 2, 4, 8)
CALLS = {
    "softmax": (
        lambda **options: fused_softmax.softmax(X, **options),
        ("dim", "dtype", "out", "scale", "mask", "is_causal", "masked_rows", "sink"),
    ),
    "logsumexp": (
        lambda **options: fused_softmax.logsumexp(X, **{"dim": -1, **options}),
        ("dim", "out", "scale", "mask", "is_causal", "masked_rows", "sink"),
    ),
    "cross_entropy": (
        lambda **options: fused_softmax.cross_entropy(X, **{"target": T, **options}),
        (
            "target", "weight", "ignore_index", "reduction", "label_smoothing", "softcap", "scale", "lse_square_scale",
            "dtype", "lse", "group", "n_classes", "transport",
        ),
    ),
    "linear_cross_entropy": (
        lambda **options: fused_softmax.linear_cross_entropy(X, **{"linear_weight": W, "target": T, **options}),
        (
            "linear_weight", "target", "linear_bias", "weight", "ignore_index", "reduction", "label_smoothing", "scale",
            "softcap", "lse_square_scale", "chunk_size", "accumulate", "dtype", "group", "n_classes", "transport",
        ),
    ),
    "log_prob": (
        lambda **options: fused_softmax.log_prob(X, **{"target": T, **options}),
        ("target", "scale", "softcap", "temperature", "ignore_index", "return_stats", "kept", "dtype"),
    ),
    "divergence": (
        lambda **options: fused_softmax.divergence(X, **{"target": X, **options}),
        (
            "target", "kind", "beta", "scale", "softcap", "temperature", "target_scale", "target_softcap",
            "target_temperature", "target_is", "columns", "rest", "weight", "reduction", "dtype",
        ),
    ),
    "sample": (
        lambda **options: fused_softmax.sample(X, **options),
        (
            "temperature", "top_k", "top_p", "min_p", "order", "seed", "generator", "logit_bias", "bitmask",
            "row_indices", "token_ids", "repetition", "presence", "frequency", "return_logprobs", "top_logprobs",
            "return_kept", "transport",
        ),
    ),
    "attention": (
        lambda **options: fused_softmax.attention(Q, **{"key": Q, "value": Q, **options}),
        (
            "key", "value", "attn_mask", "bias", "causal_align", "scale", "window", "softcap", "sinks",
            "alibi_slopes", "return_stats",
        ),
    ),
}  # fmt: skip


WRONGS = {
    "a tensor": lambda: wrong(), "a tuple": lambda: (wrong(), wrong()), "a list": lambda: [wrong(), 0],
    "a dict": lambda: {"of": wrong()}, "an array": lambda: wrong().numpy(),
}  # fmt: skip


def wrong():
    return torch.full((2, 3), VALUE)


@pytest.mark.parametrize("kind", WRONGS)
@pytest.mark.parametrize("name", CALLS)
def test_no_error_prints_the_values_of_a_tensor(name, kind):
    call, arguments = CALLS[name]
    said = []
    for argument in arguments:
        try:
            call(**{argument: WRONGS[kind]()})
        except Exception as error:
            said.append(f"{argument}: {error}")
    assert not [each for each in said if SPOKEN in each]
    assert len(said) > len(arguments) // 2


def test_what_errors_say_of_an_argument():
    assert described(wrong()) == "Tensor of shape (2, 3), torch.float32 on cpu"
    assert typed(torch.nn.Parameter(wrong())) == "Parameter of shape (2, 3), torch.float32 on cpu"
    assert typed(wrong().numpy()).startswith("ndarray of shape (2, 3), float32")
    assert described((wrong(), None)) == "(Tensor of shape (2, 3), torch.float32 on cpu, None)"
    assert (described("avg"), typed(0.5), described(torch.float16)) == ("'avg'", "float (0.5)", "torch.float16")
    assert len(described("x" * 10_000)) < 200
