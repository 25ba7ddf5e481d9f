"""What FlopCounterMode of torch.utils.flop_counter counts: the products that torch's own operations would make."""

import os
import subprocess
import sys

import pytest
import torch
import torch.nn.functional as F
from torch.utils.flop_counter import FlopCounterMode, sdpa_backward_flop_count, sdpa_flop_count

import fused_softmax

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
OPERATORS = torch.ops.fused_softmax
N, CLASSES, FEATURES = 24, 50, 16
PRODUCT = 2 * N * CLASSES * FEATURES


def rand(*shape, device="cpu", dtype=torch.float32):
    x = torch.randn(*shape, generator=torch.Generator().manual_seed(len(shape)))
    return x.to(device, dtype).requires_grad_()


def count(call):
    """What is counted of a call, and of its backward pass; by operators too."""
    with FlopCounterMode(display=False) as forward:
        y = call()
    with FlopCounterMode(display=False) as backward:
        y.float().sum().backward()
    counters = forward, backward
    return [each.get_total_flops() for each in counters], [dict(each.flop_counts["Global"]) for each in counters]


def layer(device, dtype=torch.float32, frozen=""):
    g = {"x": rand(N, FEATURES, device=device, dtype=dtype), "w": rand(CLASSES, FEATURES, device=device, dtype=dtype)}
    for name in frozen:
        g[name].requires_grad_(False)
    return g, torch.arange(N, device=device) % CLASSES


@pytest.mark.parametrize("frozen", ["", "x", "w"])
@pytest.mark.parametrize("reduction", ["mean", "sum", "none"])
def test_a_linear_loss_counts_what_its_layer_does(reduction, frozen, device):
    g, target = layer(device, frozen=frozen)
    made = 2 - len(frozen)
    ours = lambda: fused_softmax.linear_cross_entropy(g["x"], g["w"], target, reduction=reduction, chunk_size=7)  # noqa: E731
    torchs = lambda: F.cross_entropy(F.linear(g["x"], g["w"]), target, reduction=reduction)  # noqa: E731
    ours()  # what is kept of an eager call is not found by one that is counted
    found, by_operator = count(ours)
    assert sum(count(torchs)[0]) == (1 + made) * PRODUCT
    if device == "cpu" and not INTERPRETED:
        assert sum(found) == (1 + made) * PRODUCT
    elif reduction == "none":  # the backward pass makes the logits again, which counts, as in torch's attention
        assert found == [PRODUCT, (1 + made) * PRODUCT]
        assert by_operator[1] == {OPERATORS.linear_cross_entropy_backward: found[1]}
    else:  # gradients are made beside the loss
        assert found == [(1 + made) * PRODUCT, 0]
        assert by_operator[0] == {OPERATORS.linear_cross_entropy: found[0]}


def test_a_linear_loss_that_needs_no_gradient_counts_its_logits(device):
    g, target = layer(device, frozen="xw")
    with FlopCounterMode(display=False) as counter:
        fused_softmax.linear_cross_entropy(g["x"], g["w"], target)
    assert counter.get_total_flops() == PRODUCT


def test_log_probabilities_of_a_layer_count_what_it_does(device):
    g, target = layer(device)
    found, by_operator = count(lambda: fused_softmax.linear_log_prob(g["x"], g["w"], target, logits="recompute"))
    if device == "cpu" and not INTERPRETED:
        assert sum(found) == 3 * PRODUCT
    else:
        assert found == [PRODUCT, 3 * PRODUCT]  # whose backward pass makes the logits again
        assert by_operator[1] == {OPERATORS.linear_log_prob_backward: found[1]}
    found, _ = count(lambda: fused_softmax.linear_log_prob(g["x"], g["w"], target, logits="keep"))
    assert sum(found) == 3 * PRODUCT


def test_a_linear_loss_of_probabilities_is_counted(device):
    g, _ = layer(device)
    target = torch.full((N, CLASSES), 1 / CLASSES, device=device)
    found, _ = count(lambda: fused_softmax.linear_cross_entropy(g["x"], g["w"], target))
    again = INTERPRETED or device == "cuda"  # the backward pass of kernels makes the logits again
    assert found == [PRODUCT, (3 if again else 2) * PRODUCT]


SHAPES = {
    "plain": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 16), {}),
    "causal": ((2, 4, 7, 8), (2, 4, 7, 8), (2, 4, 7, 8), {"is_causal": True}),
    "window": ((2, 4, 7, 8), (2, 4, 7, 8), (2, 4, 7, 8), {"window": (2, 0)}),
    "shared keys": ((2, 4, 5, 8), (2, 2, 7, 8), (2, 2, 7, 8), {"enable_gqa": True}),
    "three dims": ((4, 5, 8), (4, 7, 8), (4, 7, 8), {}),
    "without heads": ((5, 8), (7, 8), (7, 8), {}),
}


def as_4d(shape):
    return (*(1,) * (4 - len(shape)), *shape)


@pytest.mark.parametrize("with_bias", [False, True])
@pytest.mark.parametrize("name", SHAPES)
def test_attention_counts_what_torchs_formulas_do(name, with_bias, device):
    query, key, value, options = SHAPES[name]
    q, k, v = (rand(*shape, device=device) for shape in (query, key, value))
    if with_bias:
        options = options | {"bias": rand(query[-2], key[-2], device=device)}
    call = lambda: fused_softmax.attention(q, k, v, **options)  # noqa: E731
    call().sum().backward()
    found, by_operator = count(call)
    shapes = [as_4d(shape) for shape in (query, key, value)]
    if "enable_gqa" in options:  # the formulas of torch 2.11 know no heads that share keys
        shapes[1:] = [(*shape[:1], shapes[0][1], *shape[2:]) for shape in shapes[1:]]
    forward, output = sdpa_flop_count(*shapes), as_4d((*query[:-1], value[-1]))
    if device == "cpu" and not INTERPRETED:  # all scores are in memory, and none are made again
        assert found == [forward, 2 * forward]
    else:
        assert found == [forward, sdpa_backward_flop_count(output, *shapes)]
        assert by_operator == [{OPERATORS.attention: found[0]}, {OPERATORS.attention_backward: found[1]}]


@pytest.mark.skipif(not INTERPRETED and not torch.cuda.is_available(), reason="of the kernels")
@pytest.mark.parametrize(
    ("asked", "dims"), [("q", 2 + 1), ("k", 2 + 1), ("v", 1 + 1), ("qk", 3 + 1), ("b", 1 + 1), ("qkv", 3 + 2)]
)
def test_attention_counts_the_gradients_that_are_asked_for(asked, dims, device):
    """In products of queries, keys and a dim: scores, the weights' gradient but for the value's, and each gradient."""
    g = {"q": rand(2, 5, 8, device=device), "k": rand(2, 7, 8, device=device), "v": rand(2, 7, 8, device=device)}
    g["b"] = rand(5, 7, device=device)
    for name, each in g.items():
        each.requires_grad_(name in asked)
    found, _ = count(lambda: fused_softmax.attention(g["q"], g["k"], g["v"], bias=g["b"]))
    assert found[1] == 2 * 2 * 5 * 7 * 8 * dims


def test_softmax_and_a_loss_of_logits_count_nothing(device):
    x, t = rand(4, 9, device=device), torch.arange(4, device=device)
    for call in (lambda: fused_softmax.softmax(x), lambda: fused_softmax.cross_entropy(x, t)):
        assert sum(count(call)[0]) == 0


def test_a_counter_that_was_there_first_counts_too():
    """The operators are registered with the first public name that is used, which may be within the counter."""
    script = """
import torch
import fused_softmax
from torch.utils.flop_counter import FlopCounterMode
with FlopCounterMode(display=False) as counter:
    fused_softmax.attention
    q = torch.empty(1, 2, 5, 8, device="meta")
    torch.ops.fused_softmax.attention(q, q, q, None, None, None, None, 1.0)
assert counter.get_total_flops() == 2 * 2 * 5 * 5 * 16, counter.get_total_flops()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.gpu
def test_in_16_bits_on_a_gpu_cudnn_and_the_kernels_count_alike():
    q = rand(2, 4, 256, 64, device="cuda", dtype=torch.bfloat16)
    forward = sdpa_flop_count(q.shape, q.shape, q.shape)
    backward = sdpa_backward_flop_count(q.shape, q.shape, q.shape, q.shape)
    for deterministic in (False, True):
        # One leaf for three arguments: their gradients are asked for one by one.
        found, _ = count(
            lambda deterministic=deterministic: fused_softmax.attention(q, q, q, deterministic=deterministic)
        )
        assert found == [forward, backward]


@pytest.mark.gpu
def test_a_linear_loss_in_float16_counts_its_logits_twice():
    """What scales the loss is known in the backward pass alone, which makes the logits again."""
    g, target = layer("cuda", torch.float16)
    found, _ = count(lambda: fused_softmax.linear_cross_entropy(g["x"], g["w"], target))
    assert found == [PRODUCT, 3 * PRODUCT]
