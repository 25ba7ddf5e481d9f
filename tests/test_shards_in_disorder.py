"""Calls that change from one to the next on one group, of which some are wrong on one rank alone."""

import pytest
import torch
from disorder import LOSSES, SOFTMAXES, cases, check, outcomes
from peered import in_parts
from sharded import by

ALL = (*SOFTMAXES, *LOSSES, "sample")
CPU = torch.device("cpu")


def by_a_collective(group, way, asked):
    by(way)
    return outcomes(group, CPU, None, asked, lambda: None, recovers=False)


@pytest.mark.parametrize("seed", [1, pytest.param(2, marks=pytest.mark.exhaustive)])
def test_200_calls_of_which_50_are_wrong_on_one_rank(ranks, seed):
    found = ranks.values(2, by_a_collective, "torch", list(cases(200, 50, ALL, seed)))
    check(found, 200, 50)
    assert all(now[0] == "raised" for of_rank in found for case, now in of_rank if case.wrong)


def by_peers(group, asked):
    in_parts(None)
    return outcomes(group, CPU, "peer", asked, lambda: None, recovers=True)


@pytest.mark.exhaustive
@pytest.mark.parametrize("seed", [1, 2])
def test_no_group_is_lost_by_peers(ranks, seed):
    check(ranks.values(2, by_peers, list(cases(60, 26, ALL[:-1], seed, widest=8)), limit=300), 60, 26)
