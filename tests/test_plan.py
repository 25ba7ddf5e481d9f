"""The planner as a pure function: every shape has a plan, and every plan covers its rows."""

from dataclasses import FrozenInstanceError, fields, replace

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from products import QUICK
from shapes import ALIGNMENTS, FEW, MANY, PRIME, STRATEGIES, edges, widths

from fused_softmax.core.plan import (
    H200,
    VECTOR_BYTES,
    Device,
    candidate,
    fetches_ahead,
    parts_held,
    plan_loss,
    plan_reduction,
    plan_rows,
    row_rung_ends,
)
from fused_softmax.ops.attention.plan.tiles import blocks_of
from fused_softmax.ops.softmax.column_plan import plan_columns

SMALL_GPU = Device("small", "cuda", (8, 6), 16, shared_bytes=100 * 1024, l2_bytes=4 * 2**20)
TINY_GPU = Device("tiny", "cuda", (7, 5), 1)
A100 = Device("NVIDIA A100", "cuda", (8, 0), 108, shared_bytes=164 * 1024, l2_bytes=40 * 2**20)
MI300 = Device("AMD Instinct MI300X", "hip", (9, 4), 304, registers=131072, shared_bytes=64 * 1024)
DEVICES = (H200, A100, SMALL_GPU, TINY_GPU, MI300)
ITEMSIZES = (2, 4, 8)

held = settings(max_examples=150 if QUICK else 600, derandomize=True, print_blob=True, deadline=None, database=None)
sizes = st.one_of(st.integers(1, 2**27), st.integers(1, 70_000), st.integers(0, 27).map(lambda power: 2**power))
row_counts = st.one_of(st.integers(1, 2**20), st.integers(1, 300))
itemsizes = st.sampled_from(ITEMSIZES)
alignments = st.sampled_from(ALIGNMENTS)
devices = st.sampled_from(DEVICES)


def is_power_of_two(n):
    return n >= 1 and n & (n - 1) == 0


def bodies(plan):
    """The lengths of the aligned part of a row that a plan has to serve, from the longest to the shortest."""
    if plan.alignment != "shifted":
        return [plan.n_cols // plan.vector * plan.vector]
    return sorted({(plan.n_cols - head) // plan.vector * plan.vector for head in range(plan.vector)}, reverse=True)


def check(plan, device):
    """All that a kernel takes for granted of its plan."""
    assert is_power_of_two(plan.block_rows)
    assert is_power_of_two(plan.block_cols)
    assert is_power_of_two(plan.num_warps)
    assert plan.num_warps <= 32
    assert plan.vector == (1 if plan.alignment == "scalar" else VECTOR_BYTES // plan.itemsize)
    assert plan.block_cols >= plan.vector
    assert plan.block_cols % plan.vector == 0
    assert plan.block_rows * plan.block_cols <= 2**20, "Triton's limit of a tensor"

    longest, shortest = bodies(plan)[0], bodies(plan)[-1]
    assert plan.part_cols % plan.vector == 0
    assert plan.parts * plan.part_cols >= longest, "the parts cover the row"
    assert (plan.parts - 1) * plan.part_cols < longest, "the last part is not empty"
    if plan.strategy == "stream":
        assert plan.part_cols % (plan.pieces * plan.block_cols) == 0
    else:
        assert plan.pieces * plan.block_cols >= plan.part_cols, "the pieces cover a part"
        assert (plan.pieces - 1) * plan.block_cols < plan.part_cols, "the last piece is not empty"
    assert 0 <= plan.full_pieces <= plan.pieces
    for body in (longest, shortest):
        last_part = min(plan.part_cols, body - (plan.parts - 1) * plan.part_cols)
        assert plan.full_pieces * plan.block_cols <= max(0, last_part), "a piece without mask reads past its part"

    if plan.strategy in ("tile", "row"):
        assert plan.parts == 1
    if plan.strategy != "tile":
        assert plan.block_rows == 1
    if plan.strategy == "split":
        assert is_power_of_two(plan.lanes)
        assert plan.parts <= plan.lanes
        assert 1 <= plan.copies <= plan.lanes
        assert plan.slots_per_row == plan.parts * plan.copies
    else:
        assert plan.slots_per_row == 0
    if plan.strategy == "stream":
        assert is_power_of_two(plan.lanes)
        assert plan.parts <= plan.lanes <= 4096
    assert 0 <= plan.prefetch < max(1, plan.programs)
    assert plan.prefetch == 0 or plan.alignment != "scalar"

    assert plan.programs == -(-plan.n_rows // plan.block_rows) * plan.parts
    assert plan.programs < 2**31, "Triton drops a larger grid"
    assert plan.writes == plan.n_rows * plan.n_cols
    assert plan.reads == plan.writes * (2 if plan.strategy == "stream" else 1)


@settings(held, max_examples=500 if QUICK else 3000)
@given(row_counts, sizes, itemsizes, devices, alignments)
def test_every_shape_has_a_plan_that_covers_it(n_rows, n_cols, itemsize, device, alignment):
    plan = plan_rows(n_rows, n_cols, itemsize, device, alignment=alignment)
    check(plan, device)
    assert (plan.n_rows, plan.n_cols, plan.itemsize) == (n_rows, n_cols, itemsize)
    possible = "shifted" if alignment == "even" and n_cols % (VECTOR_BYTES // itemsize) else alignment
    assert plan.alignment in (possible, "scalar"), "short rows may be read by elements, no other change"
    assert plan == plan_rows(n_rows, n_cols, itemsize, device, alignment=alignment)
    if plan.strategy == "split":
        assert 1 < plan.parts <= parts_held(plan, device), "programs that wait must fit the chip together"


@pytest.mark.parametrize("itemsize", ITEMSIZES)
@pytest.mark.parametrize("alignment", ALIGNMENTS)
def test_around_every_edge(itemsize, alignment):
    for n_cols in [*widths(itemsize, alignment), 2**27, 2**27 - 1, PRIME]:
        for n_rows in (1, FEW, 131, 132, 133, MANY, 2**20):
            check(plan_rows(n_rows, n_cols, itemsize, H200, alignment=alignment), H200)


@given(
    st.sampled_from(STRATEGIES), st.integers(1, 5000), st.integers(1, 10_000), itemsizes, alignments,
    st.sampled_from([1, 2, 4, 8, None]), st.sampled_from([64, 100, 256, 1000, None]), st.sampled_from([1, 2, 3, None]),
)  # fmt: skip
@held
def test_any_strategy_covers_any_shape(strategy, n_rows, n_cols, itemsize, alignment, num_warps, part_cols, copies):
    assume(strategy != "split" or itemsize < 8)
    choices = {"num_warps": num_warps, "part_cols": part_cols, "copies": copies}
    if strategy in ("tile", "row"):
        choices.pop("part_cols")
    choices = {name: choice for name, choice in choices.items() if choice is not None}
    plan = candidate(strategy, n_rows, n_cols, itemsize, H200, alignment=alignment, **choices)
    assert plan.strategy == strategy
    check(plan, H200)
    assert num_warps in (None, plan.num_warps)


def test_choices_are_taken():
    plan = candidate("tile", 100, 300, 4, H200, block_rows=8, block_cols=64, num_warps=2)
    assert (plan.block_rows, plan.block_cols, plan.num_warps, plan.pieces) == (8, 64, 2, 5)
    plan = candidate(
        "split", 1000, 65536, 2, H200, part_cols=4096, num_warps=8, copies=5, lanes=64, poll_last_first=True, prefetch=7
    )
    assert (plan.part_cols, plan.parts, plan.num_warps, plan.copies) == (4096, 16, 8, 5)
    assert (plan.lanes, plan.poll_last_first, plan.prefetch) == (64, True, 7)


@pytest.mark.parametrize(
    ("strategy", "choices"),
    [
        ("tile", {"block_rows": 3}), ("tile", {"block_cols": 100}), ("tile", {"block_rows": 0}),
        ("row", {"num_warps": 3}), ("row", {"block_cols": 1000}), ("row", {"num_warps": 0}), ("row", {"num_warps": -4}),
        ("split", {"part_cols": 0}), ("split", {"part_cols": -64}), ("stream", {"num_warps": 5}),
        ("split", {"part_cols": 64, "lanes": 8}), ("split", {"lanes": 33}), ("split", {"copies": 0}),
        ("split", {"copies": 64, "lanes": 32}), ("row", {"prefetch": -1}), ("row", {"blok_cols": 128}),
        ("stream", {"part_cols": 512, "num_warps": 1, "lanes": 1}),
    ],
    ids=str,
)  # fmt: skip
def test_impossible_choices_are_refused(strategy, choices):
    with pytest.raises(ValueError, match=r".+"):
        candidate(strategy, 1000, 4096, 4, H200, **choices)


def test_an_unknown_strategy_is_refused():
    with pytest.raises(ValueError, match="column"):
        candidate("column", 10, 10, 4, H200)


@pytest.mark.parametrize(("n_rows", "n_cols"), [(0, 5), (5, 0), (-1, 5)])
def test_a_shape_of_nothing_is_refused(n_rows, n_cols):
    for strategy in STRATEGIES:
        with pytest.raises(ValueError, match=r".+"):
            candidate(strategy, n_rows, n_cols, 4, H200)
    for plan in (plan_rows, plan_loss, plan_reduction):
        with pytest.raises(ValueError, match=f"got {n_rows} x {n_cols}"):
            plan(n_rows, n_cols, 4, H200)


def test_fp64_is_never_split():
    with pytest.raises(ValueError, match="itemsize is 8"):
        candidate("split", 10, 65536, 8, H200)
    for n_cols in widths(8):
        for n_rows in (1, MANY):
            assert plan_rows(n_rows, n_cols, 8, H200).strategy != "split"


@pytest.mark.parametrize("itemsize", ITEMSIZES)
def test_every_strategy_is_reached(itemsize):
    reached = {
        plan_rows(n_rows, n_cols, itemsize, H200, alignment=alignment).strategy
        for n_rows in (1, FEW, MANY)
        for alignment in ALIGNMENTS
        for n_cols in [*widths(itemsize, alignment), 2**26, 2**27]
    }
    assert reached == set(STRATEGIES) - ({"split"} if itemsize == 8 else set())


def test_gradients_of_rows_that_leave_no_room_for_a_second_program_are_split():
    for n_cols, strategy in ((16384, "row"), (16392, "split"), (28672, "split"), (28680, "row"), (32768, "row")):
        assert plan_rows(MANY, n_cols, 2, H200, inputs=2).strategy == strategy
        assert plan_rows(MANY, n_cols, 2, H200).strategy == "row"


def test_split_kernels_are_held_to_the_registers_that_residency_leaves_them():
    """Those that hold a row and so many besides say how many programs reside, and these share all registers."""

    def registers(n_cols, besides, device=H200, **given):
        return plan_rows(MANY, n_cols, given.pop("itemsize", 2), device, **given).most_registers(device, besides)

    assert [registers(n_cols, 20) for n_cols in (32768, 65536, 131072, 2**20)] == [None, 56, 96, 96]
    assert [registers(n_cols, 16, inputs=2) for n_cols in (16384, 65536, 2**20)] == [None, 80, 80]
    assert registers(50257, 16, inputs=2, alignment="shifted") == 128
    assert [registers(131072, besides, itemsize=4) for besides in (0, 32, 33, 64, 100, 200)] == [
        64,
        96,
        128,
        128,
        168,
        None,
    ]
    assert registers(131072, 20, A100) is None
    short = candidate("split", 64, 2048, 2, H200, num_warps=4, part_cols=512)
    assert short.most_registers(H200, 4) == 32  # of 16 programs of 128 threads, which are all that may reside
    few = plan_rows(1, 65536, 2, H200)
    assert (few.strategy, few.num_warps, few.most_registers(H200, 20)) == ("split", 1, None)


def test_rows_that_no_chip_holds_are_streamed():
    for itemsize in ITEMSIZES:
        assert plan_rows(1, 2**27, itemsize, TINY_GPU).strategy == "stream"
        plan = plan_rows(MANY, 2**27, itemsize, H200)
        assert (plan.strategy, plan.poll_last_first) == ("stream", False)


def test_a_gpu_of_one_multiprocessor_never_waits_for_what_it_cannot_hold():
    for n_cols in widths(2):
        plan = plan_rows(1, n_cols, 2, TINY_GPU)
        assert plan.strategy != "split" or plan.parts <= parts_held(plan, TINY_GPU)


@pytest.mark.parametrize("itemsize", ITEMSIZES)
def test_edges_are_where_plans_change(itemsize):
    """The ladders that tests derive their widths from are the planner's: past most edges something else is chosen."""

    def decision(n_rows, n_cols, alignment):
        plan = plan_rows(n_rows, n_cols, itemsize, H200, alignment=alignment)
        # Per program, whatever the number of programs: a wider row has more pieces anyway.
        return plan.strategy, plan.block_rows, plan.block_cols, plan.num_warps, plan.alignment, plan.prefetch > 0

    for edge in edges(itemsize, "shifted"):
        changes = [
            decision(n_rows, edge, alignment) != decision(n_rows, edge + 1, alignment)
            for n_rows in (1, FEW, MANY)
            for alignment in ALIGNMENTS
        ]
        close = plan_rows(MANY, edge, itemsize, H200), plan_rows(MANY, edge + 64, itemsize, H200)
        assert any(changes) or close[0].part_cols != close[1].part_cols or close[0].prefetch != close[1].prefetch, edge


def test_plans_are_frozen_values():
    plan = plan_rows(10, 10, 4, H200)
    with pytest.raises(FrozenInstanceError):
        plan.parts = 2
    assert hash(plan) == hash(replace(plan))
    assert {field.name for field in fields(plan)} >= {"strategy", "vector", "parts"}


@pytest.mark.parametrize("inputs", [1, 2])
@pytest.mark.parametrize("itemsize", [2, 4, 8])
def test_every_plan_says_why_and_on_which_measurement(itemsize, inputs):
    for n_cols in row_rung_ends(itemsize, H200, inputs):
        for n_rows in (3, 4096):
            for alignment in ("even", "shifted", "scalar"):
                plan = plan_rows(n_rows, n_cols, itemsize, H200, alignment=alignment, inputs=inputs)
                said = plan.reasons
                assert said[0].startswith(f"{plan.strategy}: ")
                text = " ".join(said)
                assert ("by elements" in text) == (plan.alignment == "scalar")
                assert ("fetched into L2" in text) == (plan.prefetch > 0)
                if plan.strategy == "row":
                    assert f"{plan.num_warps} warps for rows of at most" in text
                if plan.strategy == "split":
                    assert f"parts of {plan.part_cols} columns" in text


def test_a_reason_names_the_rung_and_its_note():
    def second(*arguments, plan=plan_rows, **given):
        return plan(*arguments, H200, **given).reasons[1]

    assert second(4096, 4096, 2).startswith("8 warps for rows of at most 32768 columns (1024 1.01, 4096 1.00")
    assert second(4096, 264, 2).startswith(
        "8 rows a program, 128 columns at a time, for rows of at most 448 columns (136 0.96"
    )
    assert "so that few rows fill the chip (1 x 32768 2.5 us" in second(1, 32768, 4)
    assert "unmeasured" in second(4096, 4096, 8)
    assert second(4096, 4096, 2, causal=True).startswith("4 warps for rows of at most 16384 columns (4096 with 4 0.96")
    assert second(4096, 256, 2, plan=plan_reduction).startswith(
        "8 rows a program, 64 columns at a time, for rows of at most 320"
    )
    assert second(4096, 4096, 2, plan=plan_reduction).startswith("2 warps for rows of at most 8192 bytes (fp32 1024")


@pytest.mark.parametrize("itemsize", ITEMSIZES)
def test_losses_reductions_and_columns_say_why_too(itemsize):
    for n_rows in (3, MANY):
        for n_cols in (64, 700, 4096, 32768, 128256, 2**26):
            for alignment in ALIGNMENTS:
                given = (n_rows, n_cols, itemsize, H200)
                plans = [plan_loss(*given, alignment=alignment), plan_reduction(*given, alignment=alignment)]
                plans.append(plan_reduction(*given, alignment=alignment, writes=True))
                for plan in plans:
                    assert plan.reasons[0].startswith(f"{plan.strategy}: ")
                    assert all(plan.reasons)
            for holds in (True, False):
                plan = plan_columns(n_rows, n_cols, 512, itemsize, H200, holds=holds)
                assert plan is None or (plan.reasons[0].startswith("column: ") and len(plan.reasons) == 3)


def test_reasons_and_spans_do_not_count_when_plans_are_compared():
    plan = plan_rows(MANY, 4096, 2, H200)
    other = replace(plan, reasons=(), same_rows=(1, 1))
    assert plan == other
    assert hash(plan) == hash(other)
    assert "reasons" not in repr(plan)
    assert plan.data() == other.data()
    assert not {"reasons", "same_rows"} & plan.data().keys()
    assert replace(plan_columns(64, 4096, 512, 4, H200), reasons=()) == plan_columns(64, 4096, 512, 4, H200)


def test_a_loss_splits_a_row_of_32_warps_and_streams_what_the_chip_cannot_hold():
    assert (plan_rows(MANY, 32768, 4, H200).num_warps, plan_loss(MANY, 32768, 4, H200).strategy) == (32, "split")
    assert plan_loss(MANY, 16384, 8, H200) == plan_rows(MANY, 16384, 8, H200), "fp64 is not split"
    assert plan_loss(MANY, 4096, 2, H200) == plan_rows(MANY, 4096, 2, H200)
    lengths = [2**power for power in range(16, 23)]
    streamed = [n_cols for n_cols in lengths if plan_loss(MANY, n_cols, 2, H200).strategy == "stream"]
    assert streamed == [n_cols for n_cols in lengths if plan_rows(MANY, n_cols, 2, H200).parts > 132]
    assert streamed


def test_gradients_of_capped_losses_have_half_the_pieces_where_that_was_not_measured():
    for device, pieces in ((H200, 4), (A100, 2)):
        assert plan_reduction(MANY, 50257, 2, device, writes=True, capped=True).pieces == pieces
        assert plan_reduction(MANY, 50257, 2, device, writes=True).pieces == 4
        assert plan_reduction(MANY, 50257, 2, device, capped=True) == plan_reduction(MANY, 50257, 2, device)


def test_programs_fetch_ahead_where_the_gpu_can_and_the_next_data_is_known():
    plan = plan_rows(MANY, 4096, 2, H200)
    assert fetches_ahead(plan, H200, 2)
    assert not fetches_ahead(plan, H200, 2, causal=True)
    assert not fetches_ahead(plan, A100, 2)
    assert not fetches_ahead(plan, MI300, 2)
    assert not fetches_ahead(plan_rows(MANY, 4096, 4, H200), H200, 2), "held wider than it is read"
    assert not fetches_ahead(plan_rows(FEW, 4096, 2, H200), H200, 2)


def test_columns_are_held_to_registers_where_that_was_measured():
    held, read = (plan_columns(64, 4096, 512, 2, H200, holds=holds) for holds in (True, False))
    assert (held.most_registers(H200), read.most_registers(H200)) == (168, 64)
    assert held.most_registers(MI300) is None
    assert plan_columns(64, 4096, 512, 8, H200, holds=False).most_registers(H200) is None
    assert replace(held, num_warps=2).most_registers(H200) is None


def test_heads_of_16_bits_have_one_pattern_in_shared_memory():
    """ptxas mixed up the addresses of two patterns: dims 200 and 8 gave wrong outputs."""
    assert blocks_of(200, 8, 2) == (256, 64)
    assert blocks_of(8, 40, 2) == (64, 64)
    assert blocks_of(32, 8, 2) == (32, 32)
    assert blocks_of(200, 8, 4) == (256, 16)
