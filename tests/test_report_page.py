"""The report of the committed results: its summary against the files, and how a browser takes a page."""

import json
import math
import re
import shutil
import statistics
from html import unescape

import pytest
from reports import RESULTS, report, run_of, timed, written

from fused_softmax.bench.catalog import STEPS
from fused_softmax.bench.results import fingerprint
from fused_softmax.bench.show import summary

pytest.importorskip("altair", reason="the report's extra is not installed")
pytest.importorskip("vl_convert", reason="the report's extra is not installed")

DATA = {path.stem: json.loads(path.read_text()) for path in RESULTS}
OLDER = {"operation": "softmax", "parameters": {}}  # what files that say nothing of it are of
for data in DATA.values():
    data["points"] = [OLDER | point for point in data["points"]]
VARIANTS = {
    "in one chunk", "chunks of 1024", "chunks of 256", "summed in place", "32 in place", "own kernels", "beside Liger",
    "own compiled",
}  # fmt: skip


@pytest.fixture(scope="module")
def whole(tmp_path_factory):
    """The page of all committed results, as `make report` makes it."""
    result, out = report(tmp_path_factory.mktemp("whole"), *RESULTS)
    assert result.exit_code == 0, result.output
    return out


def cells(row):
    return [unescape(re.sub(r"<[^>]+>", "", cell)).strip() for cell in re.findall(r"<td.*?</td>", row)]


def factors(operation, dtype, names):
    """How many times as fast this package is as the fastest of the named, at each shape of each file that has it."""
    for data in DATA.values():
        times = {}
        for point in data["points"]:
            if (point["operation"], point["dtype"], point["status"]) == (operation, dtype, "ok"):
                shape = point["n_rows"], point["n_cols"], json.dumps(point["parameters"])
                times.setdefault(shape, {})[point["provider"]] = (point["kernel"] or point["call"])["p50_us"]
        for by_name in times.values():
            others = [us for name, us in by_name.items() if name in names]
            if others and "fused_softmax" in by_name:
                yield min(others) / by_name["fused_softmax"]


def test_the_summary_shows_the_committed_figures(whole):
    table = re.search(r'<table id="summary">.*?</table>', whole.read_text(), re.DOTALL)[0]
    rows = re.findall(r"<tr>(.*?)</tr>", table.partition("<tbody>")[2], re.DOTALL)
    points = [{**point, "stem": stem} for stem, data in DATA.items() for point in data["points"]]
    own = [point for point in points if point["provider"] == "fused_softmax" and point["status"] == "ok"]
    expected = {(summary.title_of(point["operation"]), point["dtype"]): point["operation"] for point in own}
    assert {tuple(cells(row)[:2]) for row in rows} == expected.keys()
    assert len(rows) == len(expected)
    for row in rows:
        title, dtype, count, over_torch, over_best, ratio, lowest, where = cells(row)
        operation = expected[title, dtype]
        here = [point for point in own if (point["operation"], point["dtype"]) == (operation, dtype)]
        assert int(count) == len(here)
        if operation in STEPS:  # which have no ceiling
            assert (ratio, lowest, where) == ("", "", "")
        else:
            ratios = [point["ratio"] for point in here]
            assert ratio == f"{math.exp(statistics.fmean(map(math.log, ratios))):.3f}"
            assert lowest == f"{min(ratios):.3f}"
            least = [point for point in here if point["ratio"] == min(ratios)]
            shapes = [point["parameters"].get("shape", [point["n_rows"], point["n_cols"]]) for point in least]
            links = [(point["stem"], " x ".join(map(str, shape))) for point, shape in zip(least, shapes, strict=True)]
            assert (re.search(r'href="#(\w+)"', row)[1], where.partition(" dim ")[0]) in links
        assert over_torch == speed(factors(operation, dtype, {"torch"}))
        right = [p for p in points if (p["operation"], p["dtype"], p["status"]) == (operation, dtype, "ok")]
        others = {point["provider"] for point in right} - {"fused_softmax", *VARIANTS}
        assert over_best == ("torch alone" if others == {"torch"} else speed(factors(operation, dtype, others)))


def speed(found):
    found = list(found)
    if not found:
        return "not measured"
    return f"{math.exp(statistics.fmean(map(math.log, found))):.2f}× ({min(found):.2f})"


def test_what_failed_and_what_is_of_other_kernels_is_said_before_any_section(whole):
    head = unescape(whole.read_text().partition("<section ")[0])
    points = [point for data in DATA.values() for point in data["points"]]
    wrong = [point for point in points if point["status"] == "wrong"]
    checked = len(wrong) + sum(point["status"] == "ok" for point in points)
    counts = re.search(r"(\d+) results were compared with float64: (\d+) matched\s+and (\d+) did not", head)
    assert tuple(map(int, counts.groups())) == (checked, checked - len(wrong), len(wrong))
    for stem, data in DATA.items():
        failing = {p["provider"] for p in data["points"] if p["status"] == "wrong"}
        said = re.findall(rf'<li><a href="#{stem}">[^<]*</a>: (\w+): wrong', head)
        assert set(said) == failing
    others = {stem for stem, data in DATA.items() if differs(data)}
    listed = re.search(r'<ul id="others">(.*?)</ul>', head, re.DOTALL)
    linked = set(re.findall(r'href="#(\w+)"', listed[1])) if listed else set()
    assert linked == others or (others == set(DATA) and f"all {len(DATA)} files" in listed[1])


def differs(data):
    return fingerprint.difference(data["environment"], operations={point["operation"] for point in data["points"]})


def test_sections_have_titles_for_people_and_are_closed(whole):
    text = whole.read_text()
    sections = re.findall(r'<section id="(\w+)">\s*<details>\s*<summary><h2>(.*?)</h2>', text)
    assert {stem for stem, _ in sections} == set(DATA)
    assert not any(stem in title or "_" in title.replace("log_softmax", "") for stem, title in sections)
    assert len({title for _, title in sections}) == len(sections)
    assert "<details open" not in text
    assert len(text) < 2_400_000


CHROMIUM = shutil.which("chromium")


@pytest.fixture(scope="module")
def browser():
    api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    if not CHROMIUM:
        pytest.skip("chromium is not installed")
    flags = ["--no-sandbox", "--disable-gpu", "--no-first-run", "--disable-background-networking", "--disable-sync"]
    with api.sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=flags)
        yield chromium
        chromium.close()


@pytest.fixture(scope="module")
def some(tmp_path_factory):
    folder = tmp_path_factory.mktemp("page")
    memory = run_of(*(timed(8, n, memory_bytes=n * 2**20) for n in (100, 200)))
    names = ("h200_softmax", "h200_few_rows", "h200_dims")
    paths = [*(path for path in RESULTS if path.stem in names), written(folder, "memory.json", memory)]
    result, out = report(folder, *paths)
    assert result.exit_code == 0, result.output
    return out


@pytest.mark.parametrize(
    ("width", "scheme"),
    [
        (1400, "light"),
        (380, "dark"),
        pytest.param(1400, "dark", marks=pytest.mark.exhaustive),
        pytest.param(380, "light", marks=pytest.mark.exhaustive),
    ],
)
def test_a_browser_draws_it_all_without_an_error_a_request_or_a_sideways_scroll(browser, some, width, scheme):
    tab = browser.new_page(viewport={"width": width, "height": 800}, color_scheme=scheme)
    said, asked = [], []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.on("request", lambda request: asked.append(request.url))
    tab.goto(some.as_uri())
    tab.evaluate("document.querySelectorAll('details').forEach((each) => { each.open = true })")
    tab.evaluate("dispatchEvent(new Event('beforeprint'))")
    tab.wait_for_function("!document.querySelector('.chart:not(.drawn)')")
    assert said == []
    assert asked == [some.as_uri()]
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    too_wide = "[...document.querySelectorAll('.chart')].filter((e) => e.scrollWidth > e.clientWidth + 1).length"
    assert tab.evaluate(too_wide) == 0
    assert tab.evaluate("document.querySelectorAll('.chart svg').length") > 10
    tab.close()


@pytest.mark.parametrize("width", [1400, 390])
def test_the_closed_page_is_short_and_a_key_opens_a_section(browser, whole, width):
    tab = browser.new_page(viewport={"width": width, "height": 900})
    said = []
    tab.on("console", lambda message: said.append(message.text))
    tab.on("pageerror", lambda error: said.append(str(error)))
    tab.goto(whole.as_uri())
    assert tab.evaluate("document.documentElement.scrollHeight") <= 8 * 900
    assert tab.evaluate("document.documentElement.scrollWidth") <= width
    assert tab.evaluate("document.querySelectorAll('.chart *, details[open]').length") == 0
    tab.focus("#h200_dims summary")
    tab.keyboard.press("Enter")
    tab.wait_for_selector("#h200_dims .chart.drawn svg")
    assert tab.evaluate("document.querySelectorAll('section:not(#h200_dims) .chart.drawn').length") == 0
    assert tab.evaluate("document.querySelector('#h200_dims .chart svg').clientWidth") > 200
    tab.keyboard.press("Enter")
    assert tab.evaluate("document.querySelectorAll('details[open]').length") == 0
    stem = tab.evaluate("document.querySelector('#summary tbody a').hash")
    for _ in range(2):  # the second time the address stays as it is
        tab.click(f"#summary tbody a[href='{stem}']")
        tab.wait_for_selector(f"{stem} details[open]")
        tab.evaluate("document.querySelectorAll('section > details').forEach((each) => { each.open = false })")
    assert said == []
    tab.close()
