"""`bench all`: the table of committed results, what it measures anew, and what it keeps."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
from click.testing import CliRunner

from fused_softmax.bench.commands.commands import asked_of
from fused_softmax.bench.committed import COMMITTED, OVER_RANKS, Row, state
from fused_softmax.bench.measure import measure, run, saving
from fused_softmax.bench.measure.timing import ContextLost
from fused_softmax.bench.results import fingerprint, record
from fused_softmax.bench.results.record import Ceiling, Figure
from fused_softmax.cli import main

RESULTS = Path(__file__).parents[1] / "benchmarks/results"
TABLE = {
    "one": "custom --shape 8x100,4x50 --provider torch,naive",
    "two": "custom --shape 2x30,2x40 --op logsumexp --provider torch",
    "three": "custom --shape 2x30 --provider fused_softmax,liger --quick",
}


FILES = sorted({path.stem for path in RESULTS.glob("*.json")} - OVER_RANKS.keys())


def test_the_table_has_the_committed_files():
    assert set(FILES) <= set(COMMITTED)


@pytest.mark.parametrize("name", FILES)
def test_the_tables_arguments_make_what_a_file_has(name):
    kept, made = record.load(RESULTS / f"{name}.json"), asked_of(COMMITTED[name].arguments, f"{name}.json")
    assert made.command.endswith(f"--out {name}.json")
    assert kept.options in ({}, made.recorded)
    points = {(point.case, point.provider) for point in kept.points} | {each.name for each in kept.first_calls}
    if name.endswith("_peaks"):  # its columns follow the planner's ladders
        points, wanted = ({(case.operation, case.dtype, who) for case, who in p} for p in (points, made.points))
        assert points == wanted
    elif name.endswith("_cold"):  # an operator that came later has no first call there until all are measured again
        assert points <= set(made.points)
    else:
        assert points == set(made.points)


@pytest.fixture(autouse=True)
def table(monkeypatch, request):
    """Three small files in place of the committed ones, but where the test is of these."""
    if request.function.__name__.startswith("test_the_table"):
        return
    for name in list(COMMITTED):
        monkeypatch.delitem(COMMITTED, name)
    for name, arguments in TABLE.items():
        monkeypatch.setitem(COMMITTED, name, Row(name, arguments))


class Stand:
    """A stand-in for the GPU's measurements. seen: what was measured. stop: raised for a case of this size."""

    def __init__(self):
        self.seen, self.stop, self.changes = [], {}, {}

    def __call__(self, case, names, effort):
        if error := self.stop.pop(case.size, None):
            raise error
        self.seen.append(case.size)
        return [self.point(case, name) for name in names]

    def point(self, case, name):
        if name == "liger":
            return measure.point(case, name, "absent", "ModuleNotFoundError: No module named 'liger_kernel'")
        figures = {"kernel": Figure(1, 2, 3, 4), "ceiling": Ceiling("copy", 1, 8), "ratio": 0.5}
        return replace(measure.point(case, name, "ok", **figures), **self.changes.get(case.size, {}))


@pytest.fixture
def stand(monkeypatch):
    stand = Stand()
    monkeypatch.setattr(measure, "on_gpu", lambda: True)
    monkeypatch.setattr(run, "gpu_facts", lambda: ({"name": "NVIDIA H200", "l2_bytes": 2**20}, None))
    monkeypatch.setattr(measure, "measure", stand)
    return stand


def bench_all(folder, *arguments):
    return CliRunner().invoke(main, ["bench", "all", "--out", str(folder), *arguments], prog_name="fused-softmax")


def lines(result):
    return result.stdout.splitlines()


def files(folder):
    return sorted(path.name for path in folder.iterdir())


def test_every_file_is_made_in_order_and_then_is_current(stand, tmp_path):
    result = bench_all(tmp_path / "new")
    assert result.exit_code == 0, result.output
    said = lines(result)
    assert [line.partition(" in ")[0] for line in said if "measured" in line] == [
        "one: measured now: 4 points", "two: measured now: 2 points", "three: measured now: 2 points",
    ]  # fmt: skip
    assert said[0] == "one: missing"
    assert "  liger: absent: ModuleNotFoundError: No module named 'liger_kernel'" in said
    assert files(tmp_path / "new") == ["one.json", "three.json", "two.json"]
    kept = record.load(tmp_path / "new/one.json")
    assert kept.complete
    assert kept.command == f"fused-softmax bench {TABLE['one']} --out one.json"
    assert kept.environment["kernels"] == fingerprint.kernels()
    count = len(stand.seen)
    result = bench_all(tmp_path / "new", "--resume")
    assert result.exit_code == 0
    assert lines(result) == [f"{name}: current: of the kernels of this source" for name in TABLE]
    assert len(stand.seen) == count


@pytest.mark.parametrize("stop", ["8 x 100", "4 x 50", "2 x 30", "2 x 40"])
def test_an_interrupted_one_continues_where_it_stopped(stand, tmp_path, stop):
    stand.stop[stop] = KeyboardInterrupt()
    result = bench_all(tmp_path)
    assert result.exit_code == 130
    assert lines(result)[-1] == "Interrupted: what was measured is kept. --resume continues from here."
    assert sum(name.endswith(".partial.json") for name in files(tmp_path)) == 1
    result = bench_all(tmp_path, "--resume")
    assert result.exit_code == 0, result.output
    assert stand.seen == ["8 x 100", "4 x 50", "2 x 30", "2 x 40", "2 x 30"]
    assert files(tmp_path) == ["one.json", "three.json", "two.json"]
    assert [len(record.load(tmp_path / name).points) for name in files(tmp_path)] == [4, 2, 2]


def test_an_interrupt_while_a_file_is_written_keeps_its_points(stand, tmp_path, monkeypatch):
    def interrupted(kept, path, save=saving.save):
        if path.name == "two.json":
            raise KeyboardInterrupt
        save(kept, path)

    with monkeypatch.context() as patch:
        patch.setattr(saving, "save", interrupted)
        assert bench_all(tmp_path).exit_code == 130
    count = len(stand.seen)
    assert bench_all(tmp_path, "--resume").exit_code == 0
    assert stand.seen[count:] == ["2 x 30"]


def test_what_is_there_is_kept_unless_a_flag_says_otherwise(stand, tmp_path):
    (tmp_path / "two.json").write_text("earlier")
    result = bench_all(tmp_path)
    assert result.exit_code == 2
    assert "two.json would be overwritten: --resume keeps what is current, --force measures all anew" in result.output
    assert stand.seen == []
    assert (tmp_path / "two.json").read_text() == "earlier"
    assert bench_all(tmp_path, "--only", "one").exit_code == 0
    result = bench_all(tmp_path, "--resume")
    assert "one: current: of the kernels of this source" in lines(result)
    assert "two: stale: two.json is not what `fused-softmax bench --out` writes" in lines(result)
    stand.seen.clear()
    assert bench_all(tmp_path, "--force", "--only", "one.json,three").exit_code == 0
    assert stand.seen == ["8 x 100", "4 x 50", "2 x 30"]


def edit(path, change):
    kept = record.load(path)
    change(kept)
    record.save(kept, path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            lambda kept: kept.environment.update(kernels="0123456789ab", kernels_of={}),
            "of other kernels (fingerprint 0123456789ab",
        ),
        (lambda kept: kept.environment.pop("kernels"), "made before fingerprints"),
        (lambda kept: kept.environment.update(triton="1.0"), "triton 1.0 then, "),
        (lambda kept: kept.environment["gpu"].update(name="NVIDIA H100"), "GPU name NVIDIA H100 then, NVIDIA H200 now"),
        (lambda kept: kept.environment["gpu"].update(plans="1"), "GPU plans 1 then, None now"),
        (lambda kept: kept.options.update(rounds=1), "rounds 1 then, 3 now"),
        (lambda kept: kept.points.pop(), "lacks 1 of its 4 points"),
    ],
)
def test_a_stale_file_says_why_and_is_measured_anew(stand, tmp_path, change, why):
    assert bench_all(tmp_path, "--only", "one").exit_code == 0
    edit(tmp_path / "one.json", change)
    said = lines(bench_all(tmp_path, "--only", "one", "--resume"))
    assert said[0].startswith(f"one: stale: {why}")
    assert said[1].startswith("one: measured now")
    assert lines(bench_all(tmp_path, "--only", "one", "--resume")) == ["one: current: of the kernels of this source"]


def test_a_partial_file_of_another_source_is_left_out(stand, tmp_path):
    stand.stop["4 x 50"] = KeyboardInterrupt()
    assert bench_all(tmp_path, "--only", "one").exit_code == 130
    edit(tmp_path / "one.partial.json", lambda kept: kept.environment.update(source="1"))
    result = bench_all(tmp_path, "--only", "one", "--resume")
    assert result.exit_code == 0
    assert "one: its partial file is left out: cannot resume one.json: source 1 then" in result.output
    assert stand.seen == ["8 x 100", "8 x 100", "4 x 50"]


def test_a_wrong_figure_is_said_and_fails_the_run_and_its_file_is_written(stand, tmp_path):
    wrong = {"status": "wrong", "message": "largest error 1", "kernel": None, "ceiling": None, "ratio": None}
    stand.changes["4 x 50"] = wrong
    result = bench_all(tmp_path)
    assert result.exit_code == 1
    said = lines(result)
    assert said[1].endswith(", 2 failed")
    assert "  torch: wrong at 4 x 50 float32: largest error 1" in said
    result = bench_all(tmp_path, "--resume")
    assert result.exit_code == 1
    assert lines(result)[0] == "one: current: of the kernels of this source, 2 failed"
    assert files(tmp_path) == ["one.json", "three.json", "two.json"]


def test_a_file_that_fails_does_not_stop_the_others(stand, tmp_path):
    stand.stop["4 x 50"] = RuntimeError("no memory\nat /some/where/file.py")
    result = bench_all(tmp_path)
    assert result.exit_code == 1
    assert "one: failed: RuntimeError: no memory" in lines(result)
    assert files(tmp_path) == ["one.partial.json", "three.json", "two.json"]


def test_where_the_gpu_is_lost_nothing_more_is_measured(stand, tmp_path):
    stand.stop["4 x 50"] = ContextLost("naive broke the CUDA context")
    result = bench_all(tmp_path)
    assert result.exit_code == 1
    assert lines(result)[-1] == (
        "Stopped: naive broke the CUDA context. What was measured is kept. --resume continues from here."
    )
    assert "one: failed" in lines(result)
    assert bench_all(tmp_path, "--resume").exit_code == 0
    assert stand.seen == ["8 x 100", "4 x 50", "2 x 30", "2 x 40", "2 x 30"]


def test_a_dry_run_says_what_is_current_without_a_gpu(stand, tmp_path, monkeypatch):
    assert bench_all(tmp_path, "--only", "one,two").exit_code == 0
    edit(tmp_path / "two.json", lambda kept: kept.environment.update(kernels="0123456789ab", kernels_of={}))
    before = {name: (tmp_path / name).read_bytes() for name in files(tmp_path)}
    monkeypatch.setattr(run, "gpu_facts", lambda: (None, None))
    monkeypatch.setattr(measure, "measure", lambda *_: pytest.fail("measured"))
    result = bench_all(tmp_path, "--dry-run")
    assert result.exit_code == 0
    assert lines(result) == [
        "No GPU: of each file the kernels are compared, and neither its GPU nor its versions.",
        "one: current: of the kernels of this source",
        f"two: stale: of other kernels (fingerprint 0123456789ab against {fingerprint.kernels()})",
        "three: missing",
    ]
    assert {name: (tmp_path / name).read_bytes() for name in files(tmp_path)} == before
    assert lines(bench_all(tmp_path / "none", "--dry-run", "--only", "one"))[1:] == ["one: missing"]
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("arguments", "code", "complaint"),
    [
        (["--only", "four"], 2, "no committed file is named 'four'; --dry-run lists them all"),
        (["--resume", "--force"], 2, "give only one of them"),
        ([], 1, "no GPU: nothing was measured; --dry-run says which files are current"),
    ],
)
def test_what_cannot_be_measured_is_a_line(tmp_path, monkeypatch, arguments, code, complaint):
    monkeypatch.setattr(measure, "on_gpu", lambda: False)
    result = bench_all(tmp_path / "new", *arguments)
    assert result.exit_code == code
    assert complaint in result.output
    assert "Traceback" not in result.output
    assert not (tmp_path / "new").exists()


def test_a_folder_is_needed_that_can_be_written(stand, tmp_path):
    (tmp_path / "file").write_text("kept")
    for folder, complaint in (
        (tmp_path / "file", "it is not a folder"),
        (tmp_path / "file/under", "cannot write into"),
    ):
        result = bench_all(folder)
        assert result.exit_code == 2
        assert complaint in result.output
    assert CliRunner().invoke(main, ["bench", "all"]).exit_code == 2
    assert stand.seen == []


def test_a_file_that_is_no_result_is_stale(tmp_path):
    (tmp_path / "a.json").write_text(json.dumps({"schema": 99}))
    said = "stale: a.json is not what `fused-softmax bench --out` writes"
    environment = {"kernels": "1", "gpu": None}
    assert str(state(tmp_path / "a.json", environment, (), {})) == said
    assert str(state(tmp_path / "b.json", environment, (), {})) == "missing"
