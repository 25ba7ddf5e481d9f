"""The tables of results in README and docs: what they show, what they refuse, and that they touch nothing else."""

from dataclasses import replace
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


@pytest.mark.parametrize(
    ("module", "results", "page", "said"),
    [
        (readme, b"{}", b"", "r.json: is not what `fused-softmax bench --out` writes"),
        (readme, None, b"\xff", "page.md: it is not text in UTF-8"),
        (simulated, None, b"", "r.json: is not what `fused-softmax bench shards --out` writes"),
        (simulated, b"{}", b"", "r.json: is not what `fused-softmax bench --out` writes"),
    ],
)
def test_the_file_that_is_wrong_is_named_once(tmp_path, capsys, module, results, page, said):
    found, where = tmp_path / "r.json", tmp_path / "page.md"
    record.save(run_of(took("fused_softmax", 2.0)), found)
    if results is not None:
        found.write_bytes(results)
    where.write_bytes(page)
    with pytest.raises(SystemExit, match="2"):
        module.main([str(found), str(where)])
    assert capsys.readouterr().err.endswith(f"error: {tmp_path}/{said}\n")


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
    table = table.replace(overview.UNBROKEN, " ")
    rows = [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines() if line[:1] == "|"]
    return table, {row[0]: dict(zip(rows[0], row, strict=True)) for row in rows[2:]}


def took(provider, us, n_cols=256, *, dtype="bfloat16", status="ok", **more):
    return Point(64, n_cols, dtype, provider, status, kernel=Figure(us, us, us, 1.0), **more)


def test_a_row_of_the_overview_is_the_mean_of_a_file():
    run = run_of(
        took("fused_softmax", 1.0, host_us=5.0),
        took("torch", 2.0, host_us=6.0),
        took("fused_softmax", 1.0, 512, dtype="float32", host_us=7.0),
        took("torch", 8.0, 512, dtype="float32", host_us=8.0),
        took("quack", 3.0, 512, dtype="float32", method="events"),
        took("quack", 100.0, status="wrong"),
        took("liger", 40.0),
    )
    table, rows = overview_of(softmax=run)
    assert list(rows) == ["softmax, 64 x 256"]
    assert rows["softmax, 64 x 256"]["H200: over torch"] == "4.00 (2.00)"
    assert rows["softmax, 64 x 256"]["over others"] == "Liger 40.0, QuACK 3.00\\*"
    assert "us, ours / torch's: softmax 6 / 7." in table
    assert "Timed by events" in table
    assert "H200: NVIDIA H200." in table
    assert "earlier kernels" in table
    run.environment = {**ENVIRONMENT, "kernels": "abc"}
    assert "earlier kernels" not in overview_of(softmax=run)[0]


def test_the_overview_has_the_time_at_the_bf16_shape_where_torch_takes_most_memory():
    run = run_of(
        took("fused_softmax", 65.4, memory_bytes=2**20),
        took("torch", 999.0, memory_bytes=2**21),
        took("fused_softmax", 2345.6, 512, memory_bytes=2**23),
        took("torch", 12345.6, 512, memory_bytes=2**24),
        took("liger", 1.0, 512, memory_bytes=2**23 * 0.96),
        took("quack", 1.0, 512, memory_bytes=2**19),
        took("fused_softmax", 1.0, 1024, dtype="float32", memory_bytes=2**30),
        took("torch", 1.0, 1024, dtype="float32", memory_bytes=2**30),
    )
    (row,) = overview_of(softmax=run)[1].values()
    assert (row["operation, shape"], row["H200: ours / torch"]) == ("softmax, 64 x 512", "2.35 / 12.3 ms")
    assert row["MiB, ours / torch"] == "8 / 16, QuACK 0.5"
    run.points = [replace(point, dtype="float16") for point in run.points[:2]]
    (row,) = overview_of(softmax=run)[1].values()
    assert (row["operation, shape"], row["H200: ours / torch"]) == ("softmax, 64 x 256 float16", "65.4 / 999 us")
    run.points = [took("fused_softmax", 999.0), took("torch", 1000.0)]
    (row,) = overview_of(softmax=run)[1].values()
    assert (row["H200: ours / torch"], row["MiB, ours / torch"]) == ("999 us / 1.00 ms", "–")


def test_operations_of_one_row_are_taken_together_and_the_slowest_is_shown():
    points = [took("fused_softmax", us, operation=name, memory_bytes=1)
              for name, us in (("sample_top_p", 4.0), ("sample_top_p_peaked", 8.0))]  # fmt: skip
    torchs = [replace(each, provider="torch", kernel=Figure(32.0, 32.0, 32.0, 1.0)) for each in points]
    (row,) = overview_of(sampling=run_of(*points, *torchs))[1].values()
    assert (row["operation, shape"], row["H200: ours / torch"]) == ("sample, top-p 0.9, 64 x 256", "8.00 / 32.0 us")
    assert row["H200: over torch"] == "5.66 (4.00)"


def test_each_gpu_that_has_figures_has_columns_in_the_overview():
    fast = run_of(took("fused_softmax", 2.0), took("torch", 4.0), took("liger", 4.0))
    slow = run_of(took("fused_softmax", 2.0), took("torch", 6.0), took("liger", 16.0))
    other = run_of(took("fused_softmax", 3.0, operation="logsumexp"), took("torch", 3.0, operation="logsumexp"))
    slow.environment = ENVIRONMENT | {"gpu": {"name": "NVIDIA H100"}}
    cold = Run(slow.environment, COMMAND, [])
    runs = {"h200_softmax": fast, "h200_logsumexp": other, "h100_softmax": slow, "h100_cold": cold}
    table = overview.render(runs).replace(overview.UNBROKEN, " ")
    head, _, softmax, logsumexp = [line for line in table.splitlines() if line[:1] == "|"]
    columns = "H200: ours / torch | H200: over torch | H100: ours / torch | H100: over torch"
    assert head == f"| operation, shape | {columns} | over others | MiB, ours / torch |"
    assert softmax == "| softmax, 64 x 256 | 2.00 / 4.00 us | 2.00 | 2.00 / 6.00 us | 3.00 | Liger 4.00 (2.00) | – |"
    assert logsumexp == "| logsumexp, 64 x 256 | 3.00 / 3.00 us | 1.00 | – | – | – | – |"
    assert "over all of these GPUs" in table
    assert "H200: NVIDIA H200. H100: NVIDIA H100." in table
    del runs["h100_softmax"]
    assert "H100" not in overview.render(runs)


def test_the_overview_says_what_failed_its_check_and_by_how_much():
    def wrong(provider, message):
        return Point(64, 128, "float32", provider, "wrong", message)

    softmax = run_of(
        took("fused_softmax", 1.0), took("torch", 1.0), took("fused_softmax", 1.0, dtype="float32"),
        wrong("fused_softmax", "largest error 1.59e-06, allowed 1.58e-06"), wrong("liger", "NaN in 3 of 64 rows"),
        Point(64, 128, "float32", "quack", "absent", "no module"), took("liger", 9.0, 512, dtype="float32"),
    )  # fmt: skip
    peaks = run_of(wrong("fused_softmax", "on replay: largest error 1.50e-06, allowed 1.40e-06"))
    table, _ = overview_of(softmax=softmax, peaks=peaks)
    assert "**Failed the check against float64**" in table
    assert (
        "softmax in float32 by this package, 2 of 3 results, at worst 1.50e-06 off where 1.40e-06 is allowed; "
        "softmax in float32 by Liger, 1 of 2 results, NaN in 3 of 64 rows. "
        "Not installed on the machine that measured: QuACK."
    ) in table
    right = overview_of(softmax=run_of(took("fused_softmax", 1.0), took("torch", 1.0)))[0]
    assert "Failed" not in right
    assert "Not installed" not in right


def test_a_row_of_the_overview_says_where_cudnn_computes():
    own = {"operation": "attention_causal", "plan": {"who": {"forward": "cuDNN"}}}
    run = run_of(took("fused_softmax", 2.0, **own), took("sdpa cudnn", 2.0, operation="attention_causal"))
    table, rows = overview_of(attention=run)
    assert rows["attention, causal †, 64 x 256"]["over others"] == "cuDNN 1.00"
    assert "† This package calls cuDNN" in table
    own["plan"]["who"]["forward"] = "own kernels"
    table, rows = overview_of(attention=run)
    assert "attention, causal, 64 x 256" in rows
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


def test_the_notes_on_ranks_show_those_that_are_computed(tmp_path, capsys):
    page = ROOT / "measured/ranks.md"
    results = [ROOT / f"benchmarks/results/{name}.json" for name in committed.OVER_RANKS]
    results = [str(path) for path in results if path.exists()]
    assert simulated.main([*results, str(page), "--check"]) == 0
    stale = tmp_path / "ranks.md"
    stale.write_text(page.read_text().replace("| 1024 | 128 |", "| 1024 | 127 |", 1))
    assert simulated.main([*results, str(stale), "--check"]) == 1
    assert "ranks.md is stale: run this again without --check" in capsys.readouterr().err
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
    results, page = tmp_path / "h100_shards_4.json", tmp_path / "ranks.md"
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
