"""A plan's span of rows, `same_rows`: within it the planning call decides the same, and beyond it, otherwise."""

from dataclasses import replace
from functools import partial
from itertools import pairwise

import products
import pytest
from shapes import ALIGNMENTS, edges
from test_plan import DEVICES, TINY_GPU

from fused_softmax.core.plan import (
    H200,
    UNBOUNDED,
    candidate,
    plan_loss,
    plan_reduction,
    plan_rows,
    row_rung_ends,
    table_of,
)

CALLS = {
    "softmax": plan_rows,
    "causal": partial(plan_rows, causal=True),
    "gradient": partial(plan_rows, inputs=2),
    "loss": plan_loss,
    "logsumexp": plan_reduction,
    "gradient of logsumexp": partial(plan_reduction, writes=True),
    "gradient of capped losses": partial(plan_reduction, writes=True, capped=True),
}
WIDTHS = (1, 33, 128, 136, 512, 781, 1024, 1152, 4096, 8192, 8200, 16384, 20000, 24000, 32000, 32768, 50257, 100003)
LONG = (128256, 131072, 262144, 524296, 2**20, 2**22 + 8, 2**24)
STEPS = 60  # spans that are walked through from one row on; a stream has a span for every few rows


def spans(plan_of):
    """The spans that follow each other from 1 row on, each with its plan, as far as STEPS go."""
    n_rows = 1
    for _ in range(STEPS):
        plan = plan_of(n_rows)
        yield plan
        n_rows = plan.same_rows[1] + 1
        if n_rows > UNBOUNDED:
            return


def check(plan_of):
    previous = None
    for plan in spans(plan_of):
        least, greatest = plan.same_rows
        assert least == plan.n_rows <= greatest, "spans follow each other without a gap"
        for n_rows in {least, greatest, (least + greatest) // 2, min(least + 1, greatest), min(2**27, greatest)}:
            other = plan_of(n_rows)
            assert other == plan.with_rows(n_rows) == replace(plan, n_rows=n_rows)
            assert (other.reasons, other.same_rows) == (plan.reasons, plan.same_rows)
        if previous:
            assert previous.with_rows(previous.n_rows) == previous
            with pytest.raises(ValueError, match=f"to {previous.same_rows[1]} rows; got {least}"):
                previous.with_rows(least)
        previous = plan


@pytest.mark.parametrize("name", CALLS)
@pytest.mark.parametrize("device", DEVICES, ids=lambda device: device.name)
def test_within_its_span_a_plan_is_what_the_planner_gives(device, name):
    for itemsize in (2, 4, 8):
        for alignment in ALIGNMENTS:
            for n_cols in (*WIDTHS, *LONG, *edges(itemsize)[:: 9 if products.QUICK else 3]):
                check(lambda n_rows: CALLS[name](n_rows, n_cols, itemsize, device, alignment=alignment))  # noqa: B023


@pytest.mark.parametrize("name", CALLS)
def test_every_number_of_rows_up_to_more_than_any_threshold(name):
    for n_cols, itemsize, alignment in (
        (32768, 2, "even"),
        (50257, 2, "shifted"),
        (24000, 4, "even"),
        (700, 4, "even"),
    ):
        plan_of = partial(CALLS[name], n_cols=n_cols, itemsize=itemsize, device=H200, alignment=alignment)
        plan = plan_of(1)
        for n_rows in range(1, 2200):
            own = plan_of(n_rows)
            if n_rows > plan.same_rows[1]:
                plan = own
            assert own == plan.with_rows(n_rows)
            assert own.same_rows == plan.same_rows


@pytest.mark.parametrize("name", ["softmax", "causal", "gradient", "gradient of logsumexp"])
def test_beyond_its_span_the_planner_decides_otherwise(name):
    for itemsize in (2, 4, 8):
        for alignment in ("even", "shifted"):
            for n_cols in (*WIDTHS, *LONG):
                found = list(spans(lambda n_rows: CALLS[name](n_rows, n_cols, itemsize, H200, alignment=alignment)))  # noqa: B023
                for one, other in pairwise(found):
                    assert replace(one, n_rows=other.n_rows) != other or one.reasons != other.reasons, (one, other)


@pytest.mark.parametrize("itemsize", [2, 4])
def test_rows_of_every_length_up_to_one_program_have_few_spans(itemsize):
    """A cache that keeps a launch for a span serves any batch by a handful of them."""
    for n_cols in (128, 1000, 1024, 4096, 8192, *(n for n in row_rung_ends(itemsize, H200) if n <= 32768)):
        alignment = "even" if n_cols * itemsize % 16 == 0 else "shifted"
        found = list(spans(lambda n_rows: plan_rows(n_rows, n_cols, itemsize, H200, alignment=alignment)))  # noqa: B023
        assert len(found) <= (2 if n_cols <= 8192 else 7), n_cols
        assert found[-1].same_rows[1] == UNBOUNDED
        assert found[-1].n_rows <= max(H200.sm_count, 12 * 2**20 // (n_cols * itemsize)) + 1


def test_vocabularies_have_one_span_from_where_rows_are_not_few():
    for n_cols in (50257, 128256, 151936, 262144):
        for itemsize in (2, 4):
            alignment = "even" if n_cols % 8 == 0 else "shifted"
            assert plan_rows(4096, n_cols, itemsize, H200, alignment=alignment).same_rows[0] <= 302
            assert plan_rows(4096, n_cols, itemsize, H200, alignment=alignment).same_rows[1] == UNBOUNDED
    assert plan_rows(133, 128256, 2, H200).same_rows == plan_rows(10**6, 128256, 2, H200).same_rows
    assert plan_rows(1, 1024, 2, H200).same_rows == (1, 4096)
    assert plan_rows(4097, 1024, 2, H200).same_rows == (4097, UNBOUNDED)


def test_a_plan_that_was_asked_for_by_name_holds_for_its_own_rows():
    for strategy in ("tile", "row", "split", "stream"):
        assert candidate(strategy, 300, 4096, 4, H200).same_rows == (300, 300)
        assert candidate(strategy, 300, 4096, 4, TINY_GPU, num_warps=4).same_rows == (300, 300)


def test_spans_follow_a_users_table():
    ahead = {"name": "prefetch_bytes", "inputs": 1, "itemsize": 2, "rungs": [[None, 2**20]]}
    gpu = replace(H200, table=table_of([ahead]))
    assert plan_rows(1, 1024, 2, gpu).same_rows == (1, 512)
