"""The README's table of results: what it shows, what it refuses, and that it touches nothing else."""

import re
from pathlib import Path

import pytest
import torch
from click.testing import CliRunner

from fused_softmax.bench import readme, record
from fused_softmax.bench.record import Ceiling, Figure, Point, Run
from fused_softmax.cli import main

ENVIRONMENT = {"torch": "2.11.0", "triton": "3.6.0", "gpu": {"name": "NVIDIA H200", "driver_version": "580.159"}}
COMMAND = "fused-softmax bench --quick --out h200_softmax.json"
EMPTY = f"# Title\n\n{readme.BEGIN}\n{readme.END}\n\nafter\n"
ROOT = Path(__file__).parents[1]


def timed(n_cols, provider, gb_per_s, **more):
    kernel, ceiling = Figure(1.0, 2.0, 3.0, gb_per_s), Ceiling("copy 1024 w4", 1.9, 4000.0)
    return Point(64, n_cols, "bfloat16", provider, "ok", kernel=kernel, ratio=gb_per_s / 4000, ceiling=ceiling, **more)


def run_of(*points, complete=True):
    return Run(ENVIRONMENT, COMMAND, list(points), complete=complete)


def files(tmp_path, run, text=EMPTY):
    results, page = tmp_path / "results.json", tmp_path / "README.md"
    record.save(run, results)
    page.write_text(text)
    return [str(results), str(page)], page


def test_a_row_for_every_shape_and_a_column_for_every_provider():
    table = readme.render(
        run_of(
            timed(256, "torch", 2000.4),
            timed(256, "fused_softmax", 3940.0),
            Point(64, 256, "bfloat16", "liger", "absent", "ModuleNotFoundError"),
            timed(512, "fused_softmax", 3800.0),
            Point(64, 512, "bfloat16", "torch", "refused", "RuntimeError"),
            timed(512, "quack", 1000.0, method="events"),
        )
    )
    assert "| rows x cols | dtype | fused_softmax | ratio | torch | quack |" in table
    assert "| 64 x 256 | bfloat16 | 3940 | 0.985 | 2000 |  |" in table
    assert "| 64 x 512 | bfloat16 | 3800 | 0.950 | refused | 1000\\* |" in table
    assert "NVIDIA H200, driver 580.159, torch 2.11.0, Triton 3.6.0" in table
    assert f"`{COMMAND}`" in table
    assert "liger: absent: ModuleNotFoundError" in table
    assert "torch: refused at 64 x 512 bfloat16: RuntimeError" in table
    assert "kernels" not in table.splitlines()[0]
    assert "timed by events" in table


def test_written_once_then_in_agreement_until_the_file_changes(tmp_path):
    arguments, page = files(tmp_path, run_of(timed(256, "fused_softmax", 3940.0)))
    assert readme.main([*arguments, "--check"]) == 1
    assert page.read_text() == EMPTY
    assert readme.main(arguments) == 0
    written = page.read_text()
    assert written.startswith("# Title\n\n")
    assert written.endswith("\n\nafter\n")
    assert readme.main([*arguments, "--check"]) == 0
    assert readme.main(arguments) == 0
    assert page.read_text() == written
    record.save(run_of(timed(256, "fused_softmax", 3000.0)), Path(arguments[0]))
    assert readme.main([*arguments, "--check"]) == 1
    assert readme.main(arguments) == 0
    assert "3940" not in page.read_text()


@pytest.mark.parametrize(
    ("run", "complaint"),
    [
        (run_of(timed(256, "fused_softmax", 1.0), complete=False), "stopped early"),
        (run_of(Point(64, 256, "bfloat16", "fused_softmax", "untimed")), "no kernel figures"),
        (run_of(), "no kernel figures"),
    ],
)
def test_runs_without_kernel_figures_are_refused(tmp_path, capsys, run, complaint):
    arguments, page = files(tmp_path, run)
    with pytest.raises(SystemExit, match="2"):
        readme.main(arguments)
    assert complaint in capsys.readouterr().err
    assert page.read_text() == EMPTY


@pytest.mark.parametrize("text", ["", readme.BEGIN, f"{readme.END}\n{readme.BEGIN}", EMPTY + EMPTY])
def test_markers_stand_once_and_in_order(tmp_path, capsys, text):
    arguments, page = files(tmp_path, run_of(timed(256, "fused_softmax", 1.0)), text)
    with pytest.raises(SystemExit, match="2"):
        readme.main(arguments)
    assert "once each" in capsys.readouterr().err
    assert page.read_text() == text


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"schema": 1}', '{"schema": 99}', None])
def test_files_of_another_kind_are_refused(tmp_path, capsys, text):
    arguments, page = files(tmp_path, run_of())
    results = Path(arguments[0])
    results.unlink() if text is None else results.write_text(text)
    with pytest.raises(SystemExit, match="2"):
        readme.main(arguments)
    assert "results.json" in capsys.readouterr().err
    assert page.read_text() == EMPTY


def test_the_picture_is_drawn_where_it_shows_other_figures(tmp_path):
    text = EMPTY.replace("# Title", "![GB/s](results.png)\n![GB/s](folder/results.png)")
    arguments, page = files(tmp_path, run_of(timed(256, "fused_softmax", 3940.0)), text)
    picture = tmp_path / "results.png"
    assert readme.main(arguments) == 0
    first = picture.read_bytes()
    assert first.startswith(b"\x89PNG")
    assert readme.main([*arguments, "--check"]) == 0
    picture.unlink()
    assert readme.main([*arguments, "--check"]) == 1
    assert not picture.exists()
    record.save(run_of(timed(256, "fused_softmax", 3941.0)), Path(arguments[0]))
    picture.write_bytes(first)
    assert readme.main(arguments) == 0
    assert picture.read_bytes() != first
    assert readme.main([*arguments, "--check"]) == 0
    page.write_text(EMPTY)
    picture.unlink()
    assert readme.main(arguments) == 0
    assert not picture.exists()


def commands_shown():
    """Of the README, each command with its output."""
    blocks = re.findall(r"^```\n\$ fused-softmax (\S[^\n]*)\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
    return [pytest.param(arguments, said, id=arguments) for arguments, said in blocks]


@pytest.mark.parametrize(("arguments", "said"), commands_shown())
def test_what_the_readme_says_a_command_prints_it_prints(monkeypatch, arguments, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(main, arguments.split(), prog_name="fused-softmax")
    assert result.exit_code == 0
    if arguments == "env":  # its values are the machine's
        assert [line.split()[0] for line in result.output.splitlines()] == [
            line.split()[0] for line in said.splitlines()
        ]
    else:
        assert result.output == said


def test_its_calls_of_sampling_run(device):
    """On a vocabulary that is small enough for the interpreter."""
    (block,) = (each for each in re.findall(r"^```python\n(.*?)^```$", (ROOT / "README.md").read_text(), re.M | re.S)
                if "sample(" in each)  # fmt: skip
    names = {"torch": torch}
    exec(block.replace("128256", "96").replace('"cuda"', f'"{device}"'), names)
    assert names["tokens"].shape == (8,)
    assert names["out"].top_tokens.shape == (8, 5)
    assert names["drafted"].tokens.shape == (8, 4)


@pytest.mark.parametrize(
    ("place", "name"), [("", "softmax"), ("losses", "cross_entropy"), ("linear", "linear_cross_entropy")]
)
def test_the_projects_readme_shows_the_committed_results(place, name):
    results = ROOT / f"benchmarks/results/h200_{name}.json"
    assert readme.main([str(results), str(ROOT / "README.md"), "--place", place, "--check"]) == 0


def test_products_are_in_us_and_several_tables_have_places(tmp_path):
    point = timed(1000, "fused_softmax", 10.0, operation="linear_cross_entropy", parameters={"shape": [64, 8, 1000]})
    text = EMPTY + "\n".join(readme.markers("linear"))
    arguments, page = files(tmp_path, run_of(point), text)
    assert readme.main([*arguments, "--place", "linear"]) == 0
    assert page.read_text().startswith(EMPTY)
    assert "| linear_cross_entropy | 64 x 8 x 1000 | bfloat16 | 2 | 0.003 |" in page.read_text()
    assert "in us" in page.read_text()
