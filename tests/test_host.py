"""The sweep of host times: which rows it has, how it takes turns, and what it writes. Its times are a GPU's to tell."""

import gc
import itertools
import json
import os

import products
import pytest
import torch
from click.testing import CliRunner
from rich.console import Console

from fused_softmax.bench.measure import host
from fused_softmax.cli import main
from fused_softmax.core import route

interpreted = pytest.mark.skipif(not route.INTERPRET, reason="counts calls of the kernels")


@pytest.fixture(autouse=True)
def few_calls(monkeypatch):
    gc.freeze()  # each measurement collects garbage once: half a second if it looks at what other tests left
    monkeypatch.setattr(host, "ROUNDS", 1)
    monkeypatch.setattr(host, "MOST_CALLS", 1)
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pair(ours, torchs, arguments=None, **more):
    return host.Pair("one", ours, torchs, arguments or itertools.repeat((torch.zeros(2),)), **more)


@interpreted
def test_every_row_has_torchs_result_and_figures():
    pairs = host.pairs("cpu", (2, 8))
    rows = [host.measure(each, 1, 1) for each in (itertools.islice(pairs, 0, None, 3) if products.QUICK else pairs)]
    assert [row.name for row in rows if row.wrong] == []
    assert len({row.name for row in rows}) == len(rows)
    for row in rows:
        assert row.ours_us > 0
        assert row.torch_us > 0
        assert row.ratio == row.ours_us / row.torch_us


def test_the_rows():
    names = " ".join(each.name for each in host.pairs("cpu", (2, 8)))
    for part in ("fp16", "scale", "bool mask", "is_causal", "dtype=float32", "out", "dim 0", "requires grad",
                 "log_softmax, forward and backward", "cross_entropy, forward and backward", "enabled",
                 "a new scale", "cross_entropy, a new number of rows"):  # fmt: skip
        assert part in names


def test_the_sides_take_turns_without_the_collector():
    said = []

    def side(name):
        return lambda x: said.append((name, gc.isenabled())) or x

    row = host.measure(pair(side("ours"), side("torch")), rounds=3, most_calls=2)
    assert gc.isenabled()
    rounds = said[-3 * 2 * 3 :]  # in each, a call that is not timed and two that are
    assert rounds == 3 * [*[("ours", False)] * 3, *[("torch", False)] * 3]
    assert row.ratio == row.ours_us / row.torch_us


def test_both_sides_have_the_same_arguments_and_new_ones_each_call():
    seen = {"ours": [], "torch": []}

    def side(name):
        return lambda x, i: seen[name].append(i) or x

    host.measure(pair(side("ours"), side("torch"), ((torch.zeros(2), i) for i in itertools.count())), 3, 2)
    assert len(set(seen["ours"])) == len(seen["ours"]), "a number that was seen before"
    assert [i for i in seen["ours"] if i in seen["torch"]] == seen["torch"]


def test_only_our_side_is_within_the_context():
    within = []

    class Context:
        def __enter__(self):
            within.append(True)

        def __exit__(self, *error):
            within.pop()

    def call(expected):
        def check(x):
            assert bool(within) is expected
            return x

        return check

    assert not host.measure(pair(call(True), call(False), within=Context), 2, 1).wrong


def test_a_wrong_result_has_no_figure():
    row = host.measure(pair(lambda x: x + 1, lambda x: x))
    assert (row.ours_us, row.torch_us, row.ratio) == (None, None, None)
    assert row.wrong.startswith("Tensor-likes are not")
    console = Console(width=120)
    with console.capture() as printed:
        host.print_rows([row, host.Row("two", 3.0, 6.0, 0.5)], console)
    assert "wrong" in printed.get()
    assert "two" in printed.get()
    assert "0.50" in printed.get()


def test_the_command_writes_rows_and_environment(tmp_path, monkeypatch):
    same = pair(torch.sin, torch.sin)
    monkeypatch.setattr(host, "pairs", lambda device: iter([same]))
    out = tmp_path / "host.json"
    done = CliRunner().invoke(main, ["bench", "host", "--out", str(out)])
    assert done.exit_code == 0, done.output
    assert "ratio" in done.output
    found = json.loads(out.read_text())
    assert found["command"] == "fused-softmax bench host --out host.json"
    assert found["environment"]["torch"]
    assert found["options"]["shape"] == [64, 1024]
    (row,) = found["rows"]
    assert row.keys() == {"name", "ours_us", "torch_us", "ratio", "wrong"}
    assert str(tmp_path) not in out.read_text()
    monkeypatch.setattr(host, "pairs", lambda device: iter([pair(torch.sin, torch.cos)]))
    assert CliRunner().invoke(main, ["bench", "host"]).exit_code == 1
    assert os.listdir(tmp_path) == ["host.json"]
