"""GPUs that write into each other's memory, against float64: results, graphs, very many launches, a rank's end.

Tests run on 2, 4 and 8 GPUs, as far as they are there: `-k 4ranks` takes those on 4.
`python tests/test_peers_gpus.py 100000 --ranks 4` makes that many launches; the test makes fewer.
"""

import argparse
import contextlib
import itertools
import os
import random
import signal
import tempfile
import time
from datetime import timedelta
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from disorder import LOSSES as OF_LOSSES
from disorder import SOFTMAXES, cases, check, outcomes
from ranks import Raised, Ranks
from sharded import close, differentiated, same_on_all

import fused_softmax
from fused_softmax import cross_entropy, linear_cross_entropy, logsumexp, softmax
from fused_softmax.ranks import groups as distributed
from fused_softmax.ranks.groups import TRANSPORTS

SECONDS = 30  # of the groups' timeout
COLUMNS = 5121
SIZES = {2: (3001, 2120), 4: (1501, 0, 1, 3619), 8: (700, 1, 0, 1420, 513, 64, 2000, 423)}  # of each GPU
HERE = [n for n in SIZES if n <= torch.cuda.device_count()]
KILLED = 1  # a rank

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not HERE, reason="it takes two GPUs")]


def serve(n, rank, directory, pipe):
    """A rank of NCCL, on a GPU of its own: as `ranks._serve`."""
    torch.cuda.set_device(rank)
    store, waits = dist.FileStore(str(directory / "store"), n), timedelta(seconds=SECONDS)
    device = torch.device("cuda", rank)
    dist.init_process_group("nccl", store=store, rank=rank, world_size=n, timeout=waits, device_id=device)
    while (asked := pipe.recv()) is not None:
        _, function, args, _ = asked
        try:
            pipe.send(function(dist.group.WORLD, *args))
        except Exception as error:
            pipe.send(Raised(type(error).__name__, str(error), str(error)))
    os._exit(0)  # NCCL's own end waits for ranks that may be gone


@contextlib.contextmanager
def pool(n):
    with tempfile.TemporaryDirectory() as directory:
        found = Ranks(Path(directory), n, partial(serve, n))
        try:
            yield found
        finally:
            found.close()


@pytest.fixture(scope="module", params=HERE, ids="{}ranks".format)
def n(request):
    return request.param


@pytest.fixture(scope="module")
def gpus(n):
    """gpus(function, *args): what a function of the group and these gives on each rank."""
    with pool(n) as found:
        yield partial(found.values, n)


def logits(rows, columns, seed=0, dtype=torch.float32):
    """The same on every rank; peaked, and each with a column that stands far above the others."""
    generator = torch.Generator("cuda").manual_seed(seed)
    x = 3 * torch.randn(rows, columns, generator=generator, device="cuda")
    x[torch.arange(rows), torch.arange(rows) * 7919 % columns] += 12
    return x.to(dtype)


def mine(whole, group, sizes=None):
    rank, sizes = group.rank(), sizes or SIZES[group.size()]
    return whole.narrow(-1, sum(sizes[:rank]), sizes[rank]).clone()


def over(group, transport, sizes=None):
    return {"group": group, "transport": transport, "shard_sizes": sizes or SIZES[group.size()]}


def targets(rows, columns):
    target = torch.arange(rows, device="cuda") * 104729 % columns
    target[0], target[-1] = 0, columns - 1
    return target


def on_host(found):
    return [each.detach().cpu() for each in found]


LOSSES = {
    "mean": {}, "sum": {"reduction": "sum"}, "none": {"reduction": "none"}, "softcap": {"softcap": 8.0},
    "z-loss and lse": {"lse_square_scale": 0.01, "return_z_loss": True, "return_lse": True},
    "weights": {"weighted": True}, "smoothing": {"label_smoothing": 0.1}, "statistics": {"return_token_stats": True},
    "all": {
        "weighted": True, "label_smoothing": 0.1, "scale": 0.7, "lse_square_scale": 0.02, "return_lse": True,
        "return_token_stats": True,
    },
}  # fmt: skip


def losses(group, name, transport, dtype):
    """(results on this GPU, and as far as they go those of float64; dx, and float64's)"""
    options = dict(LOSSES[name])
    x, target = logits(70, COLUMNS, dtype=dtype), targets(70, COLUMNS)
    target[5] = -100
    weight = torch.linspace(0.2, 2, COLUMNS, device="cuda") if options.pop("weighted", False) else None
    given = mine(x, group).requires_grad_()
    own_weight = None if weight is None else mine(weight, group)
    options |= {"dtype": torch.float32}
    for _ in range(2):  # the second is found
        y = cross_entropy(given, target, own_weight, **options, **over(group, transport))
        *results, dx = differentiated(y, given, 1.0)
    whole = x.double().cpu().requires_grad_()
    del options["dtype"]
    y = cross_entropy(whole, target.cpu(), None if weight is None else weight.double().cpu(), **options)
    *wanted, of_whole = differentiated(y, whole, 1.0)
    return on_host(results), on_host(wanted), dx.cpu(), mine(of_whole, group)


@pytest.mark.parametrize("name", LOSSES)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_losses(gpus, transport, name):
    dtype = torch.bfloat16 if name in ("mean", "weights") else torch.float32
    found = gpus(losses, name, transport, dtype)
    same_on_all([each[0] for each in found])
    for results, wanted, dx, of_whole in found:
        for ours, truth in zip(results, wanted, strict=True):
            close(ours, truth, 1e-4)  # of an entropy too, which is a difference of logits
        torch.testing.assert_close(dx.double(), of_whole, rtol=2 * torch.finfo(dtype).eps + 1e-5, atol=1e-7)


def mean_of(group, transport, dtype):
    """A mean over shards of which some begin on 16 bytes and some do not, and some have a column."""
    sizes = (COLUMNS - 2 * (group.size() - 1) + 1, 1, *[2] * (group.size() - 2))
    given = mine(logits(70, COLUMNS, dtype=dtype), group, sizes).requires_grad_()
    return on_host([cross_entropy(given, targets(70, COLUMNS), **over(group, transport, sizes))])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_mean_has_the_same_bits_however_shards_lie(gpus, transport, dtype):
    same_on_all(gpus(mean_of, transport, dtype))


def softmaxes(group, name, transport, options):
    x, dy = logits(40, COLUMNS), logits(40, COLUMNS, 1)
    dy = dy[:, 0] if name == "logsumexp" else dy
    given = mine(x, group).requires_grad_()
    y = getattr(fused_softmax, name)(given, 1, **options, **over(group, transport))
    (dx,) = torch.autograd.grad(y, [given], dy if name == "logsumexp" else mine(dy, group))
    whole = x.double().cpu().requires_grad_()
    wanted = getattr(fused_softmax, name)(whole, 1, **options)
    (of_whole,) = torch.autograd.grad(wanted, [whole], dy.double().cpu())
    wanted = wanted if name == "logsumexp" else mine(wanted, group)
    return on_host([y, wanted, dx, mine(of_whole, group)])


@pytest.mark.parametrize("options", [{}, {"scale": 0.5, "sink": 2.0}], ids=["plain", "scored"])
@pytest.mark.parametrize("name", ["softmax", "log_softmax", "logsumexp"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_softmaxes(gpus, transport, name, options):
    for y, wanted, dx, of_whole in gpus(softmaxes, name, transport, options):
        close(y, wanted)
        close(dx, of_whole, 3e-5)


def log_probs(group, transport, dtype, options):
    """All results of log_prob and, from hidden states, of linear_log_prob, with the gradients of the first three."""
    from test_log_prob import ALL, formula, gradients_like

    rank, sizes, device = group.rank(), SIZES[group.size()], torch.device("cuda", group.rank())
    target = torch.stack((targets(40, COLUMNS), logits(40, COLUMNS).argmax(1)), 1)
    of_rows = torch.linspace(0.5, 2, 40, device=device)
    found, of, options = (
        [],
        over(group, transport),
        options | ({"temperature": of_rows} if "softcap" in options else {}),
    )
    for kind in ("rows", "layer"):
        x = logits(40, COLUMNS, dtype=dtype)
        whole = [x.double().requires_grad_()]
        given = [mine(x, group).requires_grad_()]
        call, of_whole = fused_softmax.log_prob, lambda x: x
        if kind == "layer":
            x, w = logits(40, 256, 1, dtype) / 8, logits(COLUMNS, 256, 2, dtype) / 8
            whole = [x.double().requires_grad_(), w.double().requires_grad_()]
            given = [x.clone().requires_grad_(), w.split(sizes)[rank].clone().requires_grad_()]
            call, of_whole = partial(fused_softmax.linear_log_prob, chunk_size=17), lambda x, w: x @ w.t()
        y = call(*given, target, **options, **ALL, **of)
        wanted = formula(of_whole(*whole), target, **options)
        parts = gradients_like(wanted[:3])
        gradients = torch.autograd.grad(y[:3], given, [each.float() for each in parts])
        of_all = list(torch.autograd.grad(wanted[:3], whole, parts))
        of_all[-1] = mine(of_all[-1], group) if kind == "rows" else of_all[-1].split(sizes)[rank]
        found.append(([*on_host([*y[:3], *y.stats])], on_host(wanted), on_host(gradients), on_host(of_all)))
    return found


@pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "scale": 0.5}], ids=["plain", "options"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_log_probs(gpus, transport, dtype, options):
    near = 1e-4 if dtype == torch.float32 else 2e-2
    for kind, of_ranks in zip(
        ("rows", "layer"), zip(*gpus(log_probs, transport, dtype, options), strict=True), strict=True
    ):
        same_on_all([[*values, *(gradients[:1] if kind == "layer" else [])] for values, _, gradients, _ in of_ranks])
        for values, wanted, gradients, of_whole in of_ranks:
            *values, top = values
            *wanted, best = wanted
            for ours, truth in zip(values, wanted, strict=True):
                close(ours, truth, 1e-4 if kind == "rows" else 10 * near)  # of logits that a layer has rounded
            assert kind == "layer" or top.equal(best)
            for ours, truth in zip(gradients, of_whole, strict=True):
                assert (ours.double() - truth).norm() < near * truth.norm()


def kept_log_probs(group, transport, form):
    """With a set of columns for each row: log-probabilities, entropy and lse, and the gradient of this GPU's logits."""
    x = logits(40, COLUMNS, dtype=torch.bfloat16)
    device = x.device
    target = torch.stack((targets(40, COLUMNS), x.argmax(1)), 1)
    lengths = torch.arange(40) % 7 * 30  # some sets are empty
    ids = torch.cat(
        [torch.randperm(COLUMNS, generator=torch.Generator().manual_seed(i))[:n] for i, n in enumerate(lengths)]
    )
    kept = ids.to(device), torch.nn.functional.pad(lengths.cumsum(0), (1, 0)).to(device)
    if form == "bits":
        rows = torch.arange(40).repeat_interleave(lengths)
        bits = torch.zeros(40, -(-COLUMNS // 32) * 32, dtype=torch.int64)
        bits[rows, ids] = 1
        words = (bits.view(40, -1, 32) << torch.arange(32)).sum(2)
        kept = torch.where(words >= 2**31, words - 2**32, words).int().to(device)
    asked = {"kept": kept, "return_entropy": True, "return_lse": True}
    whole, given = x.double().requires_grad_(), mine(x, group).requires_grad_()
    found = fused_softmax.log_prob(given, target, **asked, **over(group, transport))[:3]
    wanted = fused_softmax.log_prob(whole, target, **asked)[:3]
    of_results = [torch.where(each.isfinite(), each, 0.0).sum() for each in (*found, *wanted)]
    (dx,) = torch.autograd.grad(sum(of_results[:3]), [given])
    (of_whole,) = torch.autograd.grad(sum(of_results[3:]), [whole])
    return on_host(found), on_host(wanted), *on_host([dx, mine(of_whole, group)])


@pytest.mark.parametrize("form", ["lists", "bits"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_log_probs_of_kept_columns(gpus, transport, form):
    found = gpus(kept_log_probs, transport, form)
    same_on_all([each[0] for each in found])
    for values, wanted, dx, of_whole in found:
        for ours, truth in zip(values, wanted, strict=True):
            close(ours, truth, 1e-4)
        assert (dx.double() - of_whole).norm() <= 2e-2 * of_whole.norm()


def pairs(rows, columns, dtype, target_is):
    """A student's logits, and what a teacher of logits like them gives."""
    x = logits(rows, columns)
    y = x + logits(rows, columns, 3) / 4
    if target_is != "logits":
        y = torch.log_softmax(y, 1)
    return x.to(dtype), (y.exp() if target_is == "probs" else y).to(dtype)


def of_every_pair(test):
    """Parametrize a test by what a pair of rows may be, and by the transport."""
    test = pytest.mark.parametrize("transport", TRANSPORTS)(test)
    test = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)(test)
    test = pytest.mark.parametrize("target_is", ["logits", "log_probs", "probs"])(test)
    return pytest.mark.parametrize("options", [{}, {"softcap": 5.0, "scale": 0.5}], ids=["plain", "options"])(test)


def divergences(group, transport, dtype, target_is, options):
    """Of every kind and of columns, with the gradient of this GPU's logits; and float64's."""
    from test_divergence import KINDS, formula

    found, of = [], over(group, transport)
    weight = torch.linspace(0, 2, 40, device=torch.device("cuda", group.rank()))
    options = options | {"target_is": target_is, "beta": 0.3}
    if "softcap" in options:
        options |= {"temperature": weight + 0.5}
    x, y = pairs(40, COLUMNS, dtype, target_is)
    for kind in KINDS:
        given, whole = mine(x, group).requires_grad_(), x.double().requires_grad_()
        for _ in range(2):  # the second is found
            value = fused_softmax.divergence(
                given, mine(y, group), kind=kind, weight=weight, reduction="none", **options, **of
            )  # fmt: skip
        wanted = formula(whole, y, kind=kind, **options) * weight.double()
        dvalue = torch.linspace(-1, 2, 40, device=weight.device)
        (dx,) = torch.autograd.grad(value, [given], dvalue)
        (of_whole,) = torch.autograd.grad(wanted, [whole], dvalue.double())
        found.append((on_host([value]), on_host([wanted]), on_host([dx, mine(of_whole, group)])))
    return found


@of_every_pair
def test_divergences(gpus, transport, dtype, target_is, options):
    for of_ranks in zip(*gpus(divergences, transport, dtype, target_is, options), strict=True):  # of each kind
        same_on_all([values for values, _, _ in of_ranks])
        for (value,), (wanted,), (dx, of_whole) in of_ranks:
            close(value, wanted, 1e-4)
            assert (dx.double() - of_whole).norm() <= (1e-3 if dtype == torch.float32 else 2e-2) * of_whole.norm()


EVEN = {2: (3008, 2112), 4: (1504, 8, 16, 3592), 8: (704, 8, 16, 1424, 512, 64, 2000, 392)}  # whole vectors


def sums_of_divergences(group, transport, dtype, target_is, options):
    """Means with their gradient, found in the same launch, and the same gradient again; and float64's."""
    from test_divergence import KINDS, formula

    sizes, found = EVEN[group.size()], []
    x, y = pairs(40, COLUMNS - 1, dtype, target_is)
    weight = torch.linspace(0, 2, 40, device=x.device)
    options = options | {"target_is": target_is, "beta": 0.3}
    for kind in KINDS:
        given, whole = mine(x, group, sizes).requires_grad_(), x.double().requires_grad_()
        for _ in range(2):  # the second is found
            value = fused_softmax.divergence(
                given, mine(y, group, sizes), kind=kind, weight=weight, **options, **over(group, transport, sizes)
            )  # fmt: skip
        dx, again = (
            torch.autograd.grad(value, given, torch.tensor(3.0, device=x.device), retain_graph=True)[0]
            for _ in range(2)
        )
        wanted = (formula(whole, y, kind=kind, **options) * weight.double()).sum() / weight.double().sum()
        (of_whole,) = torch.autograd.grad(3 * wanted, whole)
        found.append((on_host([value]), on_host([wanted]), on_host([dx, again]), mine(of_whole, group, sizes).cpu()))
    return found


@of_every_pair
def test_sums_of_divergences(gpus, transport, dtype, target_is, options):
    of_kinds = zip(*gpus(sums_of_divergences, transport, dtype, target_is, options), strict=True)
    for of_ranks in of_kinds:
        same_on_all([values for values, *_ in of_ranks])
        for (value,), (wanted,), gradients, of_whole in of_ranks:
            close(value, wanted, 1e-4)
            for dx in gradients:
                near = 1e-3 if dtype == torch.float32 else 2e-2
                assert (dx.double() - of_whole).norm() <= near * of_whole.norm()


def divergences_of_columns(group, transport, rest):
    x, y = pairs(40, COLUMNS, torch.bfloat16, "log_probs")
    told, columns = y.float().topk(20, 1)
    given, whole = mine(x, group).requires_grad_(), x.double().requires_grad_()
    of_told = {"columns": columns, "rest": rest, "target_is": "log_probs"}
    value = fused_softmax.divergence(given, told, **of_told, **over(group, transport))
    wanted = fused_softmax.divergence(whole, told.double(), **of_told)
    (dx,), (of_whole,) = torch.autograd.grad(value, [given]), torch.autograd.grad(wanted, [whole])
    return on_host([value]), wanted.detach().cpu(), *on_host([dx, mine(of_whole, group)])


@pytest.mark.parametrize("rest", ["renormalize", "lump"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_divergences_of_columns(gpus, transport, rest):
    found = gpus(divergences_of_columns, transport, rest)
    same_on_all([each[0] for each in found])
    for (value,), wanted, dx, of_whole in found:
        close(value, wanted, 1e-4)
        assert (dx.double() - of_whole).norm() <= 2e-2 * of_whole.norm()


def of_probabilities(group, transport, dtype, options):
    x, t = pairs(40, COLUMNS, dtype, "probs")
    weight = torch.linspace(0.2, 2, COLUMNS, device=x.device)
    given = [mine(each, group).requires_grad_() for each in (x, t)]
    options = options | {"label_smoothing": 0.1, "dtype": torch.float32}
    for _ in range(2):  # the second is found
        y = cross_entropy(*given, mine(weight, group), **options, **over(group, transport))
    whole = [each.double().cpu().requires_grad_() for each in (x, t)]
    wanted = cross_entropy(*whole, weight.double().cpu(), **options | {"dtype": torch.float64})
    gradients, of_whole = torch.autograd.grad(y, given), torch.autograd.grad(wanted, whole)
    return on_host([y]), wanted.detach(), on_host(gradients), [mine(each, group) for each in of_whole]


@pytest.mark.parametrize("options", [{}, {"softcap": 8.0}, {"lse_square_scale": 0.01}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_losses_of_probabilities(gpus, transport, dtype, options):
    found = gpus(of_probabilities, transport, dtype, options)
    same_on_all([each[0] for each in found])
    for (y,), wanted, gradients, of_whole in found:
        close(y, wanted, 1e-4)
        for ours, truth in zip(gradients, of_whole, strict=True):
            assert (ours.double() - truth).norm() <= (1e-3 if dtype == torch.float32 else 2e-2) * truth.norm()


def linear(group, transport):
    x, w = logits(512, 256, 1, torch.bfloat16) / 8, logits(COLUMNS, 256, 2, torch.bfloat16) / 8
    target, rank, sizes = targets(512, COLUMNS), group.rank(), SIZES[group.size()]
    given = [x.clone().requires_grad_(), w.split(sizes)[rank].clone().requires_grad_()]
    y = linear_cross_entropy(*given, target, chunk_size=200, dtype=torch.float32, **over(group, transport))
    dx, dw = torch.autograd.grad(y, given)
    whole = [x.double().requires_grad_(), w.double().requires_grad_()]
    wanted = torch.nn.functional.cross_entropy(whole[0] @ whole[1].t(), target)
    of_x, of_w = torch.autograd.grad(wanted, whole)
    return on_host([y, wanted, dx, of_x, dw, of_w.split(sizes)[rank]])


def linear_pair(group, transport, what):
    """A student's layer against its teacher's, or against probabilities of the classes."""
    x, w = logits(300, 256, 1, torch.bfloat16) / 8, logits(COLUMNS, 256, 2, torch.bfloat16) / 8
    rank, sizes = group.rank(), SIZES[group.size()]
    given = [x.clone().requires_grad_(), w.split(sizes)[rank].clone().requires_grad_()]
    whole = [x.double().requires_grad_(), w.double().requires_grad_()]
    if what == "probabilities":
        t = logits(300, COLUMNS, 3).softmax(1)
        y = linear_cross_entropy(
            *given, mine(t, group), chunk_size=120, dtype=torch.float32, **over(group, transport)
        )  # fmt: skip
        wanted = torch.nn.functional.cross_entropy(whole[0] @ whole[1].t(), t.double())
    else:
        told, of_told = logits(300, 128, 4, torch.bfloat16) / 8, logits(COLUMNS, 128, 5, torch.bfloat16) / 8
        y = fused_softmax.linear_divergence(
            *given, told, of_told.split(sizes)[rank].clone(), kind=what, chunk_size=120, **over(group, transport)
        )  # fmt: skip
        wanted = fused_softmax.divergence(
            whole[0] @ whole[1].t(), told.double() @ of_told.double().t(), kind=what
        )  # fmt: skip
    dx, dw = torch.autograd.grad(y, given)
    of_x, of_w = torch.autograd.grad(wanted, whole)
    return on_host([y, wanted, dx, of_x, dw, of_w.split(sizes)[rank]])


@pytest.mark.parametrize("what", ["kl", "jsd", "probabilities"])
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_linear_pairs(gpus, transport, what):
    found = gpus(linear_pair, transport, what)
    same_on_all([[each[0], each[2]] for each in found])
    for y, wanted, *gradients in found:
        close(y, wanted, 3e-3)  # of logits that a layer has rounded
        for ours, truth in zip(gradients[::2], gradients[1::2], strict=True):
            assert (ours.double() - truth).norm() <= 3e-2 * truth.norm()


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_a_linear_layers_loss(gpus, transport):
    found = gpus(linear, transport)
    same_on_all([[each[0], each[2]] for each in found])
    for y, wanted, *gradients in found:
        close(y, wanted, 1e-3)
        for ours, truth in zip(gradients[::2], gradients[1::2], strict=True):
            assert (ours.double() - truth).norm() <= 2e-2 * truth.norm()  # both 0 of no columns


def dtensors(group, parallel, options):
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.parallel import loss_parallel

    mesh = init_device_mesh("cuda", (group.size(),))
    x, target = logits(64, COLUMNS, dtype=torch.bfloat16), targets(64, COLUMNS)
    given = distribute_tensor(x, mesh, [Shard(1)]).requires_grad_()
    # Without loss_parallel torch takes no plain tensor beside a DTensor.
    of_given = target if parallel else distribute_tensor(target, mesh, [Replicate()])
    with fused_softmax.enabled(), loss_parallel() if parallel else contextlib.nullcontext():
        y = torch.nn.functional.cross_entropy(given, of_given, **options)
        y.backward()
    whole = x.double().requires_grad_()
    wanted = torch.nn.functional.cross_entropy(whole, target, **options)
    wanted.backward()
    return on_host([y.full_tensor(), wanted, given.grad.full_tensor(), whole.grad])


@pytest.mark.parametrize("options", [{}, {"label_smoothing": 0.1}], ids=["plain", "smoothing"])
@pytest.mark.parametrize("parallel", [True, False])
def test_dtensors_under_enable(gpus, parallel, options):
    found = gpus(dtensors, parallel, options)
    same_on_all([each[::2] for each in found])
    for y, wanted, dx, of_whole in found:
        close(y, wanted, 2**-8)
        torch.testing.assert_close(dx.double(), of_whole, rtol=2**-6, atol=1e-7)


def over_a_mesh(group, axes):
    """A loss of logits, and of a linear layer: over one dim of the mesh rows lie in shards, or nothing; classes over
    the other."""
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor, init_device_mesh

    mesh = init_device_mesh("cuda", (2, group.size() // 2))

    def placed(tensor, **dims):
        """dims: by axis, those of the tensor."""
        return distribute_tensor(tensor, mesh, [Shard(dims[axis]) if axis in dims else Replicate() for axis in axes])

    target = targets(64, COLUMNS)
    of_loss = logits(64, COLUMNS, dtype=torch.bfloat16)
    x, w = logits(64, 256, 1, torch.bfloat16) / 8, logits(COLUMNS, 256, 2, torch.bfloat16) / 8
    kinds = (
        ([of_loss], [placed(of_loss, rows=0, classes=1)], cross_entropy, torch.nn.functional.cross_entropy),
        (
            [x, w], [placed(x, rows=0), placed(w, classes=0)], linear_cross_entropy,
            lambda x, w, target: torch.nn.functional.cross_entropy(x @ w.t(), target),
        ),
    )  # fmt: skip
    one, found = placed(torch.ones((), device="cuda")), []
    for whole, given, ours, theirs in kinds:
        given = [each.requires_grad_() for each in given]
        y = ours(*given, placed(target, rows=0), dtype=torch.float32)
        gradients = torch.autograd.grad(y, given, one)
        whole = [each.double().requires_grad_() for each in whole]
        wanted = theirs(*whole, target)
        found.append((
            on_host([y.full_tensor(), *[each.full_tensor() for each in gradients]]),
            on_host([wanted, *torch.autograd.grad(wanted, whole)]),
        ))  # fmt: skip
    return found


@pytest.mark.parametrize("axes", [("rows", "classes"), ("classes", "rows"), (None, "classes")], ids=str)
def test_dtensors_over_a_mesh_of_two_dims(gpus, axes):
    for of_ranks in zip(*gpus(over_a_mesh, axes), strict=True):  # of each loss
        same_on_all([ours for ours, _ in of_ranks])
        (y, *gradients), (wanted, *of_whole) = of_ranks[0]
        close(y, wanted, 1e-3)
        for ours, truth in zip(gradients, of_whole, strict=True):
            assert (ours.double() - truth).norm() <= 2e-2 * truth.norm()  # both 0 of no columns


def replayed(group, times):
    """Replays of a graph that has a loss of one launch and some that gather, over inputs that change."""
    x, target = mine(logits(33, COLUMNS), group), targets(33, COLUMNS)
    of = over(group, "peer")

    def call():
        smoothed = cross_entropy(x, target, label_smoothing=0.1, **of)
        return cross_entropy(x, target, **of), smoothed, logsumexp(x, 1, **of), fused_softmax.log_prob(x, target, **of)

    call()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = call()
    worst = 0.0
    for seed in range(times):
        whole = logits(33, COLUMNS, seed)
        x.copy_(mine(whole, group))
        graph.replay()
        wanted = (
            torch.nn.functional.cross_entropy(whole, target),
            torch.nn.functional.cross_entropy(whole, target, label_smoothing=0.1),
            torch.logsumexp(whole, 1),
            torch.log_softmax(whole, 1).gather(1, target.unsqueeze(1)).squeeze(1),
        )
        worst = max(worst, *(float((a - b).abs().max()) for a, b in zip(found, wanted, strict=True)))
    return worst


def test_graphs(gpus):
    assert max(gpus(replayed, 20)) < 1e-4


SHAPES = [
    (rows, columns, dtype, kind)
    for rows in (1, 64, 500)
    for columns in (1000, 40000)
    for dtype, kind in (
        (torch.float32, "loss"), (torch.bfloat16, "loss"), (torch.bfloat16, "softmax"), (torch.float32, "smoothing"),
    )
]  # fmt: skip


def growing(columns, n):
    """Of n ranks, each with about as many more columns than the one before as the first has."""
    ends = [columns * i * (i + 1) // (n * (n + 1)) for i in range(n + 1)]
    return tuple(end - start for start, end in itertools.pairwise(ends))


def many(group, launches, sample=50, pause=10):
    """(launches, those compared, wrong ones, what NCCL added wrongly, a digest of losses, seconds).

    Shapes are drawn anew for each call. NCCL adds on another stream meanwhile.
    """
    draw, beside = random.Random(7), torch.cuda.Stream()
    added, of_nccl = torch.zeros(2**18, device="cuda"), 0
    inputs = {}
    for rows, columns, dtype, kind in SHAPES:
        x, target = logits(rows, columns, rows + columns, dtype), targets(rows, columns)
        sizes = growing(columns, group.size())
        given = mine(x, group, sizes)
        if kind == "softmax":
            wanted = mine(torch.softmax(x.double(), 1), group, sizes)
        else:
            whole = x.double().requires_grad_()
            smoothing = 0.1 if kind == "smoothing" else 0.0
            wanted = torch.nn.functional.cross_entropy(whole, target, label_smoothing=smoothing)
            wanted = wanted.detach(), mine(torch.autograd.grad(wanted, [whole])[0], group, sizes)
        inputs[rows, columns, dtype, kind] = given.requires_grad_(kind == "loss"), target, wanted
    wrong = torch.zeros((), dtype=torch.int64, device="cuda")
    digest, compared, began = torch.zeros((), dtype=torch.float64, device="cuda"), 0, time.monotonic()
    first_of_each = set(SHAPES)
    for i in range(launches):
        shape = draw.choice(SHAPES)
        (x, target, wanted), (_, columns, _, kind) = inputs[shape], shape
        checks = i % sample == 0 or shape in first_of_each
        of = {"group": group, "shard_sizes": growing(columns, group.size()), "transport": "peer"}
        first_of_each.discard(shape)
        tolerance = 2 * torch.finfo(shape[2]).eps + 2e-5
        if i % pause == 0:
            with torch.cuda.stream(beside):
                dist.all_reduce(added.fill_(i), group=group)
                of_nccl = of_nccl + (added != group.size() * i).sum()
        if kind == "softmax":
            y = softmax(x, **of)
            found = (y,) if checks else ()
            wanted = (wanted,)
        elif kind == "smoothing":
            y = cross_entropy(x, target, label_smoothing=0.1, **of)
            found, wanted = (y,) if checks else (), wanted[:1]
        else:
            y = cross_entropy(x, target, **of)
            found = (y, torch.autograd.grad(y, [x])[0]) if checks else ()
        if checks:
            compared += 1
            for ours, truth in zip(found, wanted, strict=True):
                off = (ours.double() - truth).abs() > 1e-7 + tolerance * truth.abs()
                wrong += (off | ours.isnan()).any()
            if kind != "softmax":
                digest = digest * 0.5 + found[0].double()
    torch.cuda.synchronize()
    return launches, compared, int(wrong), int(of_nccl), digest.item(), time.monotonic() - began


def all_right(found):
    launches, compared, _, _, digest, seconds = found[0]
    assert compared > launches / 60
    for each in found:
        assert each[:5] == (launches, compared, 0, 0, digest)  # the same bits
    return f"{len(found)} ranks: {launches} launches, {compared} compared, none wrong, in {seconds:.1f} s"


def test_launches_of_changing_shapes_beside_nccl(gpus):
    all_right(gpus(many, 4000))


def in_disorder(group, transport, asked):
    """By a collective, ranks compare calls beforehand, as with FUSED_SOFTMAX_CHECK=1."""
    device = torch.device("cuda", dist.get_rank(group))
    checks = transport == "collective"
    with (
        mock.patch.object(distributed, "CHECK", checks),
        mock.patch("fused_softmax.ops.losses.cross_entropy.CHECK", checks),
        mock.patch("fused_softmax.core.route.CHECK", checks),
    ):
        return outcomes(group, device, transport, asked, torch.cuda.synchronize, recovers=not checks)


@pytest.mark.parametrize("n", HERE[-1:], ids="{}ranks".format, indirect=True, scope="module")  # it takes minutes
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_200_calls_of_which_50_are_wrong_on_one_rank(gpus, n, transport):
    asked = list(cases(200, 50, (*SOFTMAXES, *OF_LOSSES, "sample"), 3, n, widest=300))
    check(gpus(in_disorder, transport, asked, limit=1500), 200, 50)


def not_waited_for(group, most=5000, more=20):
    """Calls of which the third fails, and whose hosts wait for no device, until `more` after one has raised."""
    rank, last, found, told = group.rank(), group.size() - 1, [], None
    of = {"group": group, "transport": "peer"}
    even = (4000 // group.size(),) * group.size()
    given = [mine((1 + i) * logits(64, 4000), group, even) for i in range(5)]  # a stale one is another
    right = [mine(torch.softmax((1 + i) * logits(64, 4000), 1), group, even) for i in range(5)]
    while len(found) < (most if told is None else told + more):
        i = len(found)
        torch.cuda._sleep(10**7 * rank)  # so that each host is told later than the one before
        try:
            found.append(softmax(given[i % 5], **of | ({"n_classes": 3900} if i == 2 and rank == last else {})))
        except RuntimeError as error:
            found.append(str(error))
            told = i
    torch.cuda.synchronize()
    off = [y if isinstance(y, str) else float((y - right[i % 5]).abs().max()) for i, y in enumerate(found)]
    return ["raised" if isinstance(each, str) else "nan" if each != each else each for each in off], found[told]


def test_all_ranks_are_told_of_a_failure_at_the_same_call(gpus):
    found = gpus(not_waited_for)
    first, *others = ([each if isinstance(each, str) else "right" for each in kinds] for kinds, _ in found)
    assert all(each == first for each in others)
    told = first.index("raised")
    assert first == ["right"] * 2 + ["nan"] * (told - 2) + ["raised"] + ["right"] * (len(first) - 1 - told)
    assert max(each for kinds, _ in found for each in kinds if not isinstance(each, str)) < 1e-6
    assert all("refused its call, got NaN before, or differed in " in said for _, said in found)


def nan_and_then_an_error(group, name):
    """By a collective without FUSED_SOFTMAX_CHECK=1: a call whose ranks differ, one that is told of it, and another."""
    n, rank, found = group.size(), group.rank(), []
    x = mine(logits(9, 5000), group, (5000 // n,) * n)
    of = {"group": group, "transport": "collective"}
    for scale in (1.0, 2.0 + rank, 1.0, 1.0):
        try:
            if name == "cross_entropy":
                found.append(cross_entropy(x, targets(9, 5000), scale=scale, **of))
            else:
                found.append(getattr(fused_softmax, name)(x, 1, scale=scale, **of))
        except RuntimeError as error:
            found.append(str(error))
        torch.cuda.synchronize()
    return [each if isinstance(each, str) else bool(each.isnan().all()) for each in found]


@pytest.mark.parametrize("name", ["softmax", "logsumexp", "cross_entropy"])
def test_by_a_collective_ranks_that_differ_get_nan_and_then_an_error(gpus, name):
    for first, second, told, last in gpus(nan_and_then_an_error, name):
        assert (first, second, last) == (False, True, False)
        assert told.startswith(f"{name}: an earlier call gave NaN, because the ranks of the group differed in their")


def alone(group):
    """One rank ends without a word; the others call on, and say when they were told and what."""
    x, target = mine(logits(64, COLUMNS), group), targets(64, COLUMNS)
    for _ in range(3):
        y = cross_entropy(x, target, **over(group, "peer"))
    torch.cuda.synchronize()
    if group.rank() == KILLED:
        os.kill(os.getpid(), signal.SIGKILL)
    time.sleep(1.0)
    began, nan = time.monotonic(), None
    while time.monotonic() - began < 2 * SECONDS:
        try:
            y = cross_entropy(x, target, **over(group, "peer"))
        except RuntimeError as error:
            return time.monotonic() - began, str(error), nan
        torch.cuda.synchronize()
        nan = bool(y.isnan())
    return None


def left(n):
    """What the others say of the one that was killed."""
    with pool(n) as found:
        for pipe in found._pipes:
            pipe.send((n, alone, (), 0))
        said = []
        for rank in {*range(n)} - {KILLED}:
            assert found._pipes[rank].poll(3 * SECONDS), f"rank {rank} hangs"
            said.append(found._pipes[rank].recv())
            assert not isinstance(said[-1], Raised), said
        return said


@pytest.mark.parametrize("n", HERE, ids="{}ranks".format)
def test_a_rank_that_was_killed_is_named_soon_after_the_timeout(n):
    for seconds, said, nan in left(n):
        assert nan
        assert SECONDS - 1 < seconds < SECONDS + 5
        assert said.startswith(
            f"cross_entropy: an earlier call gave NaN, because rank {KILLED} has told nothing of row "
        )
        assert f" in {SECONDS} s; " in said


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("launches", type=int)
    parser.add_argument("--ranks", type=int, default=2)
    asked = parser.parse_args()
    with pool(asked.ranks) as found:
        print(all_right(found.values(asked.ranks, many, asked.launches, limit=60 + asked.launches / 200)))


if __name__ == "__main__":
    main()
