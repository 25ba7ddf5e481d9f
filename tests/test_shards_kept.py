"""Losses over ranks whose calls are kept: one is found for its like alone, and nothing of a call or a group stays."""

import gc
import math
import weakref
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from sharded import close, differentiated, logits, same_on_all

from fused_softmax import cross_entropy
from fused_softmax.core import calls, route
from fused_softmax.core.runner import launch
from fused_softmax.ops.losses.over_ranks import launches as loss_sharded_calls
from fused_softmax.ranks import groups as distributed
from fused_softmax.ranks import launches as ranks_launches
from fused_softmax.ranks import launches as shard_memory
from fused_softmax.ranks.peers import UNEVEN

N = 2
WEIGHT = torch.linspace(0.2, 2, 24)
TARGET = torch.tensor([0, 23, 5, -100, 12, 11, 7])


def columns_of(group, whole, dim=1):
    return whole.chunk(dist.get_world_size(group), dim)[dist.get_rank(group)]


def loss_of(group, x, target, options):
    """What a rank's call gives, and its gradient; options: of whole rows."""
    given = columns_of(group, x).clone().requires_grad_()
    own = {key: columns_of(group, each, 0) if key == "weight" else each for key, each in options.items()}
    return differentiated(cross_entropy(given, target, **own, group=group), given, 1.0)


def whole_loss(x, target, options):
    given = x.detach().double().clone().requires_grad_()
    of_one = {key: each.double() if key == "weight" else each for key, each in options.items()}
    return differentiated(cross_entropy(given, target.long(), **of_one), given, 1.0)


def is_right(found, x, target, options, tolerance=1e-5):
    *wanted, dx = whole_loss(x, target, options)
    for ours, truth in zip(same_on_all([each[:-1] for each in found]), wanted, strict=True):
        close(ours, truth, tolerance)
    close(torch.cat([each[-1] for each in found], 1), dx, tolerance)


ASKED = [
    {}, {"reduction": "sum"}, {"reduction": "none"}, {"ignore_index": 5}, {"label_smoothing": 0.1},
    {"label_smoothing": 0.3}, {"weight": WEIGHT}, {"weight": WEIGHT.flip(0)},
    {"weight": WEIGHT, "label_smoothing": 0.1}, {"scale": 0.5}, {"scale": 1.5}, {"scale": 1}, {"softcap": 5.0},
    {"softcap": 9.0}, {"lse_square_scale": 0.1}, {"lse_square_scale": 0.2, "return_z_loss": True},
    {"return_lse": True}, {"return_token_stats": True},
]  # fmt: skip
SHAPES = [(7, 24), (5, 24), (7, 12), (1, 24)]
KINDS = [(torch.float32, torch.int64), (torch.bfloat16, torch.int64), (torch.float32, torch.int32)]


def cases():
    """(logits, targets, options) of calls that differ in one thing from others."""
    found = [((7, 24), *KINDS[0], options) for options in ASKED]
    found += [(shape, *KINDS[0], {}) for shape in SHAPES] + [((7, 24), *kind, {}) for kind in KINDS]
    for shape, dtype, index, options in found:
        target = TARGET[: shape[0]].clamp(max=shape[1] - 1).to(index)
        yield logits(*shape).to(dtype), target, options


def in_turn(group, as_on_gpu):
    """Every case twice, once all have been seen; how many kernels the second round has prepared."""
    route.INTERPRET = True
    prepare, waits, prepared = launch.prepare, distributed._waits_for_nobody, 0

    def counted(*args, **options):
        nonlocal prepared
        prepared += 1
        return prepare(*args, **options)

    if as_on_gpu:
        distributed._waits_for_nobody = lambda device: False
    try:
        first = [loss_of(group, *case) if len(case[0][0]) == 24 or not as_on_gpu else None for case in cases()]
        launch.prepare = counted
        return first, [loss_of(group, *case) if first[i] else None for i, case in enumerate(cases())], prepared
    finally:
        launch.prepare, distributed._waits_for_nobody = prepare, waits


@pytest.mark.parametrize("as_on_gpu", [False, True])
def test_calls_that_differ_in_one_thing_take_turns(ranks, as_on_gpu):
    rounds = ranks.values(N, in_turn, as_on_gpu)
    for case, *found in zip(cases(), *[each for of_rank in rounds for each in of_rank[:2]], strict=True):
        if found[0] is None:
            continue
        for ours in (found[::2], found[1::2]):
            is_right(ours, *case, 1e-5 if case[0].dtype == torch.float32 else 1e-2)
    assert [prepared for *_, prepared in rounds] == [0] * N


def with_and_without(group, x, target):
    """A call whose logits want a gradient, do not, and in a mode that has none, twice."""
    route.INTERPRET = True
    given, found = columns_of(group, x), []
    for _ in range(2):
        wants = given.clone().requires_grad_()
        found.append(cross_entropy(wants, target, group=group))
        assert found[-1].requires_grad
        found.append(cross_entropy(given, target, group=group))
        with torch.no_grad():
            found.append(cross_entropy(wants, target, group=group))
        assert not any(each.requires_grad for each in found[-2:])
    return [each.detach() for each in found]


def test_a_gradient_is_there_where_one_is_wanted(ranks):
    x = logits(7, 24)
    for y in same_on_all(ranks.values(N, with_and_without, x.float(), TARGET)):
        close(y, torch.nn.functional.cross_entropy(x, TARGET))


def laid_out(group, x, target):
    """Logits that lie otherwise, or are written over, in turn; and some that autograd's hooks have moved since."""
    route.INTERPRET = True
    own, found = columns_of(group, x), []
    apart = torch.full((len(x), own.shape[1] + 5), torch.nan)
    apart[:, 1:-4] = own
    half = torch.tensor(0.5)

    def unpacked(each):
        return torch.nn.functional.pad(each, (1, 4))[:, 1:-4] if each.shape == own.shape else each

    for _ in range(2):
        for lies, options in ((own.clone(), {}), (apart[:, 1:-4], {}), (own.clone(), {"inplace_backward": True})):
            given = lies.detach().requires_grad_()
            y = cross_entropy(given * 1 if options else given, target, **options, group=group)
            found.append(torch.autograd.grad(y, [given], half)[0])
        given = own.clone().requires_grad_()
        with torch.autograd.graph.saved_tensors_hooks(lambda each: each, unpacked):
            y = cross_entropy(given, target, reduction="sum", group=group)
        found.append(torch.autograd.grad(y, [given], half / (target >= 0).sum())[0])
    return found


def test_logits_that_lie_otherwise(ranks):
    x = logits(7, 24)
    *_, dx = whole_loss(x, TARGET, {})
    for each in zip(*ranks.values(N, laid_out, x.float(), TARGET), strict=True):
        close(torch.cat(each, 1), dx)


def over_several_groups(group, x, target):
    """A group, one of the same ranks after it has ended, and two in which a rank has other places; which are held."""
    route.INTERPRET = True
    waits, found, alive = distributed._waits_for_nobody, [], []
    distributed._waits_for_nobody = lambda device: False
    try:
        for _ in range(2):
            for members in ([0, 1], [0, 1], [1, 2]):
                mine = dist.new_group(members)
                if dist.get_rank() in members:
                    found.append((members, loss_of(mine, x, target, {})))
                    dist.destroy_process_group(mine)
                    with pytest.raises(ValueError, match=r"[Gg]roup"):
                        loss_of(mine, x, target, {})
                    alive.append(weakref.ref(mine))
                del mine
        gc.collect()
        return found, [each() is not None for each in alive]
    finally:
        distributed._waits_for_nobody = waits


def test_a_group_is_no_other_and_is_held_by_nobody(ranks):
    x = logits(7, 24)
    of_ranks = ranks.values(4, over_several_groups, x.float(), TARGET)  # all of which take part in making groups
    assert not any(alive for _, held in of_ranks for alive in held)
    by_rank = [list(found) for found, _ in of_ranks]
    for members in ([0, 1], [0, 1], [1, 2]) * 2:
        parts = [by_rank[rank].pop(0) for rank in members]
        assert [each for each, _ in parts] == [members] * 2
        is_right([each for _, each in parts], x, TARGET, {})


def differing_twice(group, target):
    """What each of several calls gave or raised, of which the second and the fourth are of ranks that ask otherwise."""
    route.INTERPRET = True
    waits, rank = distributed._waits_for_nobody, dist.get_rank(group)
    distributed._waits_for_nobody = lambda device: False
    x, found = torch.zeros(len(target), 12), []
    try:
        for scale in (1.0, 1.0 + rank, 1.0, 1.0, 2.0 - rank, 1.0, 1.0):
            try:
                found.append(float(cross_entropy(x, target, scale=scale, group=group)))
            except RuntimeError as error:
                found.append(str(error))
        return found
    finally:
        distributed._waits_for_nobody = waits


def test_ranks_that_differ_are_told_of_it_every_time_and_once(ranks):
    truth = pytest.approx(torch.log(torch.tensor(24.0)).item())
    said = "cross_entropy: an earlier call gave NaN, because the ranks of the group differed in their options"
    for first, second, third, fourth, fifth, sixth, last in ranks.values(N, differing_twice, TARGET):
        assert (third, sixth) == (said, said)
        assert (first, fourth, last) == (truth, truth, truth)
        assert str((second, fifth)) == "(nan, nan)"


def alive_at_once(group, x, target):
    """The gradient of two losses by one kept call, both made before either's backward, of which one comes twice."""
    route.INTERPRET = True
    given = columns_of(group, x).clone().requires_grad_()
    losses = [cross_entropy(given * factor, target, group=group) for factor in (1.0, -0.5)]
    losses[0].backward(retain_graph=True)
    losses[1].backward()
    losses[0].backward()
    return given.grad


def test_losses_that_are_alive_at_once(ranks):
    x = logits(7, 24)
    given = x.clone().requires_grad_()
    loss = torch.nn.functional.cross_entropy
    (2 * loss(given, TARGET) + loss(given * -0.5, TARGET)).backward()
    close(torch.cat(ranks.values(N, alive_at_once, x.float(), TARGET), 1), given.grad)


def prepared_of_a_sum(group, x, target):
    """How many kernels each of three steps prepares whose loss and z-loss are added, and so get one gradient."""
    route.INTERPRET = True
    given, found = columns_of(group, x).clone().requires_grad_(), []
    for _ in range(3):
        with mock.patch.object(launch, "prepare", wraps=launch.prepare) as prepare:
            y = cross_entropy(given, target, lse_square_scale=0.1, return_z_loss=True, group=group)
            (y.loss + y.z_loss).backward()
        found.append(prepare.call_count)
    return found, given.grad / 3


def test_one_gradient_of_several_results_is_found_too(ranks):
    x = logits(7, 24)
    given = x.clone().requires_grad_()
    y = cross_entropy(given, TARGET, lse_square_scale=0.1, return_z_loss=True)
    (y.loss + y.z_loss).backward()
    of_ranks = ranks.values(N, prepared_of_a_sum, x.float(), TARGET)
    assert [prepared[1:] for prepared, _ in of_ranks] == [[0, 0]] * N
    close(torch.cat([dx for _, dx in of_ranks], 1), given.grad)


def statistics_of_bytes(group, x, target):
    route.INTERPRET = True
    return cross_entropy(columns_of(group, x), target, return_token_stats=True, group=group).token_stats.correct


def test_a_class_of_156_is_no_ignored_target(ranks):
    """Which -100 is of uint8."""
    x, target = torch.zeros(3, 160), torch.tensor([156, 7, 156], dtype=torch.uint8)
    x[0, 156] = x[1, 7] = x[2, 8] = 1
    for correct in ranks.values(N, statistics_of_bytes, x, target):
        assert correct.tolist() == [True, True, False]


def told_after(group, said):
    """What calls give or raise after one in which rank 0's header was `said`, and after a write to where that wrote."""
    route.INTERPRET = True
    waits, headers_of, found = distributed._waits_for_nobody, distributed.headers_of, []
    distributed._waits_for_nobody = lambda device: False
    x, target = torch.zeros(2, 12), torch.tensor([0, 1])

    def odd(*of):
        headers = headers_of(*of)
        return headers._replace(of_ranks=(torch.tensor(said), *headers.of_ranks[1:]))

    def call():
        try:
            found.append(float(cross_entropy(x, target, group=group)))
        except RuntimeError as error:
            found.append(str(error))

    try:
        with mock.patch.object(loss_sharded_calls, "headers_of", odd):
            call()
        written_to = distributed.notice_of(group, N, x.device)
        call()
        call()
        written_to[0], written_to[1] = 12, 13  # as by a graph that was captured before
        call()
        call()
        return found
    finally:
        distributed._waits_for_nobody = waits


@pytest.mark.parametrize("said", [[-1.0] * 4, [math.nan] * 4, [12.0, 24.0, 2.0, -1.0]], ids=str)
def test_a_difference_is_told_whatever_was_said_and_for_graphs_too(ranks, said):
    truth = pytest.approx(torch.log(torch.tensor(24.0)).item())
    before = "cross_entropy: an earlier call gave NaN, because the ranks of the group differed in their "
    for first, second, third, fourth, last in ranks.values(N, told_after, said):
        assert str(first) == "nan"
        assert second.startswith(before + ("options" if said[0] == 12 else "columns: ["))
        assert fourth == before + "columns: [13, 13] by rank. " + UNEVEN
        assert (third, last) == (truth, truth)


@pytest.mark.parametrize(("current", "ways"), [(1, ["fast"]), (0, ["general"])])
def test_memory_is_of_the_fast_way_where_its_gpu_is_the_current_one(monkeypatch, current, ways):
    """Also in a process that sees several GPUs, as those of ranks mostly do."""
    taken = []
    monkeypatch.setattr(calls, "allocator", lambda device: lambda *sizes: taken.append("general"))
    monkeypatch.setattr(shard_memory, "_empty_strided_cuda", lambda *sizes: taken.append("fast"))
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: current, raising=False)
    ranks_launches.allocator(torch.device("cuda", 1))((2,), (1,), torch.float32)
    assert taken == ways
