"""Every note and summary of the registry, at every step that has it, against the numbers of the recording there.

The page's own sentences are compared with recordings in viz/tests/sentences.test.ts, which runs here once more over
rows that the presets do not have.
"""

import json
import math
import os
import shutil
import subprocess
from collections import Counter
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from fused_softmax import trace
from fused_softmax.core.kernels import exchange
from fused_softmax.trace import asked, presets, run
from fused_softmax.trace.recorder.encode import read_numbers

VIZ = Path(__file__).parents[1] / "viz"
INF, NAN = math.inf, math.nan
# Rows in which sentences could go wrong: hidden, lost, tied, alone, infinite, far apart.
ODD = (
    [[-INF, -INF, 1, 2, 0.5, -1], [1, 2, -INF, -INF, 0.5, -1], [1, 2, 0.5, -1, -INF, -INF], [-INF] * 6],
    [[0, NAN, 1, 2], [NAN, 0, 1, 2], [1, 2, 0, NAN], [NAN] * 4],
    [[1, 1, 1, 1, 1], [0, 1, 0, 1, 1], [2, 2, 1, 1, 0]],
    [[3], [-INF], [NAN], [0]],
    [[1, INF, 2, 3], [INF, INF, 0, 1], [-INF, INF, -INF, 0]],
    [[-1000, 1000, 999, -1000, 1000.5], [88, 90, 1, 0, -90], [1e-30, -1e-30, 0, 1e30, -1e30]],
    [[1, 0, 2, 1, 1, 0], [0, 1, 1, 2, 0, 1], [2, 2, 1, 0, 1, 1], [0, 0, 1, 1, 2, 2], [1, 1, 0, 0, 1, 0]],
)

# Wide enough for segments of every way: hidden in one of a tile, lost in one that is read in steps, infinite in a hub.
WIDE = [
    [-INF, 1, 2, -INF, 0.5, 1, -1, 3, *[0.25 * each for each in range(10)]],
    [1, -INF, 0, 1, NAN, 2, 1, 0, 4, 1, INF, 2, 3, *[-INF] * 5],
]  # fmt: skip


def taken(name: str, matrix: list[list[float]], block: int) -> bool:
    """Whether a kernel takes a matrix: attention has three columns a value, hybrid-tiled more columns than a block."""
    n_cols = len(matrix[0])
    return n_cols % 3 == 0 if name == "attention" else name != "hybrid-tiled" or n_cols > block


@cache
def odd(name: str) -> list[dict[str, Any]]:
    """Recordings of a kernel on every odd matrix that it takes; of split, also with a program that comes late."""
    matrices = [matrix for matrix in ODD if taken(name, matrix, 2)]
    matrices += [WIDE] if name == "segments" else []
    late = [run.kernel(asked.asked(name, matrix, 2), late=presets.LATE) for matrix in matrices if name == "split"]
    return [trace.record(name, matrix, block=2) for matrix in matrices] + late


class Noted:
    """A step with a note: the values that its program has there, and what came before and after."""

    def __init__(self, recording: dict[str, Any], at: int) -> None:
        self.recording, self.at, self.step = recording, at, recording["steps"][at]
        self.frame = recording["frames"][self.step["frame"]]
        self.row = self.step["rows"][0]
        self.launch = recording["launches"][self.frame["launch"]]
        self.tensors = {each["name"]: each for each in recording["tensors"]}

    def local(self, name: str, before: bool = False) -> np.ndarray:
        """A local of the step's function after the step, or before it."""
        given = self.launch["arguments"] | self.launch["constants"] if self.frame["parent"] is None else {}
        value = (given | self.frame.get("arguments", {})).get(name)
        for step in self.recording["steps"][: self.at + (not before)]:
            if step["frame"] == self.step["frame"]:
                value = step.get("set", {}).get(name, value)
        assert value is not None, name
        return array(value)

    def computed(self, text: str) -> np.ndarray:
        return array(next(each["value"] for each in self.step["computed"] if each["text"].startswith(text)))

    def program(self) -> tuple[int, list[int]]:
        return self.frame["launch"], self.frame["program"]

    def steps(self, first: int = 0, last: int | None = None) -> list[dict[str, Any]]:
        """The steps of this program."""
        frames = self.recording["frames"]
        return [
            step for step in self.recording["steps"][first:last]
            if (frames[step["frame"]]["launch"], frames[step["frame"]]["program"]) == self.program()
        ]  # fmt: skip

    def state(self, name: str, after: bool = True) -> float:
        """The newest m or s of the step's row that this program has had."""
        found = [
            entry[name] for step in self.steps(last=self.at + after) for entry in step.get("state", [])
            if entry["row"] == self.row and name in entry
        ]  # fmt: skip
        return float(found[-1])

    def messages(self, kind: str, first: int = 0, last: int | None = None) -> list[dict[str, Any]]:
        """The messages about the step's row."""
        found = [step["message"] for step in self.recording["steps"][first:last] if "message" in step]
        return [each for each in found if each["kind"] == kind and each["row"] == self.row]

    def matrix(self, name: str) -> np.ndarray:
        return np.array(read_numbers(self.tensors[name]["before"])).reshape(self.tensors[name]["shape"])

    def moved(self, kind: str) -> dict[str, int]:
        """How many elements of each tensor the step loads or stores."""
        return {self.recording["tensors"][each["tensor"]]["name"]: len(each["at"]) for each in self.step.get(kind, [])}

    def began(self) -> set[tuple[int, ...]]:
        """The programs that have begun before the step."""
        frames = self.recording["frames"]
        return {tuple(frames[step["frame"]]["program"]) for step in self.recording["steps"][: self.at]}

    def n_parts(self) -> int:
        return len({each["from"] for each in self.messages("publish")})


def array(value: Any) -> np.ndarray:
    if isinstance(value, dict):
        kind = np.int64 if value["dtype"].startswith(("int", "uint")) else np.float64
        numbers = [int(each) for each in value["data"]] if kind is np.int64 else read_numbers(value["data"])
        return np.array(numbers, kind).reshape(value["shape"])
    return np.array(float(value) if isinstance(value, str) else value)


def close(got: Any, wanted: Any) -> None:
    np.testing.assert_allclose(np.asarray(got, float), np.asarray(wanted, float), rtol=2e-6, atol=1e-37)


def exp(x: Any) -> np.ndarray:
    with np.errstate(all="ignore"):
        return np.exp(np.asarray(x, float))


def reads_and_writes(reads: dict[str, str], writes: str, size: str) -> Callable[[Noted], None]:
    """Whole matrices ("MN") and a number for each row ("M")."""

    def check(at: Noted) -> None:
        n_rows, n_cols = at.tensors["x"]["shape"]
        elements = {"MN": n_rows * n_cols, "M": n_rows}
        assert at.moved("loads") == {name: elements[each] for name, each in reads.items()}
        assert at.moved("stores") == {writes: elements[size]}

    return check


def next_row(at: Noted) -> None:
    """There is one, unless the range has ended: then the program's last row is behind it."""
    n_programs = math.prod(at.launch["grid"])
    rows = range(at.frame["program"][0], at.tensors["x"]["shape"][0], n_programs)
    turns = [step for step in at.steps(last=at.at + 1) if step.get("note") == at.step["note"]]
    assert len(turns) <= len(rows) + 1
    if "each" in at.step.get("set", {}):
        assert at.local("each") == rows[len(turns) - 1]
    loads = [step for step in at.steps(at.at) if "loads" in step]
    assert bool(loads) == (len(turns) <= len(rows))


def row_is_read_again(times: int) -> Callable[[Noted], None]:
    def check(at: Noted) -> None:
        n_cols = at.tensors["x"]["shape"][1]
        for steps, reads in ((at.steps(last=at.at), times - 1), (at.steps(at.at), 1)):
            places = Counter(place for step in steps for load in step.get("loads", []) for place in load["at"])
            assert set(places.values()) == {reads}
            assert len(places) == n_cols
        x = at.matrix("x")[at.row]
        if np.isfinite(x).all():
            close(at.state("m"), x.max())
            close(at.state("s"), exp(x - x.max()).sum())
        assert any("stores" in step for step in at.steps(at.at))

    return check


def finite_origin(at: Noted) -> None:
    m, origin = at.local("m_new"), at.local("origin")
    assert origin == 0 if m == -INF else np.array_equal(origin, m, equal_nan=True)
    if m == -INF:
        x = at.local("x")
        assert (exp(x - origin)[~np.isnan(x)] == 0).all()
        assert np.isnan(exp(x - m)).all()


def times_and_tile(at: Noted) -> None:
    m, origin = at.local("m"), at.local("origin")
    factor = exp(m - origin)
    close(at.computed("tl.exp(m - origin)"), factor)
    with np.errstate(invalid="ignore"):
        close(at.local("s"), at.local("s", before=True) * factor + exp(at.local("x") - origin).sum())


def repeats_the_last(at: Noted) -> None:
    rows = at.local("r.row").reshape(-1)
    n_rows = at.tensors["x"]["shape"][0]
    first = at.frame["program"][0] * len(rows)
    assert rows.tolist() == [min(first + each, n_rows - 1) for each in range(len(rows))]


def sum_of_the_row(at: Noted) -> None:
    for row in at.step["rows"]:
        x = at.matrix("x")[row]
        if np.isfinite(x).all():
            entry = next(each for each in at.step["state"] if each["row"] == row)
            close(entry["s"], exp(x - x.max()).sum())


def message_holds_all(at: Noted) -> None:
    bits = {int(each) for store in at.step["stores"] for each in store["data"]}
    assert len(bits) == 1
    words = np.array([bits.pop() & (2**64 - 1)], np.uint64).view(np.uint32)
    low, high = np.array([words[0] & 0x7FFFFFFF, words[1]], np.uint32).view(np.float32)
    message = at.step["message"]
    close(high, float(message.get("d", message.get("m"))))
    if "s" in message:
        close(low, abs(float(message["s"])))


def is_late(at: Noted) -> bool:
    """Whether a part of the step's row, of this launch, has yet to come."""
    return len(at.messages("publish", last=at.at)) < at.n_parts()


def all_have_published(at: Noted) -> None:
    if is_late(at):
        assert set(at.recording["options"]["late"]) - {program[0] for program in at.began()}
        return
    assert len(at.messages("publish", last=at.at)) == at.n_parts()
    own = next(step for step in at.steps() if "message" in step)
    begin, frames = at.recording["steps"].index(own), at.recording["frames"]
    between = {tuple(frames[step["frame"]]["program"]) for step in at.recording["steps"][begin : at.at]}
    last = at.messages("publish")[-1]
    assert own["message"] == last or len(between) > 1


def looks_again(at: Noted) -> None:
    looks = sum(at.recording["tensors"][each["tensor"]]["name"] == "slots" for each in at.step.get("loads", []))
    most = 512 if at.recording["title"] == presets.LATE_TITLE else exchange.POLLS.value
    assert looks == (most if is_late(at) else 0)
    following = [at.recording["sources"][at.recording["frames"][step["frame"]]["source"]]["name"]
                 for step in at.steps(at.at)]  # fmt: skip
    assert ("stand_in" in following) == is_late(at) == bool(at.local("left").any())
    if is_late(at):
        return
    all_published = {json.dumps([each["from"], each.get("m"), each.get("s"), each.get("d")])
                     for each in at.messages("publish", last=at.at)}  # fmt: skip
    assert len(all_published) == at.n_parts()


def one_from_each(at: Noted) -> None:
    collected = []
    for step in at.steps(at.at + 1):
        if "message" in step and step["message"]["kind"] == "collect":
            collected.append(step["message"])
        elif collected:
            break
    sent = sorted(at.messages("publish"), key=lambda each: each["from"])
    bare = [
        {name: value for name, value in each.items() if name not in ("kind", "to", "missing")} for each in collected
    ]
    assert bare == [{name: value for name, value in each.items() if name != "kind"} for each in sent]
    assert any(each["from"] == each["to"] for each in collected)


def stands_in(at: Noted) -> None:
    part = int(at.local("part"))
    assert part not in {each["from"] for each in at.messages("publish", last=at.at)}
    told = next(each for each in at.messages("publish", at.at) if each["from"] == part)
    np.testing.assert_array_equal([at.local("m"), at.local("s")], [float(told["m"]), float(told["s"])])


def takes_its_place(at: Noted) -> None:
    part, message = int(at.local("part")), at.local("message")
    step = next(step for step in at.recording["steps"][at.at :]
                if step.get("message", {}).get("kind") == "publish" and step["message"]["from"] == part)  # fmt: skip
    assert message[part] == int(step["stores"][0]["data"][0])
    assert not at.moved("stores")


def reads_its_own_again(at: Noted) -> None:
    first, size = int(at.local("r.start")), int(at.local("r.size"))
    n_cols = at.tensors["x"]["shape"][1]
    own = [at.row * n_cols + first + col for col in range(size)]
    index = next(n for n, each in enumerate(at.recording["tensors"]) if each["name"] == "x")
    reads = Counter(place for step in at.steps(last=at.at) for load in step.get("loads", [])
                    if load["tensor"] == index for place in load["at"])  # fmt: skip
    assert all(reads[place] == 3 for place in own)  # held, then for the maximum and for the sum


def knows_the_row(at: Noted) -> None:
    x = at.matrix("x")[at.row]
    if not np.isnan(x).any() and x.max() > -INF and x.max() < INF:
        close(at.local("m"), x.max())
        close(at.local("s"), exp(x - x.max()).sum())
        assert not any("state" in step for step in at.steps(at.at + 1))


def two_sums_merge(at: Noted) -> None:
    m_a, s_a, m_b, s_b = (at.local(name) for name in ("m_a", "s_a", "m_b", "s_b"))
    larger, total = at.local("return[0]"), at.local("return[1]")
    if np.isfinite(larger):
        close(larger, max(m_a, m_b))
        close(total, s_a * exp(m_a - larger) + s_b * exp(m_b - larger))


def parts_merge(at: Noted) -> None:
    m, m_parts, s_parts = at.local("m"), at.local("m_parts"), at.local("s_parts")
    if np.isfinite(m):
        assert m == m_parts.max()
        close(at.local("s"), (s_parts * exp(m_parts - m)).sum())


def parts_of_d(at: Noted) -> None:
    parts = at.local("d_parts")[: int(at.local("n_parts"))]
    sent = sorted(at.messages("publish"), key=lambda each: each["from"])
    close(parts, [float(each["d"]) for each in sent])
    close(at.local("return"), parts.sum())


def at_the_target(at: Noted) -> None:
    x, target = at.matrix("x"), int(read_numbers(at.tensors["target"]["before"])[at.row])
    store = at.recording["steps"][at.at + 1]["stores"][0]
    place = at.row * x.shape[1] + target
    assert store["at"] == [place]
    earlier = [step for step in at.steps(last=at.at) for each in step.get("stores", [])
               if each["tensor"] == store["tensor"] and place in each["at"]]  # fmt: skip
    assert len(earlier) == 1
    if np.isfinite(x[at.row]).all():
        p = torch.softmax(torch.tensor(x[at.row]), 0)[target].item()
        np.testing.assert_allclose(float(store["data"][0]), (p - 1) / len(x), rtol=1e-5, atol=1e-7)


def one_logit(at: Noted) -> None:
    first, x = at.local("first"), at.matrix("x")[at.row]
    assert any(np.array_equal(first, each, equal_nan=True) for each in x)
    assert at.local("origin") == (first if np.isfinite(first) else 0)
    reads = {place for step in at.steps(last=at.at + 1) for load in step.get("loads", [])
             if at.recording["tensors"][load["tensor"]]["name"] == "x" for place in load["at"]}  # fmt: skip
    assert len(reads) == 1


def eight_columns(at: Noted) -> None:
    weights = at.computed("weight_at(x, m")
    assert weights.shape[-1] == 8
    close(at.local("s"), weights.sum(-1))


def gumbel_noise(at: Noted) -> np.ndarray:
    """-log2(-log2(u)): the step has both logarithms of a uniform u, of which the outer one is not negated yet."""
    inner, outer = (array(each["value"]) for each in at.step["computed"] if each["text"].startswith("noise_of"))
    assert (inner < 0).all()
    np.testing.assert_allclose(outer, np.log2(-inner), rtol=1e-4, atol=1e-5)
    return -outer


def gumbel(at: Noted) -> None:
    noise = gumbel_noise(at)
    with np.errstate(all="ignore"):
        score = (at.local("m") - at.local("origin")) * at.local("D.factor") + np.log2(at.local("s")) + noise
    got = at.local("score")
    known = np.isfinite(score)
    np.testing.assert_allclose(got[known], score[known], rtol=1e-5, atol=1e-5)


def key_of_the_greatest(at: Noted) -> None:
    best, groups = at.local("best"), at.local("at")
    if not np.isfinite(best.max()):
        return
    drawn = [frame["arguments"]["group"] for frame in at.recording["frames"][at.step["frame"] :]
             if "group" in frame.get("arguments", {}) and frame["program"] == at.frame["program"]]  # fmt: skip
    assert drawn == [groups[best == best.max()].min()]


def noise_of_its_own(at: Noted) -> None:
    noise = gumbel_noise(at)
    assert len(set(noise.tolist())) == 8
    x, z, drawn = at.local("x"), at.local("z"), at.local("drawn")
    open_ = np.isfinite(x) & np.isfinite(z)
    np.testing.assert_allclose(drawn[open_], (z + noise)[open_], rtol=1e-5, atol=1e-5)
    assert (drawn[x == -INF] == -INF).all()


def last_tile_first(at: Noted) -> None:
    tile = at.local("tile")
    assert tile == at.local("n_tiles") - 1 - at.frame["program"][0]
    first = [step["rows"][0] for step in at.recording["steps"] if step.get("note") == at.step["note"]]
    assert first == sorted(first, reverse=True)


def unit_of_one(at: Noted) -> None:
    assert (at.local("unit") == 1).all()


def maximum_as_it_is(at: Noted) -> None:
    assert (at.local("new") == at.local("top")).all()


def nothing_yet(at: Noted) -> None:
    assert (at.local("top") == -INF).all()
    later = at.steps(at.at + 1)[:5]
    for name in ("s", "o"):
        value = next(array(step["set"][name]) for step in later if name in step.get("set", {}))
        assert (value == 0).all()
    assert not any("holds" in step for step in at.steps(last=at.at))


def keys_of_the_tile(at: Noted) -> None:
    begin, cut, end = (int(at.local(name)) for name in ("begin", "cut", "end"))
    rows = at.step["rows"]
    assert begin == 0
    assert cut <= min(rows) + 1
    assert end == max(rows) + 1
    seen = {place % at.tensors["z"]["shape"][1] for step in at.steps() for held in step.get("holds", [])
            if at.recording["tensors"][held["tensor"]]["name"] == "z" for place in held["at"]}  # fmt: skip
    assert max(seen) < -(-end // len(rows)) * len(rows)


def scores_so_far(at: Noted) -> dict[int, dict[int, float]]:
    """The scores of each query that its program has held before a step."""
    found: dict[int, dict[int, float]] = {}
    for step in at.steps(last=at.at):
        for held in step.get("holds", []):
            if at.recording["tensors"][held["tensor"]]["name"] == "z":
                for place, value in zip(held["at"], read_numbers(held["data"]), strict=True):
                    row, col = divmod(place, at.tensors["z"]["shape"][1])
                    found.setdefault(row, {})[col] = value
    return found


def maximum_so_far(at: Noted) -> None:
    scores = scores_so_far(at)
    for row in at.step["rows"]:
        values = np.array(list(scores[row].values()))
        entries = [
            each["m"] for step in at.steps(last=at.at + 1) for each in step.get("state", []) if each["row"] == row
        ]
        if not np.isnan(values).any():
            close(float(entries[-1]), values.max())


def block_scores(at: Noted) -> np.ndarray:
    """The scores of the step's queries and keys, [rows, cols]."""
    scores, (first, end) = scores_so_far(at), at.step["cols"]
    return np.array([[scores[row][col] for col in range(first, end)] for row in at.step["rows"]])


def weights(at: Noted) -> None:
    z, scores = block_scores(at), scores_so_far(at)
    m = np.array([max(scores[row].values()) for row in at.step["rows"]])
    if np.isfinite(m).all() and not np.isnan(z).any():
        close(at.local("p")[: len(z), : z.shape[1]], 2 ** (z - m[:, None]))


def correction(at: Noted) -> None:
    """1 where the maximum has not risen in this block, and else 2 to the power of the difference."""
    scores, (first, _) = scores_so_far(at), at.step["cols"]
    for lane, row in enumerate(at.step["rows"]):
        values = np.array([value for col, value in scores[row].items() if col < first])
        new = np.array(list(scores[row].values()))
        if np.isnan(new).any() or not np.isfinite(new.max()):
            continue
        old = values.max() if len(values) else -INF
        weight = at.local("weight").reshape(-1)[lane]
        close(weight, 2.0 ** (old - new.max()))
        assert (weight == 1) == (old == new.max())


def corrected_sum(at: Noted) -> None:
    scores = scores_so_far(at)
    for lane, row in enumerate(at.step["rows"]):
        z = np.array(list(scores[row].values()))
        if not np.isnan(z).any() and np.isfinite(z.max()):
            close(at.local("s").reshape(-1)[lane], (2.0 ** (z - z.max())).sum())


def corrected_output(at: Noted) -> None:
    scores, v = scores_so_far(at), at.matrix("v")
    for lane, row in enumerate(at.step["rows"]):
        z = np.array(list(scores[row].values()))
        if np.isfinite(v).all() and not np.isnan(z).any() and np.isfinite(z.max()):
            wanted = (2.0 ** (z - z.max())) @ v[list(scores[row])]
            np.testing.assert_allclose(at.local("o")[lane, : v.shape[1]], wanted, rtol=1e-5, atol=1e-6)


def hidden_keys(at: Noted) -> None:
    rows, cols, z = at.local("rows"), at.local("cols"), at.local("z")
    later = np.broadcast_to(cols.reshape(1, -1) > rows.reshape(-1, 1), z.shape)
    assert (z[later] == -INF).all()
    before = at.local("z", before=True)
    assert np.array_equal(z[~later], before[~later], equal_nan=True)


def divided_once(at: Noted) -> None:
    before, total = at.local("o", before=True), at.local("s").reshape(-1, 1)
    with np.errstate(invalid="ignore"):
        close(at.local("o"), before / np.where(total == 0, 1, total))
    assert sum(step.get("note") == at.step["note"] for step in at.steps()) == 1


def lane_for_each(at: Noted) -> None:
    tiles, x = at.local("tiles[0]").ravel(), at.matrix("x")[at.row]
    assert tiles.size == 32
    close(tiles, np.concatenate([x, np.full(32 - x.size, -INF)]))


def choice(at: Noted) -> list[int]:
    """The chosen experts of the step's row: the best first, of equal ones the lowest."""
    x = at.matrix("x")[at.row]
    return sorted(range(x.size), key=lambda expert: (-x[expert], expert))[: at.recording["options"]["k"]]


def best_first(at: Noted) -> None:
    if not np.isnan(at.matrix("x")[at.row]).any():
        assert at.local("ids[0]").ravel()[: at.recording["options"]["k"]].tolist() == choice(at)


def softmax_of_the_chosen(at: Noted) -> None:
    x, k = at.matrix("x")[at.row], at.recording["options"]["k"]
    weights = at.local("weights[0]").ravel()[:k]
    if np.isnan(x).any() or not np.isfinite(x.max()):
        assert not weights.any()  # such a row goes to no expert
        return
    e = exp(x[choice(at)] - x.max())
    close(weights, e / e.sum())
    close(weights.sum(), 1)


def sort_alike(at: Noted) -> None:
    x, keys = at.matrix("x")[at.row], at.local("keys[0]").ravel()
    pairs = [(a, b) for a in range(x.size) for b in range(x.size) if not np.isnan(x[[a, b]]).any()]
    assert all((x[a] < x[b]) == (keys[a] < keys[b]) for a, b in pairs)


def lowest_of_the_greatest(at: Noted) -> None:
    if not np.isnan(at.matrix("x")[at.row]).any():
        assert at.local("at").item() == choice(at)[int(at.local("turn"))]


def goes_on(at: Noted) -> None:
    before, now = (at.local("heads[0]", before).ravel() for before in (True, False))
    changed = (before != now).nonzero()[0].tolist()
    assert changed == [at.local("at").item()]
    assert now[changed[0]] < before.min() or now[changed[0]] == before.min()


def one_division(at: Noted) -> None:
    total = at.local("sum_of_scores").item()
    close(at.local("factor"), 1 / total if total > 0 else 0)


def segments_of(at: Noted) -> list[np.ndarray]:
    """The numbers of each segment of the program's row."""
    row = at.frame["program"][0] % at.tensors["x"]["shape"][0]
    return np.split(at.matrix("x")[row], at.recording["options"]["offsets"][1:-1])


def pieces_of_each(at: Noted) -> list[int]:
    length = max(1, at.recording["options"]["block"] // 2)
    return [math.ceil(each.size / length) for each in segments_of(at)]


def cut_into_pieces(at: Noted) -> None:
    first, pieces = int(at.local("i")), at.local("pieces").tolist()
    wanted = pieces_of_each(at)[first : first + len(pieces)]
    assert pieces[: len(wanted)] == wanted
    assert max(pieces[len(wanted) :], default=0) <= 0  # of segments that there are not


def left_for_later(at: Noted) -> None:
    first, mine = int(at.local("i")), at.local("mine").tolist()
    wanted = [0 < each <= 4 for each in pieces_of_each(at)][first : first + len(mine)]
    assert [bool(each) for each in mine] == wanted + [False] * (len(mine) - len(wanted))


def piece_by_piece(at: Noted) -> None:
    first = int(at.local("i"))
    here = [each if each <= 4 else 0 for each in pieces_of_each(at)[first : first + 4]]
    wanted = [segment for segment, pieces in enumerate(here) for _ in range(pieces)]
    upto = [0] + [step["set"]["after"] for step in at.steps(last=at.at)
                  if step["frame"] == at.step["frame"] and "after" in step.get("set", {})]  # fmt: skip
    rows = wanted[upto[-2] : upto[-1]]
    assert rows
    assert at.local("which").tolist() == rows + [0] * (at.local("which").size - len(rows))


def rows_of_tile(at: Noted) -> dict[int, np.ndarray]:
    """The numbers of the segment that each row of the tile has a piece of."""
    found = zip(at.local("segment").tolist(), at.local("size").tolist(), strict=True)
    return {row: segments_of(at)[segment] for row, (segment, size) in enumerate(found) if size >= 0}


def read_once(at: Noted) -> None:
    (load,) = at.step["loads"]
    places = Counter(place for step in at.recording["steps"] for each in step.get("loads", [])
                     if each["tensor"] == load["tensor"] for place in each["at"])  # fmt: skip
    assert {places[each] for each in load["at"]} == {1}
    segments = {int(segment) for segment in at.local("segment")[list(rows_of_tile(at))]}
    assert len(load["at"]) == sum(segments_of(at)[each].size for each in segments)


def maximum_of_all_pieces(at: Noted) -> None:
    for row, x in rows_of_tile(at).items():
        if not np.isnan(x).any():
            assert at.local("m").ravel()[row] == x.max()


def rescaled_lanes(at: Noted) -> None:
    m, top, a = (at.local(name, before=name != "top").reshape(-1) for name in ("m", "top", "a"))
    for lane, (old, new, value) in enumerate(zip(m, top, a, strict=True)):
        now, before = at.local("s").ravel()[lane], at.local("s", before=True).ravel()[lane]
        if np.isfinite([new, value]).all() and np.isfinite(before):
            close(now, (before * exp(old - new) if before else 0) + exp(value - new))


def last_step_first(at: Noted) -> None:
    assert at.local("tile") == at.local("last") - 1 - at.local("back")
    reads = [step for step in at.steps(last=at.at) if step["frame"] != at.step["frame"] and "loads" in step]
    if at.local("back") == 0 and at.frame["launch"] == 0:  # the program has read the segment in steps, forwards
        x = next(n for n, each in enumerate(at.recording["tensors"]) if each["name"] == "x")
        newest = [each for step in reads for each in step["loads"] if each["tensor"] == x][-1]
        after = next(each for step in at.steps(at.at) for each in step.get("loads", []))
        assert after["at"] == newest["at"]


def several_read_a_hub(at: Noted) -> None:
    block, segment = at.recording["options"]["block"], int(at.local("segment"))
    size = segments_of(at)[segment].size
    assert int(at.local("size")) == size
    told = (segment, size > 4 * block)
    blocks = {at.recording["frames"][step["frame"]]["program"][0] for step in at.recording["steps"]
              if step.get("note") == at.step["note"]}  # fmt: skip
    assert len(blocks) > 1
    other_part_told = int(at.local("tail")) == 1 and at.local("other") == at.local("one")
    assert bool(at.local("is_hub")) == (told[1] and not other_part_told)


def part_of_the_hub(at: Noted) -> None:
    row = at.frame["program"][0] % at.tensors["x"]["shape"][0]
    x = at.matrix("x")[row][int(at.local("first")) : int(at.local("last"))]
    if np.isfinite(x).all():
        close(at.local("m").item(), x.max())
        close(at.local("s").item(), exp(x - x.max()).sum())


def hubs_parts_merge(at: Noted) -> None:
    m, s = at.local("m_b"), at.local("s_b")
    with np.errstate(invalid="ignore"):
        factors = np.where(m == -INF, 0, exp(m - at.local("top")))
    known = np.isfinite(m) | (m == -INF)
    close(at.local("s")[known], (s * factors)[known])


CHECKS: dict[str, Callable[[Noted], None]] = {
    "Each segment is cut into pieces of one length. An empty one has none.": cut_into_pieces,
    "What has more pieces than a tile is left for later.": left_for_later,
    "A row of the tile is a piece. This is the segment that it is of.": piece_by_piece,
    "All segments of the tile are read at once, and only once.": read_once,
    "Pieces of one segment are next to each other: each now has the maximum of all of them.": maximum_of_all_pieces,
    "Each lane has a maximum and a sum of its own. Where the maximum has risen, the old sum is multiplied by exp of "
    "the old maximum minus the new one.": rescaled_lanes,
    "The last step comes first: it was read last, and caches have it.": last_step_first,
    "A hub is longer than a block, so its parts are read by several programs.": several_read_a_hub,
    "The maximum and the sum of what the hub has in this block.": part_of_the_hub,
    "The sums of the hub's parts, each multiplied by exp of its maximum minus the larger one.": hubs_parts_merge,
    "Reads the matrix and writes one number for each row.": reads_and_writes({"x": "MN"}, "m", "M"),
    "Reads the matrix and the maxima, and writes a whole matrix to memory.": reads_and_writes(
        {"x": "MN", "m": "M"}, "shifted", "MN"
    ),
    "Reads that matrix back and writes another.": reads_and_writes({"shifted": "MN"}, "e", "MN"),
    "Reads the second matrix and writes one number for each row.": reads_and_writes({"e": "MN"}, "s", "M"),
    "Reads the second matrix again, with the sums, and writes the result.": reads_and_writes(
        {"e": "MN", "s": "M"}, "y", "MN"
    ),
    "The program takes its next row.": next_row,
    "The maximum and sum are known. The row is read a third time to write the output.": row_is_read_again(3),
    "While every value so far is -inf, a finite origin gives exact zeros. -inf would give NaN.": finite_origin,
    "One pass has found the maximum and sum. The row is read again to write the output.": row_is_read_again(2),
    "The old sum is multiplied by exp(m - origin), then the tile's terms are added.": times_and_tile,
    "Rows past the end repeat the last one.": repeats_the_last,
    "No sink is given, so the sum is that of the row.": sum_of_the_row,
    "One 64-bit message holds everything the others need. Written whole, it needs no flag.": message_holds_all,
    "The program waits for its row's other parts, and lets those run that can.": all_have_published,
    "While a message is missing, the program looks again, 512 times at most. A part that is missing then it computes "
    "itself.": looks_again,
    "The state of each part, its own included.": one_from_each,
    "The part that has told nothing: the program reads it, and has its maximum and sum.": stands_in,
    "What the missing message would have said takes its place. The slot stays as it is: its own program may still "
    "come.": takes_its_place,
    "It holds no part here, so it reads its own again, too.": reads_its_own_again,
    "A lane for each expert. A warp has 32, so the others here hold -inf.": lane_for_each,
    "The chosen experts lie in the first lanes, the best one first.": best_first,
    "The softmax of the chosen logits alone: they add up to 1.": softmax_of_the_chosen,
    "The logits become integers that sort as they do.": sort_alike,
    "The greatest of all heads is the next choice. Of equal ones the lowest expert has it.": lowest_of_the_greatest,
    "The lane that had the best goes on to its next.": goes_on,
    "One division for each row; each weight is multiplied.": one_division,
    "From here on the program knows the whole row's maximum and sum.": knows_the_row,
    "Each sum is multiplied by exp of its maximum minus the larger one, then both are added.": two_sums_merge,
    "The states of the row's parts merge. Each sum is multiplied by exp of its maximum minus the row's.": parts_merge,
    "The parts of d are added. Unlike sums of exponentials, they need no rescaling.": parts_of_d,
    "At the target, 1 is subtracted from p. Its program overwrites this one element.": at_the_target,
    "Scores are differences from one logit of the row: it need not be the maximum, which nobody knows yet.": one_logit,
    "The weights of a group's eight columns, added up.": eight_columns,
    "Gumbel noise: a group wins as often as its weights are of the whole sum.": gumbel,
    "A key orders scores, and of equal ones takes the lower group.": key_of_the_greatest,
    "Each column of the group has noise of its own.": noise_of_its_own,
    "The last tile of queries sees most keys, so it goes first.": last_tile_first,
    "No key is known yet: the maximum is -inf, the sum and the output are 0.": nothing_yet,
    "What turns scores into powers of 2: 1, because the scale is ln 2.": unit_of_one,
    "The maximum in powers of 2, here the maximum itself. The next block has it as `m`.": maximum_as_it_is,
    "All queries of the tile see the keys before `cut`, none of them sees those from `end` on: their blocks are "
    "skipped.": keys_of_the_tile,
    "The maximum of the scores so far, this block's among them.": maximum_so_far,
    "What each key counts: 2 to the power of its score, against the maximum.": weights,
    "What has been added up so far is of the old maximum. This corrects it; it is 1 where the maximum has not "
    "risen.": correction,
    "The old sum, corrected, and this block's weights.": corrected_sum,
    "The old output, corrected as the sum is, and this block's values by their weights.": corrected_output,
    "A key after its query is hidden: its score becomes -inf, so that its weight is 0.": hidden_keys,
    "The sum divides once, at the end, and not in every block.": divided_once,
}


def notes_of(recordings: list[dict[str, Any]]) -> Counter[str]:
    """Check each note of each step, and count them."""
    seen: Counter[str] = Counter()
    for recording in recordings:
        for at, step in enumerate(recording["steps"]):
            note = step.get("note")
            if note is None:
                continue
            assert note in CHECKS, f"a note of {recording['kernel']} that nothing compares with the recording: {note!r}"
            try:
                CHECKS[note](Noted(recording, at))
            except (AssertionError, IndexError, KeyError, StopIteration, TypeError) as error:
                raise AssertionError(f"{recording['title']}, step {at + 1}: {note!r}") from error
            seen[note] += 1
    return seen


def test_every_note_of_the_presets_is_true():
    assert set(notes_of(presets.load())) == set(CHECKS)


@pytest.mark.parametrize("name", trace.kernels())
def test_every_note_is_true_of_hidden_lost_tied_and_single_values(name):
    assert set(notes_of(odd(name))) == {
        note for told in trace.kernels()[name].story.told.values() for note in told.notes.values()
    }


def reads_of_each(recording: dict[str, Any]) -> set[int]:
    """How often each element of x is read."""
    places: Counter[int] = Counter()
    for step in recording["steps"]:
        for load in step.get("loads", []):
            if recording["tensors"][load["tensor"]]["name"] == "x":
                places.update(load["at"])
    return set(places.values())


READS = {
    "persistent": ("from its only read to its only write", {1}),
    "hybrid-fast": ("One program reads it once", {1}),
    "hybrid-tiled": ("three times", {3}),
    "online": ("A second pass writes the output", {2}),
    "split": ("The row is read only once", {1}),
    "stream": ("reads the row again", {2}),
    "draw": ("The row is read once", {1, 2, 3}),
    "route": ("The row is read once", {1}),
    "segments": ("Short ones", {1, 2}),
}


def test_the_summary_of_a_late_part_says_who_reads_what():
    recording = next(each for each in presets.load() if each["title"] == presets.LATE_TITLE)
    assert recording["summary"] == presets.LATE_SUMMARY
    assert "reads that part itself and its own again" in presets.LATE_SUMMARY
    by = {program: Counter() for program in (0, 1)}
    for step in recording["steps"]:
        for load in step.get("loads", []):
            if load["tensor"] == 0:
                by[recording["frames"][step["frame"]]["program"][0]].update(load["at"])
    # Held; in its place for the maximum and the sum; of its own these again, and for the results.
    assert [dict(each) for each in by.values()] == [
        {col: 4 if col < 4 else 2 for col in range(8)},
        dict.fromkeys(range(4, 8), 1),
    ]


@pytest.mark.parametrize("name", READS)
def test_a_summary_says_how_often_a_row_is_read(name):
    words, times = READS[name]
    for recording in presets.load():
        if recording["kernel"] == name and recording["title"] != presets.LATE_TITLE:
            assert words in recording["summary"]
            assert reads_of_each(recording) <= times


def test_the_summary_of_the_loss_says_its_gradient():
    recording = next(each for each in presets.load() if each["kernel"] == "cross-entropy")
    assert "p minus 1 at the target and p elsewhere, divided by the number of rows" in recording["summary"]
    tensors = {each["name"]: each for each in recording["tensors"]}
    x, dx = (torch.tensor(read_numbers(tensors[name][when]), dtype=torch.float64).view(tensors[name]["shape"])
             for name, when in (("x", "before"), ("dx", "after")))  # fmt: skip
    target = torch.tensor(tensors["target"]["before"])
    wanted = (torch.softmax(x, 1) - torch.nn.functional.one_hot(target, x.shape[1])) / len(x)
    torch.testing.assert_close(dx, wanted, rtol=1e-5, atol=1e-7)


def test_the_erratum_names_the_true_sums():
    recording = next(each for each in presets.load() if presets.ERRATUM in each["summary"])
    assert f"{recording['rows'][1]['sum']:.3f}" == "1.443"
    assert "1.443 and 1.567" in presets.ERRATUM
    x = torch.tensor(presets.EXAMPLE[2])
    assert f"{(x - x.max()).exp().sum():.3f}" == "1.567"


@pytest.mark.skipif(
    shutil.which("node") is None or not (VIZ / "node_modules").is_dir(), reason="needs node and `make page`"
)
@pytest.mark.parametrize("name", trace.kernels())
def test_every_sentence_of_the_page_is_true_of_hidden_lost_tied_and_single_values(name, tmp_path):
    file = tmp_path / "odd.json"
    file.write_text(presets.text(odd(name)))
    run = subprocess.run(
        ["npx", "vitest", "run", "tests/sentences.test.ts", "--test-timeout=60000"], cwd=VIZ,
        env=os.environ | {"PAGE_RECORDINGS": str(file)}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]
