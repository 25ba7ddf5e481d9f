"""Rows in shards over eight ranks, and over meshes of 2 x 4: what other tests ask of up to four."""

import pytest
import torch
from disorder import LOSSES, SOFTMAXES, cases, check
from ranks import pool
from sharded import N_CLASSES, N_ROWS, WAYS, close, differentiated, flat, logits, same_on_all
from test_peers import COLUMNS, PART_COLS, TARGETS, of_one, wide
from test_peers import losses as losses_by_peers
from test_peers import over_shapes as shapes_by_peers
from test_peers import softmaxes as softmaxes_by_peers
from test_peers_gathered import weighted_losses
from test_shards import SCORED, softmaxes, whole_softmaxes
from test_shards_dtensor import linear_of_dtensor, of_dtensor, whole
from test_shards_in_disorder import by_a_collective
from test_shards_linear import linear_losses
from test_shards_losses import losses
from test_shards_sampling import SEEDS, alone, drawn, rows, this_process_goes_on_as_before  # noqa: F401
from torch.distributed.tensor import Replicate, Shard

import fused_softmax

N = 8
TARGET = torch.tensor([0, 36, 4, 5, 6, -100, 24, 25, 15])  # at the first and last columns of shards


@pytest.fixture(scope="module")
def eight():
    with pool(N) as found:
        yield found


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_softmaxes(eight, name, way):
    dy = logits(seed=1) if name != "logsumexp" else logits(1, N_ROWS, seed=1)[0]
    found = eight.values(N, softmaxes, way, name, logits().float(), 1, torch.float32, SCORED["scale"], dy)
    y, dx, *_ = whole_softmaxes(name, logits().float(), 1, SCORED["scale"], dy)
    close(same_on_all([each[:1] for each in found])[0] if y.ndim == 1 else torch.cat([each[0] for each in found], 1), y)
    close(torch.cat([each[1] for each in found], 1), dx)


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1, "return_token_stats": True}], ids=["plain", "more"])
def test_losses(eight, options, way):
    found = eight.values(N, losses, way, logits().float(), TARGET, torch.linspace(0.2, 2, N_CLASSES), options)
    x = logits().float().double().requires_grad_()
    weight = torch.linspace(0.2, 2, N_CLASSES).double()
    *wanted, dx = differentiated(fused_softmax.cross_entropy(x, TARGET, weight, **options), x, 1.0)
    for ours, truth in zip(same_on_all([each[:-1] for each in found]), wanted, strict=True):
        close(ours, truth)
    close(torch.cat([each[-1] for each in found], 1), dx)


@pytest.mark.parametrize("way", WAYS)
def test_a_linear_layers_loss(eight, way):
    x, w = logits(N_ROWS, 6, seed=5).float() / 3, logits(N_CLASSES, 6, seed=6).float() / 3
    found = eight.values(N, linear_losses, way, x, w, None, TARGET, None, {"chunk_size": 5})
    inputs = [each.double().requires_grad_() for each in (x, w)]
    y = fused_softmax.linear_cross_entropy(*inputs, TARGET)
    dx, dw = torch.autograd.grad(y, inputs, torch.tensor(0.5).double())  # as linear_losses has it
    close(same_on_all([each[0] for each in found])[0], flat(y)[0])
    close(same_on_all([each[1][:1] for each in found])[0], dx)
    close(torch.cat([each[1][1] for each in found]), dw)


@pytest.mark.parametrize("way", WAYS)
def test_tokens_are_those_of_one_process(eight, way):
    options = SEEDS | {"top_p": 0.8}
    found = same_on_all(eight.values(N, drawn, way, rows(), options))
    for ours, truth in zip(found, alone(None, way, rows(), options), strict=True):
        assert torch.equal(ours, truth)


@pytest.mark.parametrize("name", SOFTMAXES[:2])
def test_softmaxes_by_peers(eight, name):
    x, dy = wide(3).float(), wide(3, seed=1)
    found = eight.values(N, softmaxes_by_peers, name, x, PART_COLS, dy)
    given = x.double().requires_grad_()
    y = getattr(torch, name)(given, 1)
    close(torch.cat([each[0] for each in found], 1), y.detach())
    close(torch.cat([each[1] for each in found], 1), torch.autograd.grad(y, given, dy)[0])


@pytest.mark.parametrize("options", [{}, {"reduction": "none", "softcap": 4.0}, {"label_smoothing": 0.1}], ids=str)
def test_losses_by_peers(eight, options):
    """In one launch, and by an exchange of its own."""
    x, target = wide().float(), torch.tensor(TARGETS)
    if options.get("label_smoothing"):
        weight = torch.linspace(0.2, 2, COLUMNS)
        found = eight.values(N, weighted_losses, x, target, weight, options)
        y, dx = of_one(x, target, options | {"weight": weight.double()})
    else:
        found = eight.values(N, losses_by_peers, x, target, PART_COLS, options)
        y, dx = of_one(x, target, options)
    close(same_on_all([each[:1] for each in found])[0], y)
    close(torch.cat([each[1] for each in found], 1), dx)


def test_launches_over_changing_shapes_by_peers(eight):
    found = eight.values(N, shapes_by_peers, N)
    assert max(float(each[0]) for each in found) < 1e-5
    same_on_all([each[1:] for each in found])


def test_calls_of_which_some_are_wrong_on_one_rank(eight):
    asked = list(cases(40, 12, (*SOFTMAXES, *LOSSES, "sample"), 1, N))
    check(eight.values(N, by_a_collective, "torch", asked), 40, 12)


MESHES = [
    ((8,), [Shard(1)]), ((2, 4), [Shard(0), Shard(1)]), ((2, 4), [Shard(1), Shard(0)]),
    ((2, 4), [Replicate(), Shard(1)]), ((2, 4), [Shard(1), Shard(1)]), ((4, 2), [Shard(0), Shard(1)]),
]  # fmt: skip


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(("mesh", "placements"), MESHES, ids=str)
def test_losses_of_dtensors(eight, mesh, placements, way):
    x, target = logits(6, 13).float(), torch.tensor([0, 12, 3, -100, 5, 9])
    options = {"label_smoothing": 0.1}
    y, dx = whole(torch.nn.functional.cross_entropy, x, target, None, options)
    for ours, of_x, _, placed, _ in eight.values(
        N, of_dtensor, way, fused_softmax.cross_entropy, mesh, placements, x, target, None, options
    ):
        close(ours, y)
        close(of_x, dx)
        assert list(placed) == placements


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("of_x", [[Shard(0), Replicate()], [Replicate(), Replicate()]], ids=str)
def test_a_linear_layers_loss_of_dtensors(eight, of_x, way):
    """Over a mesh of 2 x 4, with the classes over its second dim."""
    x, w, bias = logits(6, 6, seed=5).float() / 3, logits(13, 6, seed=6).float() / 3, torch.linspace(-1, 1, 13)
    target, options = torch.tensor([0, 12, 3, -100, 5, 9]), {"chunk_size": 2}
    inputs = [each.double().requires_grad_() for each in (x, w, bias)]
    y = fused_softmax.linear_cross_entropy(*inputs[:2], target, linear_bias=inputs[2])
    wanted = [y.detach(), *torch.autograd.grad(y, inputs)]
    of_w = [Replicate(), Shard(0)]
    for found, *_ in eight.values(N, linear_of_dtensor, way, (2, 4), of_x, of_w, x, w, bias, target, None, options):
        for ours, truth in zip(found, wanted, strict=True):
            close(ours, truth)
