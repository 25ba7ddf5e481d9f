"""512 rows, shuffled and in batches of 1 to 512: each has the same bits of result and gradient as among all."""

import pytest
import torch
from conftest import kernels, peaked

from fused_softmax import divergence, linear_divergence, linear_log_prob, log_prob

pytestmark = kernels
FP32, BF16 = torch.float32, torch.bfloat16
ROWS, CLASSES, FEATURES = 512, 43, 16
KINDS = ("kl", "reverse_kl", "jsd", "tvd")
every_function = pytest.mark.parametrize("function", ["log_prob", *KINDS])


def batches():
    """Of the shuffled rows all at once, and some batches of other sizes. The last batch of 7 has one row."""
    order = torch.randperm(ROWS, generator=torch.Generator().manual_seed(0))
    return [order, *order.split(64)[::4], *order.split(7)[1::8], *order.split(1)[::32]]


def of_rows(device):
    """(targets, every seventh of them ignored; temperatures; gradients of two results)"""
    target = torch.arange(ROWS, device=device) * 5 % CLASSES
    target[::7] = -100
    g = torch.randn(2, ROWS, generator=torch.Generator().manual_seed(1)).to(device)
    return target, torch.linspace(0.5, 2.0, ROWS, device=device), g


def results_of(found, leaf, g):
    found = found if isinstance(found, tuple) else (found,)
    return [each.detach() for each in found], torch.autograd.grad(found, leaf, list(g[: len(found)]))


def assert_same_bits(of):
    wanted = [each for part in of(torch.arange(ROWS)) for each in part]
    for rows in batches():
        for found, all_of_them in zip([each for part in of(rows) for each in part], wanted, strict=True):
            assert torch.equal(found, all_of_them[rows.to(found.device)])


@every_function
@pytest.mark.parametrize("dtype", [FP32, BF16], ids=str)
def test_rows_of_logits(function, dtype, device):
    x, y = (peaked(ROWS, CLASSES, seed=seed).to(dtype).to(device) for seed in (0, 1))
    target, temperature, g = of_rows(device)

    def of(rows):
        leaf, options = x[rows].requires_grad_(), {"temperature": temperature[rows]}
        if function == "log_prob":
            return results_of(log_prob(leaf, target[rows], return_entropy=True, **options)[:2], leaf, g[:, rows])
        found = divergence(leaf, y[rows], kind=function, reduction="none", **options)
        return results_of(found, leaf, g[:, rows])

    assert_same_bits(of)


def linear(function, layers, rows, device, **how):
    """The function's results of these rows, with their hidden states as the leaf, and what their gradient is of."""
    (x, w), (h, v), (target, temperature, g) = *layers, of_rows(device)
    leaf, options = x[rows].requires_grad_(), {"temperature": temperature[rows], **how}
    if function == "log_prob":
        found = linear_log_prob(leaf, w, target[rows], return_entropy=True, logits="recompute", **options)[:2]
    else:
        found = linear_divergence(leaf, w, h[rows], v, kind=function, reduction="none", **options)
    return found, leaf, g[:, rows]


@every_function
def test_rows_of_linear_functions_whose_products_are_equal(function, device):
    """Whole numbers, whose product is exact in any order. The gradient's is of fractions."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randint(-3, 4, (n, FEATURES), generator=generator) for n in (ROWS, CLASSES) * 2]
    x, w, h, v = (each.to(device, FP32) for each in made)

    def of(rows):
        found, _, _ = linear(function, ((x, w), (h, v)), rows, device)
        return ([each.detach() for each in (found if isinstance(found, tuple) else (found,))],)

    assert_same_bits(of)


@pytest.mark.parametrize("function", ["log_prob", "jsd"])
def test_rows_of_linear_functions_by_chunks_of_one(function, device):
    """All products are of one row, in any batch: those of the logits, and those of the hidden states' gradient."""
    generator = torch.Generator().manual_seed(0)
    made = [torch.randn(n, FEATURES, generator=generator) for n in (ROWS, CLASSES) * 2]
    x, w, h, v = (each.to(device) for each in made)
    assert_same_bits(lambda rows: results_of(*linear(function, ((x, w), (h, v)), rows, device, chunk_size=1)))
