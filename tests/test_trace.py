"""Recordings say what the kernels did, and end with torch's own result; of every kernel, in and out of a worker."""

import copy
import itertools
import json
import math
import pickle
import re
from dataclasses import dataclass
from html import unescape
from html.parser import HTMLParser
from pathlib import Path
from typing import Any, NamedTuple

import jsonschema
import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from click.testing import CliRunner
from hypothesis import given, settings
from hypothesis import strategies as st
from products import QUICK, pairwise
from test_classic import BLOCK_MAXIMA, BLOCK_SUMS, EXAMPLE, MAXIMA, OUTPUTS, PUBLISHED_OUTPUTS, PUBLISHED_SUMS, SUMS

from fused_softmax import route, sample, segment_softmax, trace
from fused_softmax.cli import main
from fused_softmax.core import files
from fused_softmax.core.kernels import exchange
from fused_softmax.register.table import OPERATORS
from fused_softmax.trace import asked, matrices, page, presets, run
from fused_softmax.trace.entries.attention import ATTENTION
from fused_softmax.trace.entries.routing import CHOSEN, ROUTES
from fused_softmax.trace.entries.rows import OURS
from fused_softmax.trace.entries.sampling import DRAWS, SEED
from fused_softmax.trace.entries.segments import SEGMENTS, lengths_of
from fused_softmax.trace.recorder import recorder
from fused_softmax.trace.recorder.encode import numbers, read_numbers
from fused_softmax.trace.recorder.hooks import interpreting
from fused_softmax.trace.recorder.recorder import Recorder
from fused_softmax.trace.recorder.story import Story, Told

NAMES = tuple(trace.kernels())
SOFTMAX = tuple(name for name, kernel in trace.kernels().items() if kernel.operation == "softmax")
# What writes a value for each element of the matrix, by a formula that holds for rows of any length.
MATRICES = tuple(
    name
    for name, kernel in trace.kernels().items()
    if kernel.operation not in ("sample", "route", "segment_softmax", "attention")
)
every_kernel = pytest.mark.parametrize("name", NAMES)
every_matrix = pytest.mark.parametrize("name", MATRICES)
every_softmax = pytest.mark.parametrize("name", SOFTMAX)
interpreted = pytest.mark.skipif(not interpreting(), reason="looks into the process that interprets")


def test_the_table_of_operators_names_what_is_recorded():
    assert {name for each in OPERATORS for name in each.recordings} == {
        kernel.name for kernel in (*OURS, *DRAWS, *ROUTES, *SEGMENTS, *ATTENTION)
    }


@pytest.fixture(scope="module")
def example():
    return {name: trace.record(name, presets.example_of(name), block=4) for name in NAMES}


def only(recording, role):
    return next(tensor for tensor in recording["tensors"] if tensor["role"] == role)


def result(recording):
    tensor = only(recording, "output")
    return torch.tensor(read_numbers(tensor["after"]), dtype=torch.float64).view(tensor["shape"])


def strict(schema):
    """The schema with no field that it does not name, so that a recorder writes only what is documented."""
    if isinstance(schema, dict):
        if "properties" in schema and "additionalProperties" not in schema:
            schema["additionalProperties"] = False
        for value in schema.values():
            strict(value)
    elif isinstance(schema, list):
        for value in schema:
            strict(value)
    return schema


@every_kernel
def test_a_recording_is_as_the_schema_says(name, example):
    jsonschema.Draft202012Validator.check_schema(trace.schema())
    jsonschema.validate(example[name], strict(trace.schema()))


def test_the_schema_refuses_what_is_none(example):
    for path, value in (
        (("steps", 0, "phase"), -1),
        (("tensors", 0, "before", 0), "Infinity"),
        (("rows", 0, "status"), "fine"),
        (("schema",), 2),
    ):
        broken = copy.deepcopy(example["online"])
        holder = broken
        for key in path[:-1]:
            holder = holder[key]
        holder[path[-1]] = value
        with pytest.raises(jsonschema.ValidationError):
            jsonschema.validate(broken, trace.schema())


@every_kernel
def test_every_index_points_at_something(name, example):
    recording = example[name]
    sizes = {key: len(recording[key]) for key in ("sources", "launches", "frames", "phases", "tensors")}
    for at, frame in enumerate(recording["frames"]):
        assert frame["source"] < sizes["sources"]
        assert frame["launch"] < sizes["launches"]
        assert frame["parent"] is None or frame["parent"] < at
    for step in recording["steps"]:
        frame = recording["frames"][step["frame"]]
        source = recording["sources"][frame["source"]]
        assert source["first_line"] <= step["line"] < source["first_line"] + len(source["lines"])
        assert step["phase"] < sizes["phases"]
        assert step["rows"]
        assert set(step["rows"]) <= set(range(len(presets.example_of(name))))
        for access in step.get("loads", []) + step.get("stores", []) + step.get("holds", []):
            assert max(access["at"], default=0) < math.prod(recording["tensors"][access["tensor"]]["shape"])


@every_kernel
def test_stores_add_up_to_what_memory_holds_after(name, example):
    recording = example[name]
    memory = [list(tensor["before"]) for tensor in recording["tensors"]]
    for step in recording["steps"]:
        for store in step.get("stores", []) + step.get("holds", []):
            for at, value in zip(store["at"], store["data"], strict=True):
                memory[store["tensor"]][at] = value
    assert memory == [tensor["after"] for tensor in recording["tensors"]]
    assert "nan" not in memory[recording["tensors"].index(only(recording, "output"))]


def test_every_note_of_the_registry_stands_by_a_step():
    kept = presets.load()
    for name, kernel in trace.kernels().items():
        said = {step["note"] for recording in kept if recording["kernel"] == name for step in recording["steps"]
                if "note" in step}  # fmt: skip
        assert said == {note for told in kernel.story.told.values() for note in told.notes.values()}


@every_kernel
def test_phases_come_in_order_and_all_of_them(name, example):
    recording = example[name]
    assert {step["phase"] for step in recording["steps"]} == set(range(len(recording["phases"])))
    for _, steps in itertools.groupby(
        sorted(recording["steps"], key=lambda step: recording["frames"][step["frame"]]["program"]),
        lambda step: (recording["frames"][step["frame"]]["program"], recording["frames"][step["frame"]]["launch"]),
    ):
        phases = [step["phase"] for step in steps]
        again = name in ("persistent", "draw", "route", "segments", "attention")  # which do the same again
        assert again or phases == sorted(phases)


@every_softmax
def test_the_worked_example(name, example):
    recording = example[name]
    assert [row["max"] for row in recording["rows"]] == list(MAXIMA)
    assert tuple(round(row["sum"], 3) for row in recording["rows"]) == SUMS
    assert [[round(value, 3) for value in row] for row in result(recording).tolist()] == [list(row) for row in OUTPUTS]
    assert all(
        row["status"] == "ok" and row["probability_sum"] == pytest.approx(1, abs=1e-6) for row in recording["rows"]
    )


def computed(recording, row, text):
    """What an expression came to, each time it was computed for a row."""
    return [
        value["value"]["data"]
        for step in recording["steps"]
        for value in step.get("computed", [])
        if step["rows"] == [row] and value["text"] == text
    ]


def rounded(values):
    return tuple(tuple(round(value, 3) for value in tile) for tile in values)


def test_the_worked_example_tile_by_tile(example):
    recording = example["hybrid-tiled"]
    for row, values in enumerate(EXAMPLE):
        x = torch.tensor(values, dtype=torch.float64).view(2, 4)
        e = (x - x.max()).exp()
        assert rounded(computed(recording, row, "tl.max(x, axis=0)")) == tuple((m,) for m in BLOCK_MAXIMA[row])
        assert rounded(computed(recording, row, "tl.sum(tl.exp(x - m).to(SUM), axis=0)")) == tuple(
            (s,) for s in BLOCK_SUMS[row]
        )
        assert rounded(computed(recording, row, "tl.exp(x - m)")) == rounded((*e.tolist(), *e.tolist()))


def test_online_rescales_by_what_the_maximum_rose():
    recording = trace.record("online", presets.RISING, block=2)
    assert rounded(computed(recording, 0, "tl.exp(m - origin)")) == ((0.0,), *3 * ((0.135,),))
    assert rounded(computed(recording, 0, "tl.exp(x - origin)")) == 4 * ((0.368, 1.0),)


def test_what_a_local_is_set_to_is_told_once(example):
    for step in example["row"]["steps"]:
        for value in step.get("computed", []):
            assert value["value"] not in step.get("set", {}).values()


def test_the_gradient_is_that_of_the_first_probability(example):
    x = torch.tensor(EXAMPLE, dtype=torch.float64, requires_grad=True)
    torch.softmax(x, 1)[:, 0].sum().backward()
    torch.testing.assert_close(result(example["backward"]), x.grad, rtol=1e-6, atol=1e-7)
    assert all(abs(row["gradient_sum"]) < 1e-6 for row in example["backward"]["rows"])


@pairwise(strength=1)
@every_matrix
@pytest.mark.parametrize("shape", [(3, 8), (2, 5), (1, 3)], ids=str)
def test_traffic_is_what_the_formula_says(name, shape):
    formula = trace.kernels()[name].formula
    traffic = trace.record(name, torch.arange(math.prod(shape)).view(shape) % 7, block=2)["traffic"]
    assert (traffic["reads"], traffic["writes"]) == (formula.reads(*shape), formula.writes(*shape))
    assert traffic["formula"] == str(formula)
    inputs = 2 if name == "backward" else 1
    assert (traffic["floor_reads"], traffic["floor_writes"]) == (inputs * math.prod(shape), math.prod(shape))


@settings(max_examples=8 if QUICK else 25, deadline=None, derandomize=True)
@given(
    name=st.sampled_from(MATRICES),
    shape=st.tuples(st.integers(1, 6), st.integers(2, 11)),
    block=st.sampled_from([1, 2, 4, 8]),
    dtype=st.sampled_from(["float32", "float16", "bfloat16"]),
    seed=st.integers(0, 99),
)
def test_any_small_matrix(name, shape, block, dtype, seed):
    x = (8 * torch.randn(shape, generator=torch.Generator().manual_seed(seed))).to(getattr(torch, dtype))
    if name == "hybrid-tiled" and shape[1] <= block:
        return
    recording = trace.record(name, x, block=block)
    formula = trace.kernels()[name].formula
    assert recording["traffic"]["reads"] == formula.reads(*shape)
    assert recording["traffic"]["writes"] == formula.writes(*shape)
    assert {row for step in recording["steps"] for row in step["rows"]} == set(range(shape[0]))
    y = torch.softmax(x, 1).double()
    truth = y
    if name == "backward":
        truth = y * ((torch.arange(shape[1]) == 0).double() - y[:, :1])
    if name == "cross-entropy":
        truth = (y - torch.nn.functional.one_hot(torch.arange(shape[0]) % shape[1], shape[1])) / shape[0]
    assert (result(recording) - truth).abs().max() <= 4 * torch.finfo(x.dtype).eps


@pytest.mark.parametrize("n_cols", [8, 24, 40])
def test_a_recorded_draw_is_the_token_that_sample_draws(n_cols):
    x = torch.randn(4, n_cols, generator=torch.Generator().manual_seed(n_cols))
    recording = trace.record("draw", x)
    wanted = sample(x, seed=SEED, position=torch.arange(4)).tokens
    assert only(recording, "output")["after"] == wanted.tolist()
    formula = trace.kernels()["draw"].formula
    traffic = recording["traffic"]
    assert (traffic["reads"], traffic["writes"]) == (formula.reads(4, n_cols), formula.writes(4, n_cols))


@pytest.mark.parametrize("n_experts", [2, 8, 40])
def test_a_recorded_route_is_what_route_returns(n_experts):
    x = torch.randn(4, n_experts, generator=torch.Generator().manual_seed(n_experts))
    recording = trace.record("route", x)
    weights, indices = (each for each in recording["tensors"] if each["role"] == "output")
    wanted = route(x, CHOSEN)
    assert indices["after"] == wanted.indices.flatten().tolist()
    torch.testing.assert_close(torch.tensor(weights["after"]), wanted.weights.flatten(), rtol=1e-6, atol=0)
    formula = trace.kernels()["route"].formula
    traffic = recording["traffic"]
    assert (traffic["reads"], traffic["writes"]) == (formula.reads(4, n_experts), formula.writes(4, n_experts))


@pytest.mark.parametrize(("n_cols", "block"), [(1, 4), (7, 1), (18, 2), (32, 4), (40, 2)])
def test_recorded_segments_are_what_segment_softmax_returns(n_cols, block):
    x = torch.randn(2, n_cols, generator=torch.Generator().manual_seed(n_cols)) * 3
    recording = trace.record("segments", x, block=block)
    offsets, lengths = torch.tensor(recording["options"]["offsets"]), torch.tensor(lengths_of(n_cols))
    assert offsets.diff().equal(lengths)
    assert (int(offsets[0]), int(offsets[-1]), int(lengths.min())) == (0, n_cols, 0)
    wanted = segment_softmax(x.double(), offsets, dim=1)
    torch.testing.assert_close(result(recording), wanted, rtol=1e-6, atol=1e-9)
    in_a_tile = lengths <= 4 * max(1, block // 2)
    if n_cols in (18, 32):
        assert in_a_tile.tolist() == [True] * 4 + [False] * 2
        assert lengths[-1] > 4 * block >= lengths[-2]  # a hub, and a segment that one program reads
    reads, traffic = int((2 * torch.where(in_a_tile, 1, 2) * lengths).sum()), recording["traffic"]
    assert (traffic["reads"], traffic["writes"]) == (reads, 2 * n_cols)
    assert recording["rows"] == []


@interpreted
def test_a_program_that_comes_late_is_stood_in_for_and_writes_its_part_all_the_same():
    wanted = asked.asked("split", EXAMPLE, 4)
    late = run.kernel(wanted, late=frozenset({3}))  # the second of row 1
    assert result(late).equal(result(run.kernel(wanted)))
    told = [step["message"] for step in late["steps"] if "message" in step]
    missing = [each for each in told if each.get("missing")]
    assert [(each["kind"], each["row"], each["from"], each["to"]) for each in missing] == [("collect", 1, 1, 0)]
    published = next(each for each in told if each["kind"] == "publish" and (each["row"], each["from"]) == (1, 1))
    assert (missing[0]["m"], missing[0]["s"]) == (published["m"], published["s"])
    first = {each: at for at, each in reversed(list(enumerate(program_of(late))))}
    assert all(at < first[3] for program, at in first.items() if program != 3)
    assert "formula" not in late["traffic"]


def program_of(recording):
    return [recording["frames"][step["frame"]]["program"][0] for step in recording["steps"]]


@every_matrix
def test_one_element(name):
    if name == "hybrid-tiled":
        with pytest.raises(ValueError, match="1 columns are not longer than 1; take a smaller block, or hybrid-fast"):
            trace.record(name, [[5.0]])
    else:
        assert result(trace.record(name, [[5.0]])).item() == (0 if name in ("backward", "cross-entropy") else 1)


def test_what_naive_moves(example):
    assert example["naive"]["traffic"] == {
        "reads": 5 * 24 + 2 * 3, "writes": 3 * 24 + 2 * 3, "floor_reads": 24, "floor_writes": 24, "passes": 5,
        "formula": "5MN + 2M read, 3MN + 2M written",
    }  # fmt: skip
    assert [launch["name"] for launch in example["naive"]["launches"]] == [
        "aten.amax", "aten.sub", "aten.exp", "aten.sum", "aten.div",
    ]  # fmt: skip
    lines = example["naive"]["sources"][0]["lines"]
    first = example["naive"]["sources"][0]["first_line"]
    assert [lines[step["line"] - first].split()[0] for step in example["naive"]["steps"]] == [
        "m",
        "shifted",
        "e",
        "s",
        "return",
    ]


def states(recording, row):
    return [
        (entry.get("m"), entry.get("s"))
        for step in recording["steps"]
        for entry in step.get("state", [])
        if entry["row"] == row
    ]


def test_states_run_as_the_recurrence_does(example):
    x = torch.tensor(
        EXAMPLE[2], dtype=torch.float64
    )  # its maximum is in the first tile; that of the reversed, in the last
    for row in (x, x.flip(0)):
        recording = trace.record("online", row[None], block=4, dtype="float32")
        m, s = row[:4].max(), (row[:4] - row[:4].max()).exp().sum()
        top = row.max()
        found = [pair for pair in states(recording, 0) if None not in pair]
        assert (m.item(), pytest.approx(s.item(), rel=1e-6)) in found
        assert found[-1] == (top.item(), pytest.approx((row - top).exp().sum().item(), rel=1e-6))


@pytest.mark.parametrize(("name", "letters"), [("split", "ms"), ("backward", "d")])
def test_parts_publish_before_any_of_their_row_collects(name, letters):
    recording = trace.record(name, EXAMPLE, block=2)
    messages = [step["message"] for step in recording["steps"] if "message" in step]
    x = torch.tensor(EXAMPLE, dtype=torch.float64)
    y, dy = torch.softmax(x, 1), torch.zeros(3, 8)
    dy[:, 0] = 1
    for row in range(3):
        kinds = [message["kind"] for message in messages if message["row"] == row]
        assert kinds == ["publish"] * 4 + ["collect"] * 16
        ways = [(each["from"], each["to"]) for each in messages if each["row"] == row and each["kind"] == "collect"]
        assert sorted(ways) == list(itertools.product(range(4), repeat=2))
        for message in messages:
            if message["row"] == row:
                part = slice(2 * message["from"], 2 * message["from"] + 2)
                m = x[row, part].max()
                truth = {
                    "m": m,
                    "s": (x[row, part] - m).exp().sum(),
                    "d": (y[row, 0] if part.start == 0 else y[0, 0] * 0) ** 1,
                }
                assert all(message[letter] == pytest.approx(truth[letter].item(), abs=1e-6) for letter in letters)
    assert recording["launches"][0]["grid"] == [12, 1, 1]
    assert len(recording["launches"]) == 1


@every_kernel
def test_no_program_of_a_recording_stands_in_for_another(name, example):
    names = {source["name"] for source in example[name]["sources"]}
    assert not {each for each in names if each.endswith("_alone") or each.startswith("stand_in")}


SPECIAL = [
    [-math.inf, -math.inf, 1.0, 2.0],
    [1.0, 2.0, -math.inf, -math.inf],
    [-math.inf] * 4,
    [0.0, math.nan, 1.0, 2.0],
    [0.0, math.inf, 1.0, 2.0],
]


@pairwise(strength=1)
@every_softmax
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_infinities_and_nan_survive(name, dtype):
    recording = json.loads(json.dumps(trace.record(name, SPECIAL, block=2, dtype=dtype), allow_nan=False))
    assert [row["status"] for row in recording["rows"]] == ["ok", "ok", "empty", "nan", "nan"]
    x = torch.tensor(SPECIAL, dtype=getattr(torch, dtype))
    torch.testing.assert_close(result(recording), torch.softmax(x, 1).double(), rtol=1e-2, atol=1e-6, equal_nan=True)
    assert read_numbers(recording["tensors"][0]["before"])[:4] == SPECIAL[0]


@pairwise(strength=1)
@every_kernel
@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16", "float64"])
def test_every_dtype_that_is_offered(name, dtype):
    x = torch.tensor(presets.example_of(name)) * 3
    if dtype not in trace.kernels()[name].dtypes:
        with pytest.raises(ValueError, match=f"{name} takes .*, not {dtype}"):
            trace.record(name, x, dtype=dtype)
        return
    recording = trace.record(name, x, dtype=dtype)
    assert only(recording, "output")["dtype"] == {"draw": "int64", "route": "float32"}.get(name, dtype)
    if name in SOFTMAX:
        eps = torch.finfo(getattr(torch, dtype)).eps
        truth = torch.softmax(x.to(getattr(torch, dtype)).double(), 1)
        assert (result(recording) - truth).abs().max() <= (4 if name == "naive" else 1) * max(eps, 3e-7)


@pytest.mark.parametrize("dtype", ["float32", "float16", "float64"])
def test_floats_are_the_shortest_that_read_back(dtype):
    values = np.array([0.1, 1 / 3, 1e-7, 65504, -0.0, 3.0], dtype)
    written = numbers(values, dtype)
    assert (np.array(written, dtype) == values).all()
    assert written[0] == 0.1
    assert [len(str(value)) for value in written] == [len(str(float(str(value)))) for value in values]
    assert numbers(np.array([math.inf, -math.inf, math.nan], dtype), dtype) == ["inf", "-inf", "nan"]


def test_bfloat16_reads_back_from_few_digits():
    values = torch.randn(500, generator=torch.Generator().manual_seed(0)).bfloat16()
    written = numbers(values.view(torch.uint16).numpy(), "bfloat16")
    assert (torch.tensor(written, dtype=torch.float64).bfloat16() == values).all()
    assert max(len(f"{abs(value):.9g}".replace(".", "").lstrip("0")) for value in written) <= 4


def test_integers_past_a_double_are_text():
    assert numbers(np.array([2**53, 2**53 + 1, -(2**62)]), "int64") == [2**53, str(2**53 + 1), str(-(2**62))]


@pytest.mark.exhaustive
def test_a_worker_records_what_this_process_does(example):
    worker = trace._worker()
    assert worker.ask(run.kernel, asked.asked("split", EXAMPLE, 4)) == example["split"]
    with pytest.raises(ValueError, match="8 columns are not longer than 8"):
        worker.ask(run.kernel, asked.asked("hybrid-tiled", EXAMPLE, 8))


@pytest.mark.exhaustive
def test_a_late_worker_is_ended_and_the_next_recording_has_another():
    worker = trace.Worker()
    worker.start()
    with pytest.raises(trace.Late, match=r"took longer than 0\.05 s and was stopped"):
        worker.ask(run.kernel, asked.asked("hybrid-tiled", [[1.0] * 1024], 1), timeout=0.05)
    assert worker.ask(run.kernel, asked.asked("naive", [[1.0]]))["kernel"] == "naive"
    worker.close()


@pytest.mark.parametrize(
    ("asked", "message"),
    [
        (("fast", [[1.0]]), "unknown kernel 'fast'; known: naive, persistent"),
        ((["naive"], [[1.0]]), r"unknown kernel \['naive'\]"),
        (("online", [1.0]), "row 0 must be a list of numbers, got float"),
        (("online", "abc"), "matrix must be a list of rows of numbers, got text"),
        (("online", {"a": 1}), "matrix must be a list of rows of numbers, got an object"),
        (("online", [[1.0], [1.0, 2.0]]), "row 0 has 1 column, row 1 has 2"),
        (("online", []), "at least one row and one column, got 0 x 0"),
        (("online", [[]]), "at least one row and one column, got 1 x 0"),
        (("online", [[1.0, "two"]]), "row 0, column 1: 'two' is not a number"),
        (("online", [[1.0, True]]), "row 0, column 1: must be a number, got true or false"),
        (("online", [[10**400]]), "row 0, column 0: an integer too large"),
        (("online", [[1e39]]), r"row 0, column 0: 1e\+39 is past 3\.40282e\+38, the largest float32"),
        (("online", torch.zeros(65, 64)), "65 x 64 = 4160 elements"),
        (("online", torch.zeros(2, 2, 2)), "must be 2-D, .* got 3-D"),
        (("online", [[1.0]], 3), "block must be a power of two from 1 to 4096, got 3"),
        (("online", [[1.0]], -4), "got -4"),
        (("online", [[1.0]], True), "got True"),
        (("online", [[1.0]], 4, "int8"), "dtype must be one of float32, .* got 'int8'"),
        (("online", [[1.0]], 4, 7), "got 7"),
    ],
)
def test_what_cannot_be_asked(asked, message):
    kernel, matrix, *rest = asked
    with pytest.raises(ValueError, match=message):
        trace.record(kernel, matrix, **dict(zip(("block", "dtype"), rest, strict=False)))


# What the page is made of.


def alike(a, b, rel):
    """The same, but for last digits of floats, which one CPU's exp rounds otherwise than another's."""
    if isinstance(a, dict) and isinstance(b, dict):
        return a.keys() == b.keys() and all(alike(a[key], b[key], rel) for key in a)
    if isinstance(a, list) and isinstance(b, list):
        return len(a) == len(b) and all(map(alike, a, b, itertools.repeat(rel)))
    if isinstance(a, float) and isinstance(b, float):
        return a == pytest.approx(b, rel=rel, abs=rel)
    if isinstance(a, str) and isinstance(b, str) and a.isdecimal() and b.isdecimal():
        if abs(int(a) - int(b)) <= 2**37:  # a draw's key: a score in the upper bits
            return True
        # A message: two floats in bits.
        a, b = (np.array([int(text)], np.int64).view(np.float32).tolist() for text in (a, b))
        return alike([abs(each) for each in a], [abs(each) for each in b], rel)
    return type(a) is type(b) and a == b


@interpreted
def test_presets_are_what_the_kernels_do(monkeypatch):
    looks = re.search(r"^POLLS = tl.constexpr\((\d+)\)", Path(exchange.__file__).read_text(), re.MULTILINE)[1]
    monkeypatch.setattr(exchange, "POLLS", tl.constexpr(int(looks)))  # of which the tests' own run has fewer
    kept, made = presets.load(), presets.presets()
    assert [each["title"] for each in kept] == [each["title"] for each in made]
    for old, new in zip(kept, made, strict=True):
        old, new = ({**each, "environment": None} for each in (old, new))
        rel = 1e-2 if old["options"]["dtype"] == "bfloat16" else 1e-5
        assert alike(old, json.loads(json.dumps(new)), rel), (
            f"{old['title']} differs: TRITON_INTERPRET=1 python -m fused_softmax.trace.presets makes it anew"
        )


def test_alike_can_tell():
    assert alike({"a": [1.0, "4629700420153634970"]}, {"a": [1.0 + 1e-7, "4629700420153634971"]}, 1e-5)
    assert alike("6734872309452873905", "6734872309452873906", 1e-5)
    for a, b in ((1.0, 1.1), (1, 2), ([1], [1, 2]), ({"a": 1}, {"b": 1}), ("inf", "nan"), ("4629700420153634970",) * 2):
        assert alike(a, b, 1e-5) == (a == b)


@pytest.mark.guard
def test_every_kernel_has_the_worked_example_among_the_presets():
    kept = presets.load()
    for name in NAMES:
        if name in ("attention", "segments"):  # which take other rows
            continue
        recording = next(each for each in kept if each["title"].startswith("3 x 8") and each["kernel"] == name)
        assert read_numbers(recording["tensors"][0]["before"]) == [value for row in EXAMPLE for value in row] or (
            name == "backward"
        )
    for recording in kept:
        jsonschema.validate(recording, trace.schema())


@pytest.mark.parametrize("to", ["html", "json", "-"])
def test_the_command(to, tmp_path):
    source, out = tmp_path / "x.csv", "-" if to == "-" else tmp_path / "new" / f"out.{to}"
    source.write_text("# two rows\n1, 2, -inf, 4\n\n0.5;1e-3;nan;2\n")

    def run(*more):
        arguments = [
            "trace",
            "--kernel",
            "hybrid-tiled",
            "--second",
            "naive",
            "--matrix",
            source,
            "--block",
            2,
            "-o",
            out,
        ]
        return CliRunner().invoke(main, [str(argument) for argument in (*arguments, *more)])

    done = run("--dtype", "fp16")
    assert done.exit_code == 0, done.output
    text = done.output if to == "-" else out.read_text()
    found = held(text, "recordings") if to == "html" else json.loads(text)
    assert [recording["kernel"] for recording in found] == ["hybrid-tiled", "naive"]
    assert found[0]["tensors"][0]["before"] == [1.0, 2.0, "-inf", 4.0, 0.5, 0.001, "nan", 2.0]
    assert found[0]["options"] == {"dtype": "float16", "block": 2}
    if to != "-":
        again = run()
        assert (again.exit_code, again.output) == (2, f"Error: {out} exists; --force overwrites it\n")
        assert run("--force").exit_code == 0
        assert out.read_text() != text


def test_the_command_without_a_kernel_writes_the_presets(tmp_path):
    done = CliRunner().invoke(main, ["trace", "-o", str(tmp_path / "all.json")])
    assert done.exit_code == 0, done.output
    assert json.loads((tmp_path / "all.json").read_text()) == presets.load()
    CliRunner().invoke(main, ["trace", "-o", str(tmp_path / "all.html")])
    html = (tmp_path / "all.html").read_text()
    assert held(html, "recordings") is None
    assert held(html, "presets") == presets.load()


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("a,b\n", "x.csv, line 1, number 1: 'a' is not a number"),
        ("1,2\n3\n", "x.csv: row 2 has 1 number, but the first row has 2"),
        ("", "x.csv has no numbers"),
        ("# nothing\n\n", "x.csv has no numbers"),
        ("1e400\n", "x.csv, line 1, number 1: 1e400 is too large"),
        (b"\xff\xff", "x.csv is neither text in UTF-8 nor a .npy file"),
        (b"1 " * 2**20, "x.csv has more than 1048576 bytes"),
    ],
)
def test_a_file_that_is_no_matrix(content, message, tmp_path):
    (tmp_path / "x.csv").write_bytes(content if isinstance(content, bytes) else content.encode())
    done = CliRunner().invoke(main, ["trace", "--matrix", str(tmp_path / "x.csv"), "-o", str(tmp_path / "y.json")])
    assert done.exit_code == 2
    assert message in done.output
    assert not (tmp_path / "y.json").exists()


def test_a_matrix_of_numpy(tmp_path):
    np.save(tmp_path / "x.npy", np.array(EXAMPLE, np.float16))
    assert matrices.read_matrix(str(tmp_path / "x.npy")).tolist() == [list(row) for row in EXAMPLE]
    np.save(tmp_path / "hostile.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(ValueError, match=r"^hostile\.npy holds Python objects, not numbers$"):
        matrices.read_matrix(str(tmp_path / "hostile.npy"))
    np.save(tmp_path / "text.npy", np.array([["a"]]))
    with pytest.raises(ValueError, match=r"^matrix must hold numbers, got an array of str32$"):
        trace.record("naive", matrices.read_matrix(str(tmp_path / "text.npy")))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (lambda whole: b"", "is not a .npy file as numpy.save writes it"),
        (lambda whole: pickle.dumps([1, 2]), "is not a .npy file as numpy.save writes it"),
        (lambda whole: whole[:-10], "is cut short or damaged"),
        (lambda whole: whole[:20], "is cut short or damaged"),
        (lambda whole: whole.replace(b"shape", b"shame"), "is cut short or damaged"),
    ],
    ids=("empty", "a pickle", "cut in its numbers", "cut in its header", "another header"),
)
def test_what_is_said_of_an_array_file_is_for_the_one_who_typed_its_name(content, said, tmp_path):
    np.save(tmp_path / "x.npy", np.array(EXAMPLE))
    (tmp_path / "x.npy").write_bytes(content((tmp_path / "x.npy").read_bytes()))
    done = CliRunner().invoke(main, ["trace", "--matrix", str(tmp_path / "x.npy"), "-o", "-"])
    assert (done.exit_code, done.stderr) == (2, f"Error: x.npy {said}\n")


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--kernel", "online"], "-o FILE is missing"),
        (["-o", "x.txt"], "x.txt must end in .html (a page) or .json"),
        (["--kernel", "fast", "-o", "x.json"], "unknown kernel 'fast'; known: naive"),
        (["--matrix", "missing.csv", "-o", "x.json"], "missing.csv: No such file"),
        (["--block", "3", "-o", "x.json"], "block must be a power of two"),
        (["--kernel", "hybrid-tiled", "--block", "8", "-o", "x.json"], "8 columns are not longer than 8"),
    ],
)
def test_a_command_that_cannot_be(arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    done = CliRunner().invoke(main, ["trace", *arguments])
    assert done.exit_code == 2
    assert message in done.output
    assert not list(tmp_path.iterdir())


def test_writing_leaves_what_is_there(tmp_path):
    path = tmp_path / "x.json"
    files.write_whole(path, "old", force=False)
    with pytest.raises(FileExistsError):
        files.write_whole(path, "new", force=False)
    assert path.read_text() == "old"
    files.write_whole(path, "new")
    assert path.read_text() == "new"
    assert [each.name for each in tmp_path.iterdir()] == ["x.json"]


def test_what_the_post_prints_and_no_kernel_holds(example):
    rows = example["hybrid-tiled"]["rows"]
    assert [round(row["sum"], 3) != printed for row, printed in zip(rows, PUBLISHED_SUMS, strict=True)] == [True] * 3
    assert presets.PRINTED_SUMS == PUBLISHED_SUMS
    assert presets.PRINTED_OUTPUTS == PUBLISHED_OUTPUTS
    assert presets.EXAMPLE == EXAMPLE
    said = next(each for each in presets.load() if each["kernel"] == "hybrid-tiled")["summary"]
    assert all(figure in said for figure in ("3.717", "4.982", *(f"{row['sum']:.3f}" for row in rows[1:])))


HOSTILE = "</script><script>alert(1)</script><!--<script> \u2028\u2029\ud800 & '\""


class _Scripts(HTMLParser):
    """The text of each script element, as a browser would find it."""

    def __init__(self):
        super().__init__()
        self.found = []
        self._in_script = False

    def handle_starttag(self, tag, attributes):
        if tag == "script":
            self.found.append([dict(attributes), ""])
            self._in_script = True

    def handle_endtag(self, tag):
        self._in_script = False if tag == "script" else self._in_script

    def handle_data(self, data):
        if self._in_script:
            self.found[-1][1] += data


def scripts(html):
    parser = _Scripts()
    parser.feed(html)
    return parser.found


def test_hostile_text_stays_in_its_script_element(example):
    recording = example["naive"] | {"title": HOSTILE, "summary": HOSTILE}
    html = page.embed([recording], [recording])
    assert len(scripts(html)) == len(scripts(page.BUILT.read_text()))
    assert html.encode("utf-8"), "lone surrogates are escaped"
    assert held(html, "recordings") == held(html, "presets") == json.loads(json.dumps([recording]))
    text = next(text for attributes, text in scripts(html) if attributes.get("id") == "recordings")
    assert not set("<>&\u2028\u2029") & set(text)


def test_a_page_without_the_slot_is_refused():
    for bad in ("<html></html>", 2 * page.BUILT.read_text()):
        with pytest.raises(ValueError, match=r"must hold .* once"):
            page.embed([], [], bad)


def held(html, name):
    value = next(json.loads(text) for attributes, text in scripts(html) if attributes.get("id") == name)
    return page.unpack(value) if isinstance(value, str) else value


def test_what_a_page_held_is_replaced(example):
    html = page.embed([example["naive"]], [example["online"], example["row"]])
    assert [each["kernel"] for each in held(html, "recordings")] == ["naive"]
    assert [each["kernel"] for each in held(html, "presets")] == ["online", "row"]
    again = page.embed([], [example["tile"]], html)
    assert held(again, "recordings") is None
    assert [each["kernel"] for each in held(again, "presets")] == ["tile"]
    assert page.embed([], [], again) == page.embed([])


def test_the_page_with_all_presets_is_small():
    assert len(page.embed([], presets.load()).encode()) < 400_000


def test_show_is_a_frame_of_its_own():
    shown = trace.show("naive", [[1.0, 2.0]], height=300)
    html = shown._repr_html_()
    assert html.startswith("<iframe ")
    assert html.count("<") == 2, "all of the page is escaped"
    assert "300px" in html
    assert unescape(html.partition('srcdoc="')[2].partition('"')[0]) == str(shown)
    assert trace.show(shown.recordings[0]).recordings == shown.recordings


# Kernels of a reader's own.


@triton.jit
def _square(x):
    return x * x


@triton.jit
def _sums(x_ptr, y_ptr, x_row_stride, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    total = 0.0
    for start in range(0, n_cols, BLOCK):
        at = start + tl.arange(0, BLOCK)
        x = tl.load(x_ptr + row * x_row_stride + at, mask=at < n_cols, other=0.0)
        total += tl.sum(_square(x), axis=0)
    tl.store(y_ptr + row, total)


@triton.jit
def _past_the_end(x_ptr, y_ptr, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    x = tl.load(x_ptr + at)
    tl.store(y_ptr + at, x)


def test_a_kernel_of_ones_own():
    x = torch.arange(10.0).view(2, 5)
    y = torch.full((2,), 7.0)
    recording = trace.record_kernel(_sums, outputs=("y_ptr",), title="sums of squares")[lambda given: (2,)](
        x, y, x.stride(0), 5, BLOCK=4, num_warps=1
    )
    jsonschema.validate(recording, strict(trace.schema()))
    assert recording["title"] == "sums of squares"
    assert [(tensor["name"], tensor["role"], tensor["after"][:2]) for tensor in recording["tensors"]] == [
        ("x", "input", [0.0, 1.0]), ("y", "output", [30.0, 255.0]),
    ]  # fmt: skip
    assert y.tolist() == [7.0, 7.0], "the launch runs on copies"
    assert recording["phases"] == ["compute", "load", "store"]
    assert {source["name"]: source["file"] for source in recording["sources"]} == dict.fromkeys(
        ("_sums", "_square"), "test_trace.py"
    )
    loads = [load for step in recording["steps"] for load in step.get("loads", [])]
    assert [(load["at"], load["masked"]) for load in loads] == [
        ([0, 1, 2, 3], 0), ([4], 3), ([5, 6, 7, 8], 0), ([9], 3),
    ]  # fmt: skip
    assert recording["traffic"] == {"reads": 10, "writes": 2, "floor_reads": 10, "floor_writes": 2, "passes": 1}
    assert recording["launches"][0]["constants"] == {"BLOCK": 4}


@triton.jit
def _softmax(out_ptr, in_ptr, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    at = tl.arange(0, BLOCK)
    x = tl.load(in_ptr + row * n_cols + at, mask=at < n_cols, other=float("-inf"))
    m = tl.max(x, axis=0)
    e = tl.exp(x - m)
    s = tl.sum(e, axis=0)
    tl.store(out_ptr + row * n_cols + at, e / s, mask=at < n_cols)


def test_a_softmax_of_ones_own_has_rows_and_states():
    x = torch.tensor(EXAMPLE)
    record = trace.record_kernel(_softmax, outputs=("out_ptr",), operation="softmax")
    recording = record[(3,)](torch.empty_like(x), x, 8, BLOCK=8)
    assert recording["tensors"][0]["name"] == "in"
    assert [row["max"] for row in recording["rows"]] == list(MAXIMA)
    assert tuple(round(row["sum"], 3) for row in recording["rows"]) == SUMS
    assert states(recording, 1)[-1] == (4.0, recording["rows"][1]["sum"])
    assert only(recording, "output")["before"] == ["nan"] * 24


def test_phases_of_ones_own():
    x = torch.arange(8.0).view(1, 8)
    phases = {"start": "row =", "add up": "for start", "write": "tl.store"}
    recording = trace.record_kernel(_sums, phases=phases)[1](x, torch.zeros(1), 8, 8, BLOCK=8)
    assert recording["phases"] == ["start", "add up", "write"]
    with pytest.raises(trace.RecordingError, match=r"no line of _sums .* begins with 'while'"):
        trace.record_kernel(_sums, phases={"start": "while"})[1](x, torch.zeros(1), 8, 8, BLOCK=8)


class _Row(NamedTuple):
    ptr: Any
    n: Any


@dataclass(frozen=True)
class _Kind:
    block: int
    twice: bool = False


@triton.jit
def _total_of(row, K: tl.constexpr):
    return tl.sum(_load(row, K), axis=0)


@triton.jit
def _load(row, K: tl.constexpr):
    at = tl.arange(0, K.block)
    return tl.load(row.ptr + at, mask=at < row.n, other=0.0)


@triton.jit
def _totals(x_ptr, y_ptr, n_cols, K: tl.constexpr):
    program = tl.program_id(0)
    row = _Row(x_ptr + program * n_cols, n_cols)
    tl.store(y_ptr + program, _total_of(row, K))


def totals(**story):
    """A recording of sums of rows by kernels that take a NamedTuple and a dataclass."""
    recording = Recorder(Story(roles={"y_ptr": "output"}, **story))
    x, y = torch.arange(6.0).view(2, 3), torch.empty(2)
    with recording:
        _totals[(2,)](x, y, 3, _Kind(4))
    assert y.tolist() == [3.0, 12.0]
    return recording


@interpreted
def test_the_fields_of_a_namedtuple_are_told_by_name_and_those_of_a_dataclass_as_constants():
    recording = totals()
    (launch,) = recording.launches
    assert launch["constants"] == {"K.block": 4, "K.twice": False}
    sets = {name: value for step in recording.steps for name, value in step.get("set", {}).items()}
    assert sets["row.n"] == 3
    assert sets["row.ptr"]["data"] == [3]
    names = [recording.sources[frame["source"]].name for frame in recording.frames]
    assert names == 2 * ["_totals", "_total_of", "_load"]
    given = [sorted(frame.get("arguments", {})) for frame in recording.frames]
    assert given[:3] == [[], [], ["row.n", "row.ptr"]], "of its arguments' fields, those that a function reads"


@interpreted
def test_a_function_that_is_stepped_through_has_no_lines_and_those_it_calls_have():
    recording = totals(step_through=frozenset({"_total_of"}))
    names = [recording.sources[frame["source"]].name for frame in recording.frames]
    assert names == 2 * ["_totals", "_load"]
    assert [frame["parent"] for frame in recording.frames] == [None, 0, None, 2]
    (stored,) = {recording.sources[0].line(frame["call_line"]) for frame in recording.frames if frame["parent"] == 0}
    assert stored.startswith("tl.store(")


@interpreted
def test_a_silent_statement_has_no_step_and_no_locals_unless_it_reads_memory():
    plain = totals(told={"_load": Told(silent=("at =",), unused=("row.n",)), "_totals": Told(silent=("program =",))})
    lines = [plain.sources[plain.frames[step["frame"]]["source"]].line(step["line"]) for step in plain.steps]
    assert not {line for line in lines if line.startswith(("at =", "program ="))}
    assert not {name for step in plain.steps for name in step.get("set", {})} & {"at", "program"}
    assert sorted(plain.frames[2]["arguments"]) == ["row.ptr"]
    reading = totals(told={"_load": Told(silent=("return tl.load",))})
    assert sum("loads" in step for step in reading.steps) == 2


@triton.jit
def _top_of(x_ptr, row, n_cols, BLOCK: tl.constexpr):
    x = tl.load(x_ptr + row * n_cols + tl.arange(0, BLOCK))
    m = tl.max(x, axis=0)
    return m


@triton.jit
def _tops(x_ptr, y_ptr, n_cols, BLOCK: tl.constexpr):
    row = tl.program_id(0)
    m = -1.0
    tl.store(y_ptr + row, tl.maximum(m, _top_of(x_ptr, row, n_cols, BLOCK)))


@interpreted
@pytest.mark.parametrize("state", [False, True])
def test_a_function_that_the_kernel_calls_may_know_its_rows_state(state):
    recorder = Recorder(Story({"_top_of": Told(state=state)}, roles={"y_ptr": "output"}))
    x, y = recorder.memory.hold("x", torch.arange(8.0).view(2, 4), "input"), torch.empty(2)
    with recorder:
        _tops[(2,)](x, y, 4, BLOCK=4)
    assert [recorder.states[row]["m"] for row in range(2)] == ([3.0, 7.0] if state else [-1.0, -1.0])


@interpreted
def test_phases_of_functions_that_call_each_other_come_in_the_order_of_the_story():
    told = {"_totals": Told({"start": "program =", "end": "tl.store"}), "_load": Told({"read": "return"})}
    assert totals(told=told).phases == ["start", "end", "read"]
    assert totals(told=told, phases=("start", "read")).phases == ["start", "read", "end"]


@interpreted
def test_a_phase_that_opens_within_a_function_lasts_to_the_end_of_its_call():
    told = {"_totals": Told({"start": "program =", "add": "tl.store"}), "_load": Told({"read": "return"})}
    recording = totals(told=told)
    first = [recording.phases[step["phase"]] for step in recording.steps if step["rows"] == [0]]
    assert recording.phases == ["start", "add", "read"]
    assert first == ["start", "start", "add", "read", "read", "read"]


@triton.autotune([triton.Config({"BLOCK": 4})], key=["n_cols"])
@triton.jit
def _tuned(x_ptr, n_cols, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(x_ptr + at, n_cols * 1.0, mask=at < n_cols)


def test_an_autotuned_kernel_by_one_configuration():
    with pytest.raises(TypeError, match=r"within an autotuner or heuristics: give its `\.fn`"):
        trace.record_kernel(_tuned)[1](torch.zeros(4), 3)
    recording = trace.record_kernel(_tuned.fn)[1](torch.zeros(4), 3, BLOCK=4)
    assert recording["tensors"][0]["after"] == [3.0, 3.0, 3.0, 0.0]


def test_a_kernel_that_no_worker_can_find():
    @triton.jit
    def local(x_ptr):
        tl.store(x_ptr, 1.0)

    launch = trace.record_kernel(local)[1]
    if interpreting():
        assert launch(torch.zeros(1))["tensors"][0]["after"] == [1.0]
    else:
        with pytest.raises(trace.RecordingError, match=r"local.* is made within a function, .* set TRITON_INTERPRET=1"):
            launch(torch.zeros(1))


@pytest.mark.compiles
def test_a_process_that_compiles_records_in_a_worker():
    assert not interpreting()
    worked = next(each for each in presets.load() if each["kernel"] == "split")
    recording = trace.record("split", EXAMPLE)
    assert alike(recording["steps"], worked["steps"], 1e-5)
    x = torch.arange(8.0).view(1, 8)
    recording = trace.record_kernel(_sums, outputs=("y_ptr",))[1](x, torch.zeros(1), 8, 8, BLOCK=8)
    assert only(recording, "output")["after"] == [140.0]
    assert not interpreting()


def test_in_place():
    x = torch.arange(4.0)
    recording = trace.record_kernel(_past_the_end)[1](x, x, BLOCK=4)
    assert [(tensor["name"], tensor["role"]) for tensor in recording["tensors"]] == [("x", "output")]


def test_a_read_past_the_end_is_refused_and_says_where():
    with pytest.raises(trace.RecordingError, match=r"_past_the_end reads 4 elements outside its tensors.*x = tl\.load"):
        trace.record_kernel(_past_the_end)[1](torch.zeros(4), torch.zeros(8), BLOCK=8)


def test_what_no_recording_can_be_of():
    with pytest.raises(TypeError, match=r"must be a @triton\.jit function, got builtin"):
        trace.record_kernel(sum)[1]()
    with pytest.raises(TypeError, match="x_ptr: a recording cannot take list"):
        trace.record_kernel(_sums)[1]([1.0], None, 1, 1, BLOCK=1)
    with pytest.raises(trace.RecordingError, match="x_ptr has 70000 elements"):
        trace.record_kernel(_sums)[1](torch.zeros(70000), torch.zeros(1), 1, 1, BLOCK=1)


@interpreted
def test_the_interpreter_is_left_as_it_was():
    from triton.runtime import interpreter
    from triton.runtime.interpreter import GridExecutor, InterpreterBuilder, ReduceOps

    def hooked():
        return [dict(vars(holder)) for holder in (GridExecutor, InterpreterBuilder, ReduceOps)] + [
            interpreter._patch_lang_tensor, interpreter._patch_lang, interpreter._implicit_cvt,
        ]  # fmt: skip

    before = hooked()
    trace.record("online", EXAMPLE)
    with pytest.raises(trace.RecordingError):
        trace.record_kernel(_past_the_end)[1](torch.zeros(4), torch.zeros(8), BLOCK=8)
    assert hooked() == before


@interpreted
def test_too_many_steps_are_refused(monkeypatch):
    for limit, message in (("MOST_STEPS", "more than 100 steps"), ("MOST_BYTES", "more than 100 bytes of tiles")):
        with monkeypatch.context() as less:
            less.setattr(recorder, limit, 100)
            with pytest.raises(trace.RecordingError, match=message):
                trace.record("split", EXAMPLE)


@triton.jit
def _of_the_first_row(x_ptr, y_ptr, n_cols, BLOCK: tl.constexpr):
    i, row = tl.arange(0, BLOCK), tl.program_id(0)
    own = (i < n_cols) & (row == 0)
    x = tl.load(x_ptr + i, mask=own, other=2.0)
    tl.store(y_ptr + row * n_cols + i, tl.where(own == 0, -x, x), mask=(i < n_cols) & (row < 2))


def test_a_number_that_is_compared_is_a_bit_of_a_mask():
    """The interpreter spreads it over a block of 32 bits, which Triton 3.9 refuses as a mask."""
    x, y = torch.tensor([3.0, 4.0]), torch.zeros(2, 2)
    recording = trace.record_kernel(_of_the_first_row, outputs=("y_ptr",))[lambda given: (2,)](x, y, 2, BLOCK=4)
    (of_y,) = [tensor for tensor in recording["tensors"] if tensor["name"] == "y"]
    assert of_y["after"] == [3.0, 4.0, -2.0, -2.0]
