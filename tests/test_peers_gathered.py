"""What ranks tell each other by peers in a launch of its own, where none that reads their columns merges too."""

import pytest
import torch
import torch.distributed as dist
from peered import PART_COLS, in_parts, loss, over, wide_shard
from products import pairwise
from sharded import close, differentiated, logits, same_on_all
from test_peers import COLUMNS, TARGETS, losses, of_one, softmaxes, wide
from test_peers_waits import be_impatient, on_two
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import Shard, distribute_tensor
from torch.distributed.tensor.parallel import loss_parallel

import fused_softmax
from fused_softmax import linear_cross_entropy, logsumexp
from fused_softmax.ops.losses.over_ranks import dtensor as loss_on_shards
from fused_softmax.ranks import gather as gather_peers
from fused_softmax.ranks import peers
from fused_softmax.ranks.gather import told_by
from fused_softmax.ranks.groups import Shards, gather

LOSSES = {
    "weights": {"weighted": True}, "smoothing": {"label_smoothing": 0.1}, "statistics": {"return_token_stats": True},
    "scale of 0": {"scale": 0.0, "reduction": "none"},
    "all": {
        "weighted": True, "label_smoothing": 0.2, "softcap": 5.0, "scale": 1.2, "lse_square_scale": 0.02,
        "return_z_loss": True, "return_lse": True, "return_token_stats": True,
    },
}  # fmt: skip


def weighted_losses(group, x, target, weight, options):
    options = options | ({} if weight is None else {"weight": wide_shard(weight, group)})
    return losses(group, x, target, PART_COLS, options)


@pairwise()
@pytest.mark.parametrize("n", [1, 2, 3, 4])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize("options", LOSSES)
def test_losses_are_those_of_one_process(ranks, options, dtype, n):
    options = dict(LOSSES[options])
    x, target = wide().to(dtype), torch.tensor(TARGETS)
    weight = torch.linspace(0.2, 2, COLUMNS) if options.pop("weighted", False) else None
    found = ranks.values(n, weighted_losses, x, target, weight, options)
    *wanted, dx = of_one(x, target, options | ({} if weight is None else {"weight": weight.double()}))
    for ours, truth in zip(same_on_all([each[:-1] for each in found]), wanted, strict=True):
        close(ours, truth)
    close(torch.cat([each[-1] for each in found], 1), dx)


SCORES = {
    "scale": {"scale": 0.5}, "sink": {"sink": 1.5}, "masked rows": {"masked_rows": "zero"},
    "fp64": {"dtype": torch.float64},
}  # fmt: skip


def scored(group, name, x, mask, dy, options):
    in_parts()
    given = wide_shard(x, group).requires_grad_()
    mask = None if mask is None else wide_shard(mask, group)
    y = getattr(fused_softmax, name)(given, 1, mask=mask, **options, **over(group, given.shape[1]))
    dy = dy if name == "logsumexp" else wide_shard(dy, group)
    (dx,) = torch.autograd.grad(y, [given], dy.to(y.dtype))
    return y.detach(), dx


@pairwise()
@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("options", SCORES)
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
def test_softmaxes_of_scores_are_those_of_one_process(ranks, name, options, masked, n):
    options = {key: each for key, each in SCORES[options].items() if (name, key) != ("logsumexp", "dtype")}
    x, dy = wide(3).float(), wide(3, seed=1)
    dy = dy[:, 0] if name == "logsumexp" else dy
    mask = wide(3, seed=2) > -2 if masked else None
    found = ranks.values(n, scored, name, x, mask, dy, options)
    whole = x.double().requires_grad_()
    wanted = getattr(fused_softmax, name)(whole, 1, mask=mask, **options)
    wanted.backward(dy)
    y = same_on_all([each[:1] for each in found])[0] if name == "logsumexp" else torch.cat([f[0] for f in found], 1)
    close(y, wanted.detach())
    close(torch.cat([each[1] for each in found], 1), whole.grad)


def over_dim_0(group, x):
    in_parts()
    given = wide_shard(x, group).t().contiguous()
    of = over(group, len(given))
    return fused_softmax.softmax(given, 0, **of), logsumexp(given, 0, **of)


@pytest.mark.exhaustive
def test_columns_of_another_dim_than_the_last(ranks):
    x = wide(600).float()  # more than a program tells
    found = ranks.values(2, over_dim_0, x)
    close(torch.cat([each[0] for each in found]), torch.softmax(x.double(), 1).t())
    close(same_on_all([each[1:] for each in found])[0], torch.logsumexp(x.double(), 1))


def of_a_linear_layer(group, x, w, target):
    in_parts()
    x, w = x.clone().requires_grad_(), wide_shard(w.t(), group).t().contiguous().requires_grad_()
    y = linear_cross_entropy(x, w, target, chunk_size=5, **over(group, len(w)))
    return y.detach(), *torch.autograd.grad(y, [x, w])


def test_a_linear_layers_loss(ranks):
    x, w, target = logits(8, 6, 5).float() / 3, logits(COLUMNS, 6, 6).float() / 3, torch.tensor(TARGETS)
    found = ranks.values(3, of_a_linear_layer, x, w, target)
    whole = [each.double().requires_grad_() for each in (x, w)]
    wanted = linear_cross_entropy(*whole, target)
    dx, dw = torch.autograd.grad(wanted, whole)
    y, ours = same_on_all([each[:2] for each in found])
    close(y, wanted.detach())
    close(ours, dx)
    close(torch.cat([each[2] for each in found]), dw)


def backend_of(group, name):
    """Whether the group's backend was asked to gather anything but what ranks compare."""
    in_parts()
    asked = []
    before, gather_peers._prepare = gather_peers._prepare, lambda *given: asked.append(given) or before(*given)
    try:
        given = wide_shard(wide(2).float(), group).requires_grad_()
        y = getattr(fused_softmax, name)(given, 1, **over(group, given.shape[1]))
        y.sum().backward()
    finally:
        gather_peers._prepare = before
    return len(asked)


def test_a_softmax_of_one_launch_gathers_for_its_gradient_alone(ranks):
    for name in ("softmax", "logsumexp"):
        assert ranks.values(2, backend_of, name) == [1, 1]


def told(group, message, digest=None):
    memory = peers.known(group, torch.device("cpu"))
    memory.ready("logsumexp")
    shards = Shards(group, dist.get_rank(group), (5, 5), 10, digest)
    return gather(message, told_by(memory, "logsumexp", shards))


def missed(group, odd):
    """What a rank hears where the other has not come, or has asked for something else; and what it is told then."""
    in_parts(None)
    be_impatient(group, 1.0)
    message, rank = torch.arange(6.0).view(2, 3) + 10 * dist.get_rank(group), dist.get_rank(group)
    together = told(group, message)
    if odd == "absent" and rank:
        return together, None, None
    heard = told(group, message, rank if odd == "digest" else None)
    try:
        told(group, message)
    except RuntimeError as error:
        return together, heard, str(error)


@pytest.mark.parametrize("odd", ["absent", "digest"])
def test_what_a_rank_does_not_say_is_nan_and_then_an_error(ranks, odd):
    found = ranks.values(4, on_two, missed, odd)[: 1 if odd == "absent" else 2]
    for rank, (together, heard, said) in enumerate(found):
        assert together.equal(torch.stack([torch.arange(6.0), torch.arange(10.0, 16.0)]).view(2, 2, 3))
        assert heard[1 - rank].isnan().all()
        assert heard[rank].equal(together[rank])
        differed = "refused its call, got NaN before, or differed in "
        what = {"absent": "has told nothing of row 0 in 1 s", "digest": differed}[odd]
        assert said.startswith(f"logsumexp: an earlier call gave NaN, because rank {1 - rank} {what}")


def over_shapes(group, seed):
    """Launches of other rows, numbers and operations, one after the other, of which none reset anything."""
    in_parts()
    generator, worst = torch.Generator().manual_seed(seed), 0.0
    for i in range(7):
        rows = int(torch.randint(1, 120, (), generator=generator))
        x, target = logits(rows, COLUMNS, i), torch.arange(rows) * 100 % COLUMNS
        if i % 3:
            given = wide_shard(x.float(), group)
            y = logsumexp(given, 1, **over(group, given.shape[1]))
            worst = max(worst, float((y - torch.logsumexp(x, 1)).abs().amax()))
        else:
            given = wide_shard(x.float(), group).requires_grad_()
            y, _ = differentiated(loss(given, target, group, label_smoothing=0.1, reduction="sum"), given, 1.0)
            wanted = torch.nn.functional.cross_entropy(x, target, label_smoothing=0.1, reduction="sum")
            worst = max(worst, float((y - wanted).abs() / wanted))
    return worst


@pytest.mark.exhaustive
def test_launches_over_changing_shapes(ranks):
    assert max(ranks.values(3, over_shapes, 1)) < 1e-5


def of_a_dtensor(group, x, target, options):
    """On GPUs a DTensor's ranks choose peers where they can; on CPUs they have to be told."""
    in_parts()
    chosen, found = loss_on_shards.peers_of, []
    loss_on_shards.peers_of = lambda name, transport, *rest: chosen(name, "peer", *rest)
    try:
        mesh = DeviceMesh.from_group(group, "cpu")
        for _ in range(2):  # the second is found
            given = distribute_tensor(x, mesh, [Shard(1)], src_data_rank=None).requires_grad_()
            with fused_softmax.enabled(), loss_parallel():
                y = torch.nn.functional.cross_entropy(given, target, **options)
                y.backward()
            # With torch 2.11 the gradient of uneven shards is whole on every rank.
            mine = given.grad.redistribute(placements=given.placements)
            found.append((y.to_local().detach(), mine.to_local()))
    finally:
        loss_on_shards.peers_of = chosen
    assert all(a.equal(b) for a, b in zip(*found, strict=True))
    return found[0]


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}, {"reduction": "sum"}], ids=str)
def test_dtensors(ranks, options):
    x, target = wide().float(), torch.tensor(TARGETS)
    found = ranks.values(3, of_a_dtensor, x, target, options)
    y, dx = of_one(x, target, options)
    close(same_on_all([each[:1] for each in found])[0], y)
    close(torch.cat([each[1] for each in found], 1), dx / 0.5)


def of_dtensors(group, given, options):
    return [of_a_dtensor(group, x, target, options) for x, target in given]


@pytest.mark.parametrize(
    ("dtype", "options"),
    [(torch.float32, {}), (torch.float32, {"label_smoothing": 0.1}), (torch.float16, {})],
    ids=["one launch", "gathered", "states"],
)
def test_dtensors_of_other_class_counts(ranks, dtype, options):
    """Of as many rows, so that only the classes tell the calls apart: of some ranks the shards are alike, too."""
    rows_of = {n: logits(2, n, n).to(dtype) for n in (9, 8, 4)}  # shards of 3, 3, 3; 3, 3, 2; 2, 2, 0
    given = [(rows_of[n], torch.tensor([0, n - 1])) for n in (9, 8, 4, 9)]
    found = ranks.values(3, of_dtensors, given, options)
    tolerance = max(torch.finfo(dtype).eps, 1e-5)
    for (x, target), *of_ranks in zip(given, *found, strict=True):
        y, dx = of_one(x, target, options)
        close(same_on_all([each[:1] for each in of_ranks])[0], y, tolerance)
        close(torch.cat([each[1] for each in of_ranks], 1), dx / 0.5, tolerance)


def test_softmaxes_of_float64(ranks):
    x, dy = wide(3), wide(3, seed=1)
    found = ranks.values(2, softmaxes, "softmax", x, PART_COLS, dy)
    whole = x.clone().requires_grad_()
    wanted = torch.softmax(whole, 1)
    wanted.backward(dy)
    close(torch.cat([each[0] for each in found], 1), wanted.detach(), 1e-12)
    close(torch.cat([each[1] for each in found], 1), whole.grad, 1e-12)


@pytest.mark.parametrize(("n", "sets_up"), [(2, True), (4, True), (8, False)])
def test_a_call_that_names_no_transport_goes_by_peers_between_up_to_four_gpus(monkeypatch, n, sets_up):
    group, asked = object(), []
    monkeypatch.setattr(peers.dist, "get_world_size", lambda group: n)
    monkeypatch.setattr(peers, "_refuse_capture", lambda device: None)
    monkeypatch.setattr(peers, "_groups", {})
    monkeypatch.setattr(peers, "_set_up", lambda group, device: asked.append(device) or "nothing is mapped here")
    device = torch.device("cuda", 0)
    assert peers.choose("softmax", None, group, device, None) is None
    assert bool(asked) == sets_up
    with pytest.raises(ValueError, match="softmax: transport='peer' cannot take this call: nothing is mapped here"):
        peers.choose("softmax", "peer", group, device, None)
