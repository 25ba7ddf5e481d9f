"""The tables of results in README and docs: what they show, what they refuse, and that they touch nothing else."""

from pathlib import Path

import pytest

from fused_softmax.bench import committed, overview, readme, simulated, tables
from fused_softmax.bench.results import record
from fused_softmax.bench.results.record import Ceiling, Figure, Point, Run

ENVIRONMENT = {"torch": "2.11.0", "triton": "3.6.0", "gpu": {"name": "NVIDIA H200", "driver_version": "580.159"}}
COMMAND = "fused-softmax bench --quick --out h200_softmax.json"
BEGIN, END = tables.markers()
EMPTY = f"# Title\n\n{BEGIN}\n{END}\n\nafter\n"
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


@pytest.mark.parametrize("text", ["", BEGIN, f"{END}\n{BEGIN}", EMPTY + EMPTY])
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


@pytest.mark.parametrize(
    ("place", "name"),
    [
        ("", "softmax"),
        ("losses", "cross_entropy"),
        ("linear", "linear_cross_entropy"),
        ("sampling", "sampling"),
        ("attention", "attention"),
    ],
)
def test_the_page_of_results_shows_the_committed_ones(place, name):
    results = ROOT / f"benchmarks/results/h200_{name}.json"
    assert readme.main([str(results), str(ROOT / "docs/results.md"), "--place", place, "--check"]) == 0


def test_the_projects_readme_shows_the_committed_results():
    assert overview.main([str(ROOT / "benchmarks/results"), str(ROOT / "README.md"), "--check"]) == 0


def overview_of(**runs):
    table = overview.render({f"h200_{name}": run for name, run in runs.items()})
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    return table, {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[2:]}


def test_a_row_of_the_overview_is_the_mean_of_a_file():
    def point(n_cols, provider, us, status="ok", **more):
        return Point(64, n_cols, "float32", provider, status, kernel=Figure(us, us, us, 1.0), **more)

    run = run_of(
        point(256, "fused_softmax", 1.0, host_us=5.0, memory_bytes=2**20),
        point(256, "torch", 2.0, host_us=6.0, memory_bytes=2**21),
        point(512, "fused_softmax", 1.0, host_us=7.0, memory_bytes=2**23),
        point(512, "torch", 8.0, host_us=8.0, memory_bytes=2**24),
        point(512, "quack", 3.0, method="events"),
        point(256, "quack", 100.0, status="wrong"),
    )
    table, rows = overview_of(softmax=run)
    assert len(rows) == len(overview.LINES)
    assert rows["softmax"]["torch"] == "4.00 (2.00)"
    assert rows["softmax"]["QuACK"] == "3.00\\*"
    assert rows["softmax"]["MiB, ours / torch"] == "8 / 16"
    assert rows["softmax"]["host us, ours / torch"] == "6 / 7"
    assert set(rows["softmax"].values()) >= {"–"}
    assert set(list(rows["logsumexp"].values())[1:]) == {"–"}
    assert "Timed by events" in table
    assert "earlier kernels" in table
    run.environment = {**ENVIRONMENT, "kernels": "abc"}
    assert "earlier kernels" not in overview_of(softmax=run)[0]
    assert "the median of 2 shapes" in table


def test_a_row_of_the_overview_says_where_cudnn_computes():
    def point(provider, **more):
        return Point(64, 64, "bfloat16", provider, "ok", kernel=Figure(2.0, 2.0, 2.0, 1.0), **more)

    own = {"operation": "attention_causal", "plan": {"who": {"forward": "cuDNN"}}}
    run = run_of(point("fused_softmax", **own), point("sdpa cudnn", operation="attention_causal"))
    table, rows = overview_of(attention=run)
    assert rows["attention, causal †"]["cuDNN"] == "1.00"
    assert "\n† This package calls cuDNN" in table
    own["plan"]["who"]["forward"] = "own kernels"
    table, rows = overview_of(attention=run)
    assert "attention, causal" in rows
    assert "†" not in table


def test_draws_are_in_us_and_attention_in_tflops_but_for_one_query():
    def point(operation, us, shape, **more):
        figure = Figure(us, us, us, 1.0)
        return Point(8, shape[-1], "bfloat16", "fused_softmax", "ok", operation=operation, kernel=figure, **more)

    table = readme.render(run_of(point("sample_top_k", 5.25, (8, 128256)), point("sample", 1234.5, (8, 128256))))
    assert "| sample_top_k | 8 x 128256 | bfloat16 | 5.2 |" in table
    assert "| sample | 8 x 128256 | bfloat16 | 1234 |" in table
    assert "Kernel time in us" in table
    shapes = (4, 32, 4096, 128), (1, 8, 1024, 128)
    names = "attention", "attention_decode"
    table = readme.render(run_of(*(
        point(name, 1000.0 if name == "attention" else 7.7, shape, parameters={"shape": list(shape)})
        for name, shape in zip(names, shapes, strict=True)
    )))  # fmt: skip
    assert "| attention | 4 x 32 x 4096 x 128 | bfloat16 | 1100 |" in table
    assert "| attention_decode | 1 x 8 x 1024 x 128 | bfloat16 | 7.7 |" in table
    assert "Of one query: us" in table


def test_the_overview_is_written_once_and_checked(tmp_path, capsys):
    page, results = tmp_path / "README.md", tmp_path / "h200_softmax.json"
    empty = "before\n" + "\n".join(tables.markers("overview")) + "\nafter\n"
    page.write_text(empty)
    with pytest.raises(SystemExit, match="2"):
        overview.main([str(tmp_path), str(page)])
    assert "no file of" in capsys.readouterr().err
    record.save(run_of(timed(256, "fused_softmax", 3940.0), timed(256, "torch", 1000.0)), results)
    assert overview.main([str(tmp_path), str(page), "--check"]) == 1
    assert page.read_text() == empty
    assert overview.main([str(tmp_path), str(page)]) == 0
    assert page.read_text().startswith("before\n<!--")
    assert page.read_text().endswith("-->\nafter\n")
    assert overview.main([str(tmp_path), str(page), "--check"]) == 0


def test_products_are_in_us_and_several_tables_have_places(tmp_path):
    point = timed(1000, "fused_softmax", 10.0, operation="linear_cross_entropy", parameters={"shape": [64, 8, 1000]})
    text = EMPTY + "\n".join(tables.markers("linear"))
    arguments, page = files(tmp_path, run_of(point), text)
    assert readme.main([*arguments, "--place", "linear"]) == 0
    assert page.read_text().startswith(EMPTY)
    assert "| linear_cross_entropy | 64 x 8 x 1000 | bfloat16 | 2 | 0.003 |" in page.read_text()
    assert "in us" in page.read_text()


def test_the_page_on_shards_shows_the_ranks_that_are_computed(tmp_path, capsys):
    page = ROOT / "docs/shards.md"
    results = [ROOT / f"benchmarks/results/{name}.json" for name in committed.OVER_RANKS]
    results = [str(path) for path in results if path.exists()]
    assert simulated.main([*results, str(page), "--check"]) == 0
    stale = tmp_path / "shards.md"
    stale.write_text(page.read_text().replace("| 1024 | 128 |", "| 1024 | 127 |", 1))
    assert simulated.main([*results, str(stale), "--check"]) == 1
    assert "shards.md is stale: run this again without --check" in capsys.readouterr().err
    assert simulated.main([*results, str(stale)]) == 0
    assert stale.read_text() == page.read_text()


def test_measured_ranks_stand_beside_those_that_are_computed_for_their_memory(tmp_path):
    def point(case, provider, us, floor):
        figures = {"kernel": Figure(us, us, us, 1.0), "ceiling": Ceiling("copy 1024 w4", floor, 3000.0)}
        return Point(*case.shape, case.dtype, provider, "ok", operation="cross_entropy_gradient", **figures)

    large, small = simulated.CASES
    run = run_of(
        point(large, "fused_softmax peer", 375.5, 350.0),
        point(large, "fused_softmax collective", 560.0, 350.0),
        point(large, "loss_parallel", 9000.0, 350.0),
        point(small, "fused_softmax peer", 21.5, 6.5),
    )
    run.options["ranks"] = 4
    model = simulated.times_of(large, 4, 3e12)
    assert model.shard == pytest.approx(simulated.times_of(large, 4).shard * 4.2 / 3)
    *_, first, second = simulated.render([run]).splitlines()
    assert first == (
        "| NVIDIA H200 | 4 | 8192 x 128256 bfloat16 | "
        f"350 ({model.shard:.0f}) | 376 ({model.peer:.0f}) | 560 ({model.collective:.0f}) |"
    )
    assert "| 6.5 (5.5) | 21.5 (6.1) |  (" in second
    results, page = tmp_path / "h100_shards_4.json", tmp_path / "shards.md"
    record.save(run, results)
    page.write_text("\n".join(tables.markers("ranks")))
    assert simulated.main([str(results), str(page)]) == 0
    assert simulated.main([str(results), str(page), "--check"]) == 0
    assert simulated.main([str(page), "--check"]) == 1


def test_computed_times_follow_their_formulas():
    case = simulated.CASES[0]
    assert simulated.gather_us(2, 0) == simulated.GATHER_US
    assert simulated.ring_us(1024, 12) == pytest.approx(6.6 + 896 * 1.0 + 127 * 2.7 + 1023 * 12 / 20.4e9 * 1e6)
    assert simulated.ring_us(8, 2**30) == pytest.approx(8.4 + 7 * 3.4 + 7 * 2**30 / 450e9 * 1e6)
    shared, alone = (simulated.times_of(case, ranks) for ranks in (8, 16))
    assert shared.shard == pytest.approx(2 * case.tensor_bytes / 8 / 4.2e12 * 1e6)
    assert shared.peer == pytest.approx(shared.shard + 0.66 + 7 * 8 * 8192 / 450e9 * 1e6)
    assert alone.peer is None
    for each in (shared, alone):
        assert each.collective > 1.5 * each.shard + each.exchange
        assert each.gathered > each.collective
