"""Small results, and the command that makes a page of some, for the tests of the report."""

from pathlib import Path

from click.testing import CliRunner

from fused_softmax.bench.results import record
from fused_softmax.bench.results.record import Ceiling, Figure, Point, Run
from fused_softmax.cli import main

RESULTS = sorted((Path(__file__).parents[1] / "benchmarks/results").glob("*.json"))
GPU = {"name": "NVIDIA H200", "l2_bytes": 62914560, "memory_bytes": 150109880320}
ENVIRONMENT = {"torch": "2.11.0", "triton": "3.6.0", "python": "3.12", "commit": None, "gpu": GPU}


def figure(us, moved=1e6):
    return Figure(us * 0.99, us, us * 1.02, moved / us * 1e-3)


def timed(n_rows, n_cols, provider="fused_softmax", us=10.0, **more):
    top = Ceiling("copy", 9.0, 111.0)
    settings = {"kernel": figure(us), "call": figure(us + 5), "ceiling": top, "ratio": 9.0 / us} | more
    return Point(n_rows, n_cols, more.pop("dtype", "float32"), provider, "ok", **settings)


def run_of(*points, complete=True, **environment):
    return Run(ENVIRONMENT | environment, "fused-softmax bench --out x.json", list(points), complete=complete)


def report(tmp_path, *arguments):
    out = tmp_path / "report.html"
    result = CliRunner().invoke(main, ["report", *map(str, arguments), "-o", str(out)], prog_name="fused-softmax")
    return result, out


def written(tmp_path, name, run):
    record.save(run, tmp_path / name)
    return tmp_path / name
