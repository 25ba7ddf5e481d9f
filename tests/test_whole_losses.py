"""Losses of few long rows, which one launch counts, writes with their gradient, and sums."""

import os

import pytest
import torch
from conftest import peaked

from fused_softmax import cross_entropy
from fused_softmax.ops.losses import launches as losses
from fused_softmax.ops.losses.launches import Given, is_whole, plan_forward, prepare_losses
from fused_softmax.ops.losses.options import Loss
from fused_softmax.ops.losses.sums import finish

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
pytestmark = pytest.mark.skipif(
    not INTERPRETED and not torch.cuda.is_available(), reason="without a GPU or the interpreter, CPU tensors take ATen"
)
OPTIONS = {
    "plain": {}, "sum": {"reduction": "sum"}, "smoothing": {"label_smoothing": 0.2},
    "weight": {"weight": torch.linspace(0.5, 2.0, 20000)},
    "smoothing, weight": {"label_smoothing": 0.2, "weight": torch.linspace(0.5, 2.0, 20000)},
}  # fmt: skip


def moved(options, n_classes, device):
    return {name: v[:n_classes].to(device) if isinstance(v, torch.Tensor) else v for name, v in options.items()}


@pytest.mark.parametrize("options", OPTIONS)
@pytest.mark.parametrize(("n_rows", "n_classes"), [(1, 20000), (5, 9001), (33, 1600)], ids=str)
def test_loss_and_gradients_are_torchs(n_rows, n_classes, options, device, nvidia):
    """By 32 targets a program and by 256, of split rows and of whole ones; a second backward counts them anew."""
    x, target = peaked(n_rows, n_classes).to(device), (torch.arange(n_rows, device=device) * 7 + 3) % n_classes
    target[1::4] = -100
    options = moved(OPTIONS[options], n_classes, device)
    ours, theirs = x.clone().requires_grad_(), x.double().requires_grad_()
    loss = cross_entropy(ours, target, **options)
    of_torch = {name: v.double() if isinstance(v, torch.Tensor) else v for name, v in options.items()}
    truth = torch.nn.functional.cross_entropy(theirs, target, **of_torch)
    torch.testing.assert_close(loss.double(), truth, rtol=1e-6, atol=1e-6)
    (wanted,) = torch.autograd.grad(truth, theirs)
    for factor in (1.0, -0.5):
        (found,) = torch.autograd.grad(loss, ours, torch.full_like(loss, factor), retain_graph=True)
        torch.testing.assert_close(found.double(), factor * wanted, rtol=1e-5, atol=1e-7)


def test_one_launch_does_it_all(device, nvidia):
    x, target = peaked(3, 20000).to(device), torch.tensor([5, -100, 19999], device=device)
    loss, dx = Loss(), torch.empty_like(x)
    assert is_whole(plan_forward(x, dx, loss), dx, loss)
    prepared = prepare_losses(Given(x, dx, target), loss, None, None, False, torch.float32)
    rows = prepared(Given(x, dx, target), loss.numbers)
    exact = x.double().requires_grad_()
    truth = torch.nn.functional.cross_entropy(exact, target)
    torch.testing.assert_close(rows.result.double(), truth, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(dx.double(), torch.autograd.grad(truth, exact)[0], rtol=1e-5, atol=1e-8)


def test_the_ticket_is_back_at_the_start(device, nvidia, monkeypatch):
    """So that the next launch on the stream draws the first one again, whatever its rows."""
    drawn = []

    def ticket(index):
        drawn.append(torch.zeros(1, dtype=torch.int64, device=device) if not drawn else drawn[0])
        return drawn[0]

    monkeypatch.setattr(losses, "ticket_of", ticket)
    for n_rows in (3, 7, 1):
        x = peaked(n_rows, 20000).to(device).requires_grad_()
        target = torch.arange(n_rows, device=device)
        loss = cross_entropy(x, target)
        torch.testing.assert_close(loss, torch.nn.functional.cross_entropy(x.detach(), target), rtol=1e-6, atol=1e-6)
        assert drawn[0].item() == 0


@pytest.mark.parametrize("with_z", [False, True], ids=["", "z"])
@pytest.mark.parametrize(("n_rows", "parts"), [(8192, 1), (8193, 1), (4100, 3), (300_000, 1)])
def test_the_losses_of_many_rows_are_added_by_many_programs(n_rows, parts, with_z, device):
    """And of few rows by one. The ticket is back at the start, so that the next launch gives the same."""
    loss, generator = Loss(reduction="mean"), torch.Generator().manual_seed(1)
    values = torch.rand(n_rows, parts, generator=generator).to(device)
    z = torch.rand(n_rows, generator=generator).to(device) if with_z else None
    totals = torch.tensor([[2.0, 6.0], [1.0, 3.0]], device=device)
    for _ in range(2):
        y, of_z = finish(losses.LossRows(None, None, values, z), totals, loss, torch.float32)
        truth = values.double().sum() / 8
        if z is not None:
            torch.testing.assert_close(of_z.double(), z.double().sum() / 4, rtol=1e-6, atol=0)
            truth += z.double().sum() / 4
        torch.testing.assert_close(y.double(), truth, rtol=1e-6, atol=0)


@pytest.mark.parametrize(
    ("target", "expected"), [([-100, -100], float("nan")), ([3, 20000], float("nan")), ([3, -1], float("nan"))]
)
def test_no_target_and_wrong_ones(target, expected, device, nvidia):
    x = peaked(2, 20000).to(device).requires_grad_()
    loss = cross_entropy(x, torch.tensor(target, device=device))
    torch.testing.assert_close(loss.item(), expected, equal_nan=True)


def test_more_rows_than_a_program_counts_go_another_way(device):
    loss = Loss()
    x = torch.empty(1, 1, device=device).expand(1025, 20000)
    assert not is_whole(plan_forward(x, x, loss), x, loss)
    assert not is_whole(plan_forward(x[:4], None, loss), None, loss)
    few = plan_forward(x[:4], x[:4], loss)
    assert is_whole(few, x, loss)
    assert not is_whole(few, x, Loss(reduction="none"))
    assert not is_whole(few, x, Loss(lse_square_scale=0.1))


@pytest.mark.skipif(not torch.cuda.is_available() or INTERPRETED, reason="no GPU")
def test_in_a_graph_and_on_two_streams_it_has_the_same_bits():
    x = peaked(64, 128256, torch.bfloat16).cuda()
    target = torch.arange(64, device="cuda") * 99
    leaf = x.clone().requires_grad_()

    def run():
        loss = cross_entropy(leaf, target)
        return loss.detach(), torch.autograd.grad(loss, leaf)[0]

    wanted = [each.clone() for each in run()]
    streams = [torch.cuda.Stream(), torch.cuda.Stream()]
    torch.cuda.synchronize()
    found = []
    for i in range(200):
        with torch.cuda.stream(streams[i % 2]):
            found.append(run()[0])
    torch.cuda.synchronize()
    assert all(torch.equal(each, wanted[0]) for each in found)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = run()
    for _ in range(50):
        graph.replay()
    torch.cuda.synchronize()
    assert all(torch.equal(a, b) for a, b in zip(captured, wanted, strict=True))
