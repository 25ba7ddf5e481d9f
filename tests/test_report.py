"""The page of results: what its charts and its summary show, and that it needs nothing beside itself."""

import base64
import gzip
import json
import re
from dataclasses import replace

import pytest
from products import one_in
from reports import RESULTS, report, run_of, timed, written

from fused_softmax.bench.entries.operations import OPERATIONS
from fused_softmax.bench.results import fingerprint
from fused_softmax.bench.results.record import Check, Point
from fused_softmax.bench.show import summary

pytest.importorskip("altair", reason="the report's extra is not installed")
pytest.importorskip("vl_convert", reason="the report's extra is not installed")

from fused_softmax.bench import catalog
from fused_softmax.bench.show import charts, page


def charts_of(run):
    (group,) = charts.groups(run, "stem")
    return {chart.title.partition(":")[0]: chart for chart in group.charts}


def data(chart):
    """The rows of the chart's largest data set."""
    spec = chart.spec
    found = [layer["data"] for layer in [spec, *spec.get("layer", [])] if "data" in layer]
    return max((each["values"] for each in found), key=len)


def encodings(spec):
    for part in [spec, *spec.get("layer", [])]:
        yield from encodings(part) if part is not spec else ()
        if "encoding" in part:
            yield part["encoding"]


@pytest.mark.parametrize("path", one_in(12, RESULTS), ids=lambda path: path.stem)
def test_charts_of_committed_results_are_valid_vega_lite(monkeypatch, path):
    monkeypatch.setattr(charts, "VALIDATE", True)
    part = page.part(path)
    assert {(g.operation, g.dtype) for g in part.groups} == {(p.operation, p.dtype) for p in part.run.points}
    for group in part.groups:
        speed = "Time" if group.operation.startswith(("linear_", "attention")) else "Speed"
        of_steps = group.operation.startswith("step_")  # which have no kernel of their own, and so no ceiling
        wanted = {"Time", "Memory"} if of_steps else {speed, "Ratio to the ceiling", "Call against kernel"}
        assert wanted <= {chart.title.partition(":")[0] for chart in group.charts}
    assert len({chart.name for group in part.groups for chart in group.charts}) == sum(
        len(group.charts) for group in part.groups
    )


def test_a_curve_for_every_provider_and_the_ceiling_over_what_varies():
    run = run_of(*(timed(4096, n, name) for n in (256, 512, 1024) for name in ("fused_softmax", "torch")))
    speed = charts_of(run)["Speed"]
    assert {row["provider"] for row in data(speed)} == {"fused_softmax", "torch", "best copy kernel"}
    assert {row["at"] for row in data(speed)} == {256, 512, 1024}
    assert {encoding["x"]["title"] for encoding in encodings(speed.spec)} == {"columns"}
    by_rows = charts_of(run_of(*(timed(n, 4096) for n in (1, 2, 64))))["Speed"]
    assert {encoding["x"]["title"] for encoding in encodings(by_rows.spec)} == {"rows"}


def test_providers_are_told_apart_by_colour_by_shape_and_by_dash():
    names = [*catalog.provider_names(), "stranger"]
    run = run_of(*(timed(4096, n, name) for n in (256, 512) for name in names))
    spec = charts_of(run)["Speed"].spec
    for channel in ("color", "shape", "strokeDash"):
        scales = [e[channel]["scale"] for e in encodings(spec) if channel in e]
        assert scales
        for scale in scales:
            assert sorted(scale["domain"]) == sorted([*names, "best copy kernel"])
            assert len({str(look) for look in scale["range"]}) == len(names) + 1, channel


def test_speed_up_is_a_map_of_rows_by_columns_where_the_points_fill_one():
    points = [
        timed(rows, cols, name, us)
        for rows in (1, 16, 256)
        for cols in (1024, 4096)
        for name, us in (("fused_softmax", 10), ("torch", 10 * rows), ("naive", 40))
    ]
    grid = charts_of(run_of(*points))["Speed-up"]
    assert [(row["rows"], row["factor"]) for row in data(grid)] == [
        (1, 1),
        (1, 1),
        (16, 16),
        (16, 16),
        (256, 256),
        (256, 256),
    ]
    (encoding, *_) = encodings(grid.spec)
    assert {encoding["x"]["field"], encoding["y"]["field"]} == {"rows", "cols"}
    column = charts_of(run_of(*(p for p in points if p.n_rows == 16)))["Speed-up"]
    assert {(row["over"], row["factor"]) for row in data(column)} == {("torch", 16), ("naive", 4)}


def test_a_grid_has_curves_over_the_longer_size_and_a_choice_of_the_other():
    run = run_of(*(timed(rows, cols) for rows in (1, 16, 256) for cols in (1024, 4096)))
    speed = charts_of(run)["Speed"]
    assert {row["at"] for row in data(speed)} == {1, 16, 256}
    assert {row["by"] for row in data(speed)} == {1024, 4096}
    (choice,) = (param for param in speed.spec["params"] if "bind" in param and "options" in param["bind"])
    assert (choice["bind"]["options"], choice["value"]) == ([1024, 4096], 4096)
    assert speed.shown == "4096 columns"
    scattered = run_of(timed(1, 32768), timed(8, 32000), timed(8, 128), timed(132, 32768), timed(64, 1024))
    assert charts.grid_of([point.case for point in scattered.points]) is None
    assert charts_of(scattered)["Speed"].dots


def test_what_was_not_measured_has_no_chart():
    names = charts_of(run_of(timed(8, 100), timed(8, 200))).keys()
    assert names == {"Speed", "Ratio to the ceiling", "Call against kernel"}
    with_memory = run_of(timed(8, 100, memory_bytes=2**20), timed(8, 200, memory_bytes=2**21))
    assert [row["value"] for row in data(charts_of(with_memory)["Memory"])] == [1, 2]
    assert "Time against memory" not in charts_of(with_memory)
    on_cpu = run_of(*(replace(timed(8, n), kernel=None, ceiling=None, ratio=None) for n in (100, 200)), gpu=None)
    assert charts_of(on_cpu).keys() == {"Speed"}
    assert "eager wall time" in charts_of(on_cpu)["Speed"].caption
    assert charts.groups(run_of(Point(8, 100, "float32", "torch", "absent", "no module")), "stem") == []


def test_a_linear_layers_loss_is_time_and_memory():
    def chunked(shape, provider, us, mib):
        n_rows, _, n_cols = shape
        more = {"operation": "linear_cross_entropy", "parameters": {"shape": list(shape)}, "memory_bytes": mib * 2**20}
        return timed(n_rows, n_cols, provider, us, **more)

    shapes = (64, 8, 1000), (128, 8, 1000)
    run = run_of(*(chunked(s, *of) for s in shapes for of in (("fused_softmax", 2000, 100), ("torch", 1000, 300))))
    drawn = charts_of(run)
    assert "Speed" not in drawn
    assert {row["value"] for row in data(drawn["Time"])} == {1.0, 2.0, 0.009}  # ms, the products' too
    frontier = drawn["Time against memory"]
    assert {(row["provider"], row["mib"], row["ms"]) for row in data(frontier)} == {
        ("fused_softmax", 100, 2.0), ("torch", 300, 1.0)
    }  # fmt: skip
    assert "64 x 8 x 1000" in str(frontier.spec["params"])


def test_a_ratio_and_a_size_are_shown_from_0():
    points = [timed(8, n, name, memory_bytes=2**28 + n) for n in (100, 200) for name in ("fused_softmax", "torch")]
    drawn = charts_of(run_of(*points))
    for kind in ("Speed", "Ratio to the ceiling", "Memory"):
        scales = [each["y"]["scale"] for each in encodings(drawn[kind].spec) if "scale" in each.get("y", {})]
        assert scales
        assert all(scale == {"zero": True} for scale in scales), kind


def test_neighbouring_widths_far_from_the_next_are_not_joined_by_a_line():
    assert not charts.clustered(2**i for i in range(7, 21))
    assert not charts.clustered(range(128, 40961, 128))
    assert not charts.clustered([4096])
    around = [end + step for end in (128, 1024, 8192, 65536) for step in (-4, -1, 0, 1, 4)]
    assert charts.clustered(around)
    for widths, has_line in ((around, False), (range(128, 2048, 128), True)):
        spec = charts_of(run_of(*(timed(4096, n) for n in widths)))["Speed"].spec
        assert any(layer["mark"]["type"] == "line" for layer in spec["layer"]) == has_line


def test_the_summary_is_of_geometric_means_and_the_lowest_ratio():
    points = [timed(8, 100, us=10), timed(8, 200, us=20), timed(8, 100, "torch", 40), timed(8, 200, "torch", 20)]
    (found,) = summary.summaries({"one": run_of(*points)})
    assert found.points == 2
    assert found.ratio == pytest.approx((0.9 * 0.45) ** 0.5)
    assert found.lowest == (0.45, "8 x 200", "one")
    assert found.over == {"torch": (pytest.approx(2), 1)}
    assert found.best == found.over["torch"]
    assert found.only_torch


def test_the_best_peer_is_the_fastest_of_each_shape_and_never_this_package_with_another_option():
    own = [timed(8, n) for n in (100, 200)]
    torch = [timed(8, 100, "torch", 20), timed(8, 200, "torch", 80)]
    others = [timed(8, 100, "liger", 90), timed(8, 200, "liger", 30), timed(8, 100, "in one chunk", 1)]
    (found,) = summary.summaries({"one": run_of(*own, *torch, *others)})
    assert found.best == (pytest.approx(6**0.5), 2)
    assert not found.only_torch
    (alone,) = summary.summaries({"one": run_of(*own, *torch, others[-1])})
    assert alone.only_torch


def test_the_summary_compares_within_a_file_and_keeps_machines_apart():
    runs = {"one": run_of(timed(8, 100)), "two": run_of(timed(8, 100, us=20), timed(8, 100, "torch", 60))}
    (found,) = summary.summaries(runs)
    assert (found.points, found.lowest, found.over) == (2, (0.45, "8 x 100", "two"), {"torch": (pytest.approx(3), 3)})
    runs["three"] = run_of(timed(8, 100), gpu={"name": "another"})
    assert [each.machine for each in summary.summaries(runs)] == ["NVIDIA H200", "another"]
    absent = Point(8, 100, "float32", "fused_softmax", "absent")
    assert summary.summaries({"none": run_of(absent, timed(8, 100, "torch"))}) == []


def test_what_failed_is_named_before_any_section_and_counted(tmp_path):
    wrong = Point(8, 300, "float32", "fused_softmax", "wrong", "largest error 3")
    run = run_of(timed(8, 100), wrong)
    run.checks.append(Check("split", 4, 64, "float16", "failed", message="an interpreter's error"))
    paths = written(tmp_path, "one.json", run), written(tmp_path, "fine.json", run_of(timed(8, 100)))
    result, out = report(tmp_path, *paths)
    assert result.exit_code == 0, result.output
    head, *sections = out.read_text().split("<section ")
    assert "3 results were compared with float64: 2 matched" in head
    assert "and 1 did not" in head
    assert "fused_softmax: wrong at 8 x 300 float32: largest error 3" in head
    assert "split under Triton&#39;s interpreter: failed at 4 x 64 float16: an interpreter" in head
    assert ["failed a check" in each for each in sections] == [True, False]
    assert "every figure" not in out.read_text().lower()


def test_the_page_asks_for_nothing_and_holds_all(tmp_path):
    wrong = Point(8, 300, "float32", "naive", "wrong", "largest error </script><b>1")
    run = run_of(*(timed(8, n, name) for n in (100, 200) for name in ("fused_softmax", "torch")), wrong, complete=False)
    result, out = report(tmp_path, written(tmp_path, "one.json", run), written(tmp_path, "two.json", run))
    assert result.exit_code == 0, result.output
    text = out.read_text()
    markup = re.sub(r"<script.*?</script>", "", text, flags=re.DOTALL)
    assert not re.search(r"""(?:src|href|action)=["'](?!#|data:)|url\(|@import""", markup)
    assert "<b>1" not in text
    assert "naive: wrong at 8 x 300 float32: largest error &lt;/script&gt;" in text
    assert "The run stopped early" in text
    assert text.count("fused-softmax bench --out x.json") == 2
    assert "NVIDIA H200" in text
    assert "139.8 GiB" in text
    packed = re.search(r'id="specs">(.*?)</script>', text, re.DOTALL)[1]
    specs = json.loads(gzip.decompress(base64.b64decode(packed)))
    assert set(specs) == set(re.findall(r'data-chart="(\w+)"', text))
    assert "schema" not in json.dumps(specs)


def test_results_of_other_kernels_say_so_on_every_chart(tmp_path):
    points = [timed(8, 100), timed(8, 200)]
    present = fingerprint.kernels()
    kinds = {"old": {}, "other": {"kernels": "0123456789ab"}, "present": {"kernels": present}}
    paths = [written(tmp_path, f"{name}.json", run_of(*points, **more)) for name, more in kinds.items()]
    result, out = report(tmp_path, *paths)
    assert result.exit_code == 0, result.output
    words = "Not of the present kernels: "
    expected = {
        "old": f"{words}made before fingerprints.",
        "other": f"{words}of other kernels (fingerprint 0123456789ab against {present}).",
        "present": "",
    }
    for name, section in zip(kinds, out.read_text().split("<section ")[1:], strict=True):
        captions = re.findall(r"<figcaption>.*?(?:<em>(.*?)</em>)?</figcaption>", section)
        assert captions == [expected[name]] * 3
    old = page.part(paths[0])
    (svg, _) = page.save_charts(
        [replace(old, groups=[replace(old.groups[0], charts=old.groups[0].charts[:1])])], tmp_path
    )
    assert expected["old"] in svg.read_text()


def test_what_failed_and_what_is_absent_stand_in_the_table_with_the_reason(tmp_path):
    wrong = Point(8, 100, "float32", "cce", "wrong", "largest error 2")
    absent = Point(8, 100, "float32", "quack", "absent", "ModuleNotFoundError: No module named 'quack'")
    result, out = report(tmp_path, written(tmp_path, "one.json", run_of(timed(8, 100), wrong, absent)))
    assert result.exit_code == 0, result.output
    statuses = {row["provider"]: row["status"] for row in page.part(tmp_path / "one.json").rows}
    assert statuses == {"fused_softmax": "", "cce": "wrong: largest error 2", "quack": f"absent: {absent.message}"}
    text = out.read_text()
    assert "<td>wrong: largest error 2</td>" in text
    assert "<li>cce: wrong at 8 x 100 float32: largest error 2</li>" in text
    assert "<li>quack: absent: ModuleNotFoundError: No module named" in text


def test_charts_are_written_as_png_and_svg(tmp_path):
    path = written(tmp_path, "one.json", run_of(timed(8, 100), timed(8, 200), timed(8, 100, "torch")))
    result, _ = report(tmp_path, path, "--charts", tmp_path / "charts")
    assert result.exit_code == 0, result.output
    kinds = ("call", "ratio", "speed", "speed_up")
    assert sorted(p.name for p in (tmp_path / "charts").iterdir()) == sorted(
        f"one_softmax_float32_{kind}.{suffix}" for kind in kinds for suffix in ("png", "svg")
    )
    assert (tmp_path / "charts/one_softmax_float32_speed.png").read_bytes().startswith(b"\x89PNG")
    svg = (tmp_path / "charts/one_softmax_float32_speed.svg").read_text()
    assert "fused_softmax" in svg
    assert "best copy kernel" in svg


def test_what_is_no_result_is_refused_and_an_earlier_page_stays(tmp_path):
    (tmp_path / "bad.json").write_text("{}")
    (tmp_path / "report.html").write_text("earlier")
    good = written(tmp_path, "good.json", run_of(timed(8, 100)))
    (tmp_path / "other").mkdir()
    again = written(tmp_path / "other", "good.json", run_of(timed(8, 100)))
    for arguments, complaint in (
        ((good, tmp_path / "bad.json"), "bad.json is not what `fused-softmax bench --out` writes"),
        ((good, tmp_path / "none.json"), "cannot read"),
        ((good, again), "two results files are named good"),
        ((), "Missing argument"),
    ):
        result, out = report(tmp_path, *arguments, "--force")
        assert result.exit_code == 2
        assert complaint in result.output
        assert out.read_text() == "earlier"


def test_every_operation_has_a_title_for_people():
    names = {"softmax", "logsumexp", "cross_entropy", "sample"}  # of functions, which people write so
    titles = {name: summary.title_of(name) for name in OPERATIONS}
    assert catalog.OPERATIONS.keys() == OPERATIONS.keys()
    assert {name for name, title in titles.items() if name == title} == names
    assert len(set(titles.values())) == len(titles)
    for title in titles.values():
        assert "_" not in re.sub("log_softmax|log_prob|cross_entropy", "", title.removeprefix("linear_"))
