"""The recording of attention: scores, running maximum, sum and output are those of the recurrence, at every step."""

import json
import math

import pytest
import torch
import triton
import triton.language as tl
from click.testing import CliRunner

from fused_softmax import trace
from fused_softmax.cli import main
from fused_softmax.trace import presets
from fused_softmax.trace.recorder.encode import read_numbers
from fused_softmax.trace.recorder.hooks import interpreting
from fused_softmax.trace.recorder.recorder import Recorder
from fused_softmax.trace.recorder.story import Story, Tile, Told

BLOCK = 4
X = torch.tensor(presets.TOKENS, dtype=torch.float64)
Q, K, V = X.split(4, 1)
Z = Q @ K.T


@pytest.fixture(scope="module")
def recording():
    return next(each for each in presets.load() if each["kernel"] == "attention")


def tensor(recording, name, when="after"):
    found = next(each for each in recording["tensors"] if each["name"] == name)
    return torch.tensor(read_numbers(found[when]), dtype=torch.float64).view(found["shape"])


def number_of(recording, name):
    return next(at for at, each in enumerate(recording["tensors"]) if each["name"] == name)


def line_of(recording, step):
    source = recording["sources"][recording["frames"][step["frame"]]["source"]]
    return source["lines"][step["line"] - source["first_line"]].strip()


def steps_of(recording, opening, tile=None):
    """The steps of a line, of one tile of queries or of all."""
    return [
        step
        for step in recording["steps"]
        if line_of(recording, step).startswith(opening) and (tile is None or step["rows"][0] == tile)
    ]


def local(step, name):
    value = step["set"][name]
    return torch.tensor(read_numbers(value["data"]), dtype=torch.float64).view(value["shape"])


def wanted(x):
    """Output and lse of causal attention of rows of query, key and value, scores in powers of 2, in float64."""
    q, k, v = x.double().split(x.shape[1] // 3, 1)
    z = (q @ k.T).masked_fill(torch.ones(len(x), len(x), dtype=torch.bool).triu(1), -math.inf) * math.log(2)
    return torch.softmax(z, 1) @ v, torch.logsumexp(z, 1)


@pytest.mark.parametrize(
    ("n_tokens", "dim", "block", "dtype"),
    [(12, 4, 4, "float32"), (10, 3, 4, "float32"), (1, 1, 2, "float32"), (9, 5, 8, "float16"), (6, 2, 2, "bfloat16")],
)
def test_any_tokens_end_with_their_attention(n_tokens, dim, block, dtype):
    x = torch.randint(-2, 3, (n_tokens, 3 * dim), generator=torch.Generator().manual_seed(n_tokens)).double()
    found = trace.record("attention", x, block=block, dtype=dtype)
    output, lse = wanted(x)
    eps = torch.finfo(getattr(torch, dtype)).eps
    torch.testing.assert_close(tensor(found, "output"), output, rtol=4 * eps, atol=4 * eps)
    torch.testing.assert_close(tensor(found, "lse"), lse, rtol=1e-6, atol=1e-6)
    reads = n_tokens * dim + sum(2 * dim * min(first + block, n_tokens) for first in range(0, n_tokens, block))
    assert (found["traffic"]["reads"], found["traffic"]["writes"]) == (reads, n_tokens * dim + n_tokens)
    assert [row["status"] for row in found["rows"]] == n_tokens * ["ok"]


def test_scores_are_held_where_a_tile_sees_their_block_and_hidden_after_the_query(recording):
    z = tensor(recording, "z")
    row, col = torch.arange(12)[:, None], torch.arange(12)
    seen = col < (row // BLOCK + 1) * BLOCK
    assert torch.equal(z.isnan(), ~seen)
    assert torch.equal(z == -math.inf, seen & (col > row))
    assert torch.equal(z[col.expand(12, 12) <= row], Z[col.expand(12, 12) <= row])


def test_keys_of_skipped_blocks_are_read_by_no_tile_that_does_not_see_them(recording):
    for name in ("k", "v"):
        at = number_of(recording, name)
        read = {}
        for step in recording["steps"]:
            for load in step.get("loads", []):
                if load["tensor"] == at:
                    read.setdefault(step["rows"][0], set()).update(each // 4 for each in load["at"])
        assert read == {first: set(range(first + BLOCK)) for first in (0, 4, 8)}


def test_the_maximum_rises_with_each_block_but_of_query_10_with_the_last(recording):
    tops = torch.stack([local(step, "top") for step in steps_of(recording, "top = tl.maximum(", 8)])
    assert torch.equal(tops, torch.stack([Z[8:].tril(8)[:, :end].amax(1) for end in (4, 8, 12)]))
    rises = tops.diff(dim=0) > 0
    assert rises.tolist() == [[True] * 4, [True, True, False, True]]
    for tile in (4, 8):
        weights = torch.stack([local(step, "weight") for step in steps_of(recording, "weight = ", tile)])
        tops = torch.stack([local(step, "top") for step in steps_of(recording, "top = tl.maximum(", tile)])
        assert weights[0].tolist() == [0.0] * 4
        assert torch.equal(weights[1:], torch.exp2(-tops.diff(dim=0)))


def running(row, end):
    """(m, s, o) of a query after the keys before `end`."""
    z = Z[row, : min(end, row + 1)]
    p = torch.exp2(z - z.max())
    return z.max(), p.sum(), p @ V[: len(z)]


def test_sum_and_output_run_as_the_recurrence_does(recording):
    accumulator, known = number_of(recording, "o"), {}
    n_held = 0
    for step in recording["steps"]:
        known |= {entry["row"]: entry for entry in step.get("state", [])}
        end = step.get("cols", [0, 0])[1]
        if line_of(recording, step).startswith("s = s * weight"):
            for row in step["rows"]:
                m, s, _ = running(row, end)
                assert (known[row]["m"], known[row]["s"]) == (m, s)
        for held in step.get("holds", []):
            if held["tensor"] != accumulator:
                continue
            n_held += 1
            found = torch.tensor(held["data"], dtype=torch.float64).view(-1, 4)
            assert held["at"] == list(range(4 * step["rows"][0], 4 * step["rows"][-1] + 4))
            assert torch.equal(found, torch.stack([running(row, end)[2] for row in step["rows"]]))
    assert n_held == 1 + 2 + 3
    for row in recording["rows"]:
        m, s, o = running(row["row"], 12)
        assert (row["max"], row["sum"]) == (m, s)
        torch.testing.assert_close(tensor(recording, "output")[row["row"]], o / s, rtol=1e-6, atol=0)


def test_scores_are_told_as_their_product(recording):
    products = [(step, local(step, "qk")) for step in steps_of(recording, "qk = tl.dot(")]
    assert len(products) == 6
    for step, product in products:
        first, end = step["cols"]
        assert torch.equal(product, Z[step["rows"][0] :][:4, first:end])


def test_a_step_stands_at_the_keys_and_queries_that_it_is_of(recording):
    for opening, cols in (("k = load_tile", True), ("p = ", True), ("q = load_tile", False), ("store_tile", False)):
        for step in steps_of(recording, opening):
            assert len(step["rows"]) == 4
            assert ("cols" in step) == cols
    places = [(step["rows"][0], step["cols"][0]) for step in steps_of(recording, "top = tl.maximum(")]
    assert places == [(8, 0), (8, 4), (8, 8), (4, 0), (4, 4), (0, 0)]


@pytest.mark.parametrize(
    ("matrix", "more", "message"),
    [
        ([[1.0] * 8], {}, r"query, key and value side by side: 3, 6, 9, \.\.\. columns, 768 at most, but the .* has 8"),
        (torch.zeros(2, 771), {}, "768 at most, but the matrix has 771"),
        (torch.zeros(300, 3), {}, "up to 256 tokens, one a row, but the matrix has 300"),
        (torch.zeros(4, 12), {"dtype": "float64"}, "attention takes float32, float16, bfloat16, not float64"),
        (torch.zeros(4, 12), {"block": 3}, "power of two"),
    ],
)
def test_what_attention_does_not_take(matrix, more, message):
    with pytest.raises(ValueError, match=message):
        trace.record("attention", matrix, **more)


def test_the_command_records_attention_of_given_rows_and_of_its_own(tmp_path):
    out, source = tmp_path / "x.json", tmp_path / "qkv.csv"

    def run(*more):
        return CliRunner().invoke(main, ["trace", "--kernel", "attention", "-o", str(out), "--force", *more])

    assert run().exit_code == 0
    assert tensor(json.loads(out.read_text()), "q").tolist() == Q.tolist()
    source.write_text("1,2,3\n0,1,5\n")
    assert run("--matrix", str(source)).exit_code == 0
    assert tensor(json.loads(out.read_text()), "output").flatten().tolist() == [3.0, 4.0]
    source.write_text("1,2,3,4\n")
    done = run("--matrix", str(source))
    assert (done.exit_code, "columns, 768 at most, but the matrix has 4" in done.output) == (2, True)


# Products in general: a kernel that is not attention.


@triton.jit
def _product(a_ptr, b_ptr, c_ptr, n_rows, n_cols, n_inner, BLOCK: tl.constexpr):
    rows, cols = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK), tl.arange(0, BLOCK)
    c = tl.zeros([BLOCK, BLOCK], tl.float32)
    for start in range(0, n_inner, BLOCK):
        inner = start + tl.arange(0, BLOCK)
        a_in = (rows[:, None] < n_rows) & (inner[None, :] < n_inner)
        b_in = (inner[:, None] < n_inner) & (cols[None, :] < n_cols)
        a = tl.load(a_ptr + rows[:, None] * n_inner + inner[None, :], mask=a_in, other=0.0)
        b = tl.load(b_ptr + inner[:, None] * n_cols + cols[None, :], mask=b_in, other=0.0)
        c = c + tl.dot(a, b, input_precision="ieee")
    c_in = (rows[:, None] < n_rows) & (cols[None, :] < n_cols)
    tl.store(c_ptr + rows[:, None] * n_cols + cols[None, :], c, mask=c_in)


A, B = torch.arange(12.0).view(3, 4), torch.arange(8.0).view(4, 2) - 3


@pytest.mark.skipif(not interpreting(), reason="looks into the process that interprets")
def test_an_accumulator_of_any_kernel_is_held_within_its_matrix():
    tiles = {"c": Tile("sums", "rows", "cols")}
    recorder = Recorder(Story({"_product": Told(row="rows", tiles=tiles)}, roles={"c_ptr": "output"}))
    memory, c = recorder.memory, torch.empty(3, 2)
    memory.imagine("sums", 3, 2)
    memory.hold("a", A, "input", along="rows")
    memory.hold("c", c, "output", along="rows")
    with recorder:
        _product[(2,)](A, B, c, 3, 2, 4, BLOCK=2)
    assert torch.equal(c, A @ B)
    held = [(step["rows"], each) for step in recorder.steps for each in step.get("holds", [])]
    assert [rows for rows, _ in held] == [[0, 1]] * 3 + [[2]] * 3, "of zero and of each product, within the matrix"
    half = (A[:2, :2] @ B[:2]).flatten().tolist()
    assert [each["data"] for _, each in held[:3]] == [[0.0] * 4, half, (A @ B)[:2].flatten().tolist()]
    assert held[-1][1] == {"tensor": 0, "at": [4, 5], "data": (A @ B)[2].tolist()}
    entry = memory.tensors[0].entry()
    assert (entry["role"], entry["before"], entry["after"]) == ("registers", 6 * ["nan"], (A @ B).flatten().tolist())
    assert "loads" not in next(step for step in recorder.steps if "holds" in step)
    assert 0 not in recorder.reads.keys() | recorder.writes.keys()


def test_a_product_of_ones_own_kernel_is_told():
    found = trace.record_kernel(_product, outputs=("c_ptr",))[(2,)](A, B, torch.empty(3, 2), 3, 2, 4, BLOCK=2)
    assert tensor(found, "c").tolist() == (A @ B).tolist()
    products = [each for step in found["steps"] for each in step.get("computed", [])]
    assert [each["text"] for each in products] == 4 * ['tl.dot(a, b, input_precision="ieee")']
    assert products[0]["value"]["data"] == (A[:2, :2] @ B[:2]).flatten().tolist()
    sums = [step["set"]["c"] for step in found["steps"] if "c" in step.get("set", {})]
    assert [each["shape"] for each in sums] == 6 * [[2, 2]]
