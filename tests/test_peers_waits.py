"""Ranks that come late, or not, or ask for something else, and what cannot go by peers."""

import contextlib
import ctypes
import gc
import re
import time
import weakref

import pytest
import torch
import torch.distributed as dist
from peered import in_parts, loss, softmax
from ranks import SECONDS, SHARED
from sharded import close, logits

import fused_softmax
from fused_softmax import cross_entropy, linear_cross_entropy
from fused_softmax.ranks import groups as distributed
from fused_softmax.ranks import kernels, peers

X = logits(3, 10).float()
TARGET = torch.tensor([1, 7, 3])


def mine(group):
    rank = dist.get_rank(group)
    return X[:, 5 * rank : 5 * rank + 5].clone()


def on_own(group, n, function, *args):
    """What a function gives on the first n ranks, of a group that no other test has. The others help to make it."""
    own = dist.new_group(list(range(n)))
    return function(own, *args) if dist.get_rank(group) < n else None


def on_two(group, function, *args):
    return on_own(group, 2, function, *args)


def be_impatient(group, seconds=0.3):
    """Kernels of this group wait no longer, which no other test's group may be left with."""
    assert all(each is not group for each in SHARED), "only a group made by on_own may be impatient"
    softmax(torch.zeros(1, 2), group)  # sets its memory up
    memory = peers.known(group, torch.device("cpu"))
    memory.limit, memory.seconds = int(memory.limit * seconds / memory.seconds), seconds


def late(group):
    """Calls of other values, so that a message of the first is no message of the second."""
    in_parts(None)
    softmax(2 * mine(group), group)
    if dist.get_rank(group):
        time.sleep(1.5)
    return softmax(mine(group), group), loss(mine(group), TARGET, group)


def test_a_late_rank_is_waited_for(ranks):
    found = ranks.values(2, late)
    close(torch.cat([each[0] for each in found], 1), torch.softmax(X.double(), 1))
    for _, y in found:
        close(y, torch.nn.functional.cross_entropy(X.double(), TARGET))


def absent(group, name):
    """Rank 1 makes the first call, and its second one after rank 0 has waited in vain and been told so twice."""
    in_parts(None)
    be_impatient(group)
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank(group)
    call = (lambda: softmax(mine(group), group)) if name == "softmax" else lambda: loss(mine(group), TARGET, group)
    call()

    def told():
        try:
            return call()
        except RuntimeError as error:
            return str(error)

    if rank == 1:
        store.wait([f"{name} was told"])
        call()  # rank 0 has told all that it takes
        memory = peers.known(group, torch.device("cpu"))
        memory._patience = 30.0
        found = told(), told()  # of which rank 0 makes none, so the first gives NaN
        return [each for each in found if isinstance(each, str)], told()
    started = time.monotonic()
    y = call()
    seconds, said = time.monotonic() - started, [told(), told()]
    peers.known(group, torch.device("cpu"))._patience = 30.0
    store.set(f"{name} was told", "")
    return y, seconds, said, told(), told()


@pytest.mark.parametrize("name", ["softmax", "cross_entropy"])
def test_a_rank_that_never_comes_gives_nan_and_then_an_error_until_it_does(ranks, name):
    (y, seconds, said, recovered, again), (told, last), *_ = ranks.values(4, on_two, absent, name)
    assert y.isnan().all()
    assert seconds < 30
    for each in said:
        assert each.startswith(f"{name}: an earlier call gave NaN, because rank 1 has told nothing of row ")
        assert re.search(r" row [012] in 0\.3 s; the group works again once ranks \[1\] have made their next", each)
    for each in (recovered, *told):
        assert each.startswith(f"{name}: an earlier call gave NaN, because rank ")
        assert each.endswith("; made again, this call works")
    whole = torch.cat([again, last], 1) if name == "softmax" else again
    close(whole, torch.softmax(X.double(), 1) if name == "softmax" else torch.nn.functional.cross_entropy(X, TARGET))


def test_an_error_says_which_row_of_which_rank_is_missing():
    of = object.__new__(peers.Peers)
    of.seconds = 30.0
    for row, rank in ((0, 1), (5, 3), (70000, 2)):
        assert of._told(row << 16 | rank << 2 | peers._MISSING) == f"rank {rank} has told nothing of row {row} in 30 s"


def without_the_last(group):
    """The last rank makes no second call, and rank 0 is the first to give it up."""
    in_parts(None)
    store, rank, last = dist.distributed_c10d._get_default_store(), group.rank(), group.size() - 1
    x = X[:, 2 * rank : 2 * rank + 2].clone()
    be_impatient(group, 20.0 if rank else 1.0)
    softmax(x, group)
    started, said = time.monotonic(), []
    while rank != last and len(said) < 2:
        try:
            softmax(x, group)
        except RuntimeError as error:
            said.append(str(error))
    store.set(f"rank {rank} was told", "")
    store.wait([f"rank {each} was told" for each in range(last)])
    return time.monotonic() - started, said


def test_all_others_name_the_rank_that_never_comes(ranks):
    """Also those that hear of it from another rank, before their own time is over."""
    for seconds, said in ranks.values(4, on_own, 4, without_the_last)[:-1]:
        assert seconds < SECONDS / 2
        for each in said:
            assert each.startswith("softmax: an earlier call gave NaN, because rank 3 has told nothing of row ")


def given_up(group):
    """How long each row of a call is waited for that rank 1 does not make: in polls, beside the short first wait."""
    in_parts(None)
    be_impatient(group)
    softmax(mine(group), group)
    wait, limits = kernels.wait_long, []
    if dist.get_rank(group) == 1:
        return limits

    def spied(slots, asked, rank, ranks, message, wanted, tag, limit, K):
        limits.append(int(limit.handle.data.item()))
        return wait(slots, asked, rank, ranks, message, wanted, tag, limit, K)

    kernels.wait_long = spied
    try:
        softmax(mine(group), group)
    finally:
        kernels.wait_long = wait
    return limits


def test_who_has_given_up_once_waits_no_more(ranks):
    limits, *_ = ranks.values(4, on_two, given_up)
    assert len(limits) == len(X)
    assert limits[0] > 0
    assert limits[1:] == [0, 0]


def at_odds(group, odd):
    """Ranks that made both calls together, then each another, and then the same again, twice."""
    in_parts(None)
    first, second = {
        "rows": ((X, TARGET, {}), (X[:2], TARGET[:2], {})),
        "options": ((X, TARGET, {}), (X, TARGET, {"ignore_index": 3})),
        "numbers": ((X, TARGET, {"softcap": 3.0}), (X, TARGET, {"softcap": 5.0})),
        "hashes": ((X, TARGET, {"scale": -1.0}), (X, TARGET, {"scale": -2.0})),  # that Python makes the same
        "launches": ((X, TARGET, {}), (X, TARGET, {"label_smoothing": 0.1})),
        "arguments": ((X, TARGET, {}), (X, TARGET, {"reduction": "max"})),
    }[odd]
    rank = dist.get_rank(group)
    calls, said = [first, second], []

    def made(x, target, options):
        return loss(x[:, 5 * rank : 5 * rank + 5].clone(), target, group, **options)

    for each in calls[: 1 if odd == "arguments" else 2]:
        made(*each)
    started, y = time.monotonic(), torch.tensor(torch.nan)
    with contextlib.suppress(ValueError):
        y = made(*calls[rank])
    seconds = time.monotonic() - started
    try:
        loss(mine(group), TARGET, group)
    except RuntimeError as error:
        said.append(str(error))
    return y, seconds, said, loss(mine(group), TARGET, group)


@pytest.mark.parametrize("odd", ["options", "rows", "numbers", "hashes", "launches", "arguments"])
def test_ranks_that_differ_get_nan_at_once_then_an_error_and_then_what_they_ask_for(ranks, odd):
    for rank, (y, seconds, said, again) in enumerate(ranks.values(4, on_two, at_odds, odd)[:2]):
        assert y.isnan()
        assert seconds < SECONDS / 2
        (each,) = said
        differed = f"{peers._DIFFERED}, as of row "
        if odd == "arguments":
            differed = "refused its call" + (": ValueError: cross_entropy: reduction must be " if rank else ", got ")
        odd_one = 1 if odd == "arguments" else 1 - rank
        assert each.startswith(f"cross_entropy: an earlier call gave NaN, because rank {odd_one} {differed}")
        close(again, torch.nn.functional.cross_entropy(X.double(), TARGET))


def ahead(group):
    """Rank 0 makes two calls more than rank 1 before it is told of one that failed: all are told at the same one."""
    in_parts(None)
    x, rank, found = mine(group), dist.get_rank(group), []
    softmax(x, group)
    memory = peers.known(group, torch.device("cpu"))
    with contextlib.suppress(ValueError):
        softmax(x, group, n_classes=0 if rank else None)
    seen, memory._seen = memory._seen, ctypes.c_int64(0)  # a device that is late
    for i in range(5):
        if i == 2 * (1 - rank):
            memory._seen = seen
        try:
            found.append(softmax(x, group))
        except RuntimeError as error:
            found.append(str(error))
    return found


def test_all_ranks_are_told_at_the_call_of_the_one_that_has_come_furthest(ranks):
    found = ranks.values(4, on_two, ahead)[:2]
    for nan, another, said, *right in found:
        assert nan.isnan().all()
        assert another.isnan().all()
        assert said.startswith("softmax: an earlier call gave NaN, because rank ")
        assert len(right) == 2
    for i in (3, 4):
        close(torch.cat([each[i] for each in found], 1), torch.softmax(X.double(), 1))


def apart(group, name):
    """Rank 0 makes five calls of other values before rank 1 does, after two that both make; then both recover."""
    in_parts(None)
    be_impatient(group)
    store, rank = dist.distributed_c10d._get_default_store(), dist.get_rank(group)

    def call(i):
        x = mine(group)[:2] * i
        return softmax(x, group) if name == "softmax" else loss(x, TARGET[:2], group, **OF_CALLS[name])

    found, memory = [call(1), call(2)], peers.known(group, torch.device("cpu"))
    seen, memory._seen = memory._seen, ctypes.c_int64(0)  # a device that is late
    if rank:
        store.wait([f"{name}: rank 0 went ahead"])
    found += [call(i) for i in range(3, 8)]
    store.set(f"{name}: rank {rank} went ahead", "")
    store.wait([f"{name}: rank {1 - rank} went ahead"])
    memory._seen, memory.seconds, memory._patience = seen, 30.0, 30.0
    with pytest.raises(RuntimeError, match="an earlier call gave NaN, because") as raised:
        call(8)
    return [*found, call(8)], str(raised.value)


OF_CALLS = {"cross_entropy": {}, "gathered": {"label_smoothing": 0.1}}


@pytest.mark.parametrize("name", ["softmax", "cross_entropy", "gathered"])
def test_a_rank_that_has_gone_ahead_takes_no_message_of_an_earlier_call(ranks, name):
    of_ranks = ranks.values(4, on_two, apart, name)[:2]
    for rank, (found, said) in enumerate(of_ranks):
        for i, y in enumerate(found):
            whole = X[:2].double() * (i + 1)
            if name == "softmax":
                right = torch.softmax(whole, 1)[:, 5 * rank : 5 * rank + 5]
            else:
                right = torch.nn.functional.cross_entropy(whole, TARGET[:2], **OF_CALLS[name])
            if 2 < i < 7:
                assert y.isnan().all(), (rank, i, y)
            elif not (i == 2 and y.isnan().all()):  # which rank 0 waited for in vain
                close(y, right)
        told = "rank 0 refused its call, got NaN before, " if rank else "rank 1 has told nothing of row "
        assert f"because {told}" in said


def first_at_odds(group, name):
    """The first call of a group, for which its memory is yet to be made; then another."""
    in_parts(None)
    rank, found = dist.get_rank(group), []
    for rows in (2 + 9 * rank, 2, 2):
        x, w = torch.ones(rows, 3), torch.ones(3, 3)
        target = torch.zeros(rows, dtype=torch.long)
        try:
            if name == "linear_cross_entropy":
                found.append(linear_cross_entropy(x, w, target, group=group, transport="peer"))
            else:
                found.append(loss(x, target, group))
        except RuntimeError as error:
            found.append(str(error))
    return found


@pytest.mark.parametrize("name", ["cross_entropy", "linear_cross_entropy"])
def test_a_first_call_that_differs_loses_no_group(ranks, name):
    for first, second, third in ranks.values(4, on_two, first_at_odds, name)[:2]:
        if name == "linear_cross_entropy":
            assert f"{peers._DIFFERED}. " in first
        else:
            assert first.isnan()
        assert second.startswith(f"{name}: an earlier call gave NaN, because ")
        close(third, torch.tensor(6.0).log())


def without_kernels(group):
    from fused_softmax.core import route

    route.INTERPRET = False
    return softmax(mine(group), group)


def test_a_cpu_without_the_interpreter_has_no_peers(ranks):
    for each in ranks(4, on_two, without_kernels)[:2]:
        assert each.args[:2] == (
            "ValueError", "softmax: transport='peer' cannot take this call: there are no kernels for tensors on cpu",
        )  # fmt: skip


def test_operations_that_have_no_peers():
    with pytest.raises(ValueError, match="sample: transport='peer' is not for this function"):
        fused_softmax.sample(torch.zeros(2, 3), group=object(), transport="peer")


def left_to_choose(group):
    in_parts(None)
    y = cross_entropy(mine(group), TARGET, group=group)
    return y, peers.known(group, torch.device("cpu")) is None


def test_cpu_ranks_talk_by_a_collective_unless_asked(ranks):
    for y, untouched in ranks.values(4, on_two, left_to_choose)[:2]:
        close(y, torch.nn.functional.cross_entropy(X.double(), TARGET))
        assert untouched


def failing(group):
    in_parts(None)
    mapped = peers._mapped
    if dist.get_rank(group):
        peers._mapped = lambda *arguments: mapped(*arguments) and 1 / 0
    try:
        return softmax(mine(group), group)
    finally:
        peers._mapped = mapped


def test_memory_that_one_rank_cannot_map_is_nobodys(ranks):
    for each in ranks(4, on_two, failing)[:2]:
        assert each.args[:2] == (
            "ValueError",
            "softmax: transport='peer' cannot take this call: the ranks cannot map each other's memory: "
            "ZeroDivisionError: division by zero",
        )


FACTS = ("host", "a GPU", "gpu 0"), ("host", "a GPU", "gpu 1"), ("host", "a GPU", "gpu 2")
HINDERED = {
    "the ranks are on several hosts": [("another", "a GPU", "gpu 0"), *FACTS[1:]],
    "the ranks have devices of several kinds, ['a GPU', 'another']": [*FACTS[:2], ("host", "another", "gpu 2")],
    "several ranks share a GPU": [*FACTS[:2], ("host", "a GPU", "gpu 1")],
}


@pytest.mark.parametrize("why", HINDERED)
def test_what_keeps_a_group_from_peers(why, monkeypatch):
    """Of three ranks, of which one says something else than the others."""
    monkeypatch.setattr(peers, "_facts", lambda device: FACTS[0])
    monkeypatch.setattr(dist, "get_world_size", lambda group: 3)
    monkeypatch.setattr(peers, "_heard", lambda group, said: [(*each, 3) for each in HINDERED[why]])
    assert peers._set_up(object(), torch.device("cuda", 0)) == why


def ended(group):
    if dist.get_rank(group) > 1:
        dist.new_group([0, 1])
        return None
    in_parts(None)
    group = dist.new_group([0, 1])
    x = mine(group).requires_grad_()
    loss(x, TARGET, group).backward()
    softmax(x, group)
    memory = weakref.ref(peers.known(group, x.device))
    dist.destroy_process_group(group)
    alive = weakref.ref(group)
    del group
    gc.collect()
    return alive() is None and memory() is None


def test_a_group_that_has_ended_and_its_memory_are_held_by_nobody(ranks):
    assert all(ranks.values(4, ended)[:2])


def checked(group):
    """What is compared before each call where the environment asks for it."""
    in_parts(None)
    distributed.CHECK = True
    from fused_softmax.ops.losses import cross_entropy as of_loss

    before, of_loss.CHECK = of_loss.CHECK, True
    try:
        for _ in range(2):
            loss(mine(group), TARGET, group)
        return loss(mine(group), TARGET + dist.get_rank(group), group)
    finally:
        distributed.CHECK, of_loss.CHECK = False, before


def test_targets_are_compared_where_the_environment_asks_for_it(ranks):
    for each in ranks(2, checked):
        assert each.args[0] == "RuntimeError"
        assert each.args[1].startswith("cross_entropy: the ranks of the group differ in target: ")
