"""The visualizer's page in a browser: what it shows against the recordings it shows, and how it is steered.

Needs Debian's chromium and playwright; what rebuilds the page needs node and viz/node_modules (`make page`).
"""

import html
import json
import math
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest
import torch

from fused_softmax import trace
from fused_softmax.trace import page as page_of
from fused_softmax.trace import presets

sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

ROOT = Path(__file__).parents[1]
VIZ = ROOT / "viz"
PAGE = ROOT / "src/fused_softmax/trace/page.html"
WHOLE = page_of.embed([], presets.load())
CHROMIUM = shutil.which("chromium")
FLAGS = (
    "no-sandbox",
    "disable-gpu",
    "no-first-run",
    "disable-background-networking",
    "disable-component-update",
    "disable-sync",
)
SLOT = '<script id="recordings" type="application/json">null</script>'

needs_chromium = pytest.mark.skipif(CHROMIUM is None, reason="chromium is not installed")
needs_node = pytest.mark.skipif(
    shutil.which("node") is None or not (VIZ / "node_modules").is_dir(), reason="needs node and `make page`"
)


# Recordings, made here from the contract alone.


def cells(values: torch.Tensor) -> list[float | str]:
    return [value if math.isfinite(value) else str(value) for value in values.flatten().tolist()]


def tensor(name: str, role: str, shape: tuple[int, ...], before: torch.Tensor, after: torch.Tensor) -> dict[str, Any]:
    return {
        "name": name, "role": role, "dtype": "float32", "shape": list(shape), "before": cells(before),
        "after": cells(after),
    }  # fmt: skip


class Recording:
    """A recording of softmax of x by programs that each take some columns of a row, with a helper function."""

    def __init__(self, x: torch.Tensor, kernel: str, title: str) -> None:
        self.x, self.y, self.kernel, self.title = x, torch.softmax(x, 1), kernel, title
        self.steps: list[dict[str, Any]] = []
        self.frames: list[dict[str, Any]] = []

    def enter(self, source: int, program: int, parent: int | None = None, line: int | None = None) -> int:
        self.frames.append(
            {"source": source, "launch": 0, "program": [program, 0, 0], "parent": parent, "call_line": line}
        )
        return len(self.frames) - 1

    def step(self, frame: int, line: int, phase: int, row: int, cols: tuple[int, int], **more: Any) -> None:
        self.steps.append({"frame": frame, "line": line, "phase": phase, "rows": [row], "cols": list(cols), **more})

    def at(self, row: int, cols: tuple[int, int]) -> list[int]:
        return [row * self.x.shape[1] + col for col in range(*cols)]

    def load(self, frame: int, line: int, phase: int, row: int, cols: tuple[int, int]) -> None:
        part = self.x[row, slice(*cols)]
        tile = {"shape": [len(part)], "dtype": "float32", "data": cells(part)}
        self.step(frame, line, phase, row, cols, set={"x": tile}, loads=[{"tensor": 0, "at": self.at(row, cols)}])

    def store(self, frame: int, line: int, phase: int, row: int, cols: tuple[int, int]) -> None:
        data = cells(self.y[row, slice(*cols)])
        self.step(frame, line, phase, row, cols, stores=[{"tensor": 1, "at": self.at(row, cols), "data": data}])

    def json(self, programs: int, reads: int) -> dict[str, Any]:
        shape, size = tuple(self.x.shape), self.x.numel()
        return {
            "schema": 1,
            "title": self.title,
            "kernel": self.kernel,
            "operation": "softmax",
            "summary": f"What {self.kernel} does.",
            "environment": {"triton": "3.7.1", "torch": "2.13.0"},
            "options": {"dtype": "float32", "block": 4, "unknown": [1]},
            "sources": [
                {"name": "_forward", "file": "forward.py", "first_line": 11,
                 "lines": [f"line_{n} = {n}" for n in range(11, 31)]},
                {"name": "helper", "file": "shelf.py", "first_line": 51, "ends": {"52": 53},
                 "lines": ["def helper(x):", "    return max(", "        x)"]},
            ],
            "tensors": [
                tensor("x", "input", shape, self.x, self.x),
                tensor("y", "output", shape, torch.full(shape, math.nan), self.y),
            ],
            "phases": ["load", "maximum and sum", "exchange", "store"],
            "launches": [{"name": "_forward", "source": 0, "grid": [programs, 1, 1]}],
            "frames": self.frames,
            "steps": self.steps,
            "rows": [
                {
                    "row": row, "max": cells(x.max())[0], "sum": cells((x - x.max()).exp().sum())[0],
                    "probability_sum": cells(y.sum())[0], "status": "ok" if y.isfinite().all() else "nan",
                    "min_probability": cells(y.min())[0], "max_probability": cells(y.max())[0],
                    "entropy": cells(torch.special.entr(y).sum())[0],
                }
                for row, (x, y) in enumerate(zip(self.x, self.y, strict=True))
            ],
            "traffic": {
                "reads": reads * size, "writes": size, "floor_reads": size, "floor_writes": size, "passes": reads
            },
        }  # fmt: skip


def passes(x: torch.Tensor, reads: int, block: int = 4, kernel: str = "") -> dict[str, Any]:
    """A row a program, read so many times in blocks before it is written."""
    kernel = kernel or f"{reads}-reads"
    made = Recording(x, kernel, f"{kernel}, {x.shape[0]} x {x.shape[1]}")
    n_rows, n_cols = x.shape
    for row in range(n_rows):
        frame = made.enter(0, row)
        for turn in range(reads):
            m, s = -math.inf, 0.0
            for start in range(0, n_cols, block):
                cols = (start, min(start + block, n_cols))
                part = x[row, slice(*cols)]
                made.load(frame, 14, 0, row, cols)
                helper = made.enter(1, row, frame, 16)
                top = max(m, part.max().item())
                value = top if math.isfinite(top) else {"shape": [], "dtype": "float32", "data": [str(top)]}
                made.step(helper, 52, 1, row, cols, set={"return": value})
                origin = top if math.isfinite(top) else 0.0
                s = s * math.exp(m - origin) + (part - origin).exp().sum().item()
                m = top
                state = {"row": row, "m": m if math.isfinite(m) else str(m), "s": s if math.isfinite(s) else str(s)}
                made.step(
                    frame,
                    17,
                    1,
                    row,
                    cols,
                    set={"s": state["s"]},
                    state=[state] if turn == 0 else [],
                    computed=[
                        {
                            "text": "tl.exp(x - m)",
                            "value": {"shape": [len(part)], "dtype": "float32", "data": cells((part - origin).exp())},
                        }
                    ],
                )
                if turn == reads - 1:
                    made.store(frame, 20, 3, row, cols)
    return made.json(n_rows, reads)


def split(x: torch.Tensor, parts: int = 2) -> dict[str, Any]:
    """A row over several programs, which tell each other their maxima and sums."""
    made = Recording(x, "split", "split")
    n_rows, n_cols = x.shape
    width = n_cols // parts
    ranges = [(part * width, (part + 1) * width) for part in range(parts)]
    for row in range(n_rows):
        frames = [made.enter(0, row * parts + part) for part in range(parts)]
        told = []
        for part, (frame, cols) in enumerate(zip(frames, ranges, strict=True)):
            made.load(frame, 13, 0, row, cols)
            m = x[row, slice(*cols)].max().item()
            s = (x[row, slice(*cols)] - m).exp().sum().item()
            told.append({"kind": "publish", "row": row, "from": part, "m": m, "s": s})
            made.step(frame, 15, 1, row, cols, state=[{"row": row, "m": m, "s": s}])
            made.step(frame, 16, 2, row, cols, message=told[-1])
        for part, (frame, cols) in enumerate(zip(frames, ranges, strict=True)):
            for message in told:
                made.step(frame, 17, 2, row, cols, message=message | {"kind": "collect", "to": part})
            m = x[row].max().item()
            made.step(frame, 18, 2, row, cols, state=[{"row": row, "m": m, "s": (x[row] - m).exp().sum().item()}])
            made.store(frame, 20, 3, row, cols)
    return made.json(n_rows * parts, 1)


SEED = torch.tensor([
    [2.0, -1.0, 3.0, 0.5, -0.5, 1.5, -2.0, 1.0],
    [4.0, -3.0, 2.5, 1.0, -1.5, 0.0, -0.5, 2.0],
    [-1.0, 3.5, -2.5, 1.5, 0.0, -3.0, 2.5, -0.5],
])  # fmt: skip
WIDE = torch.randn(16, 64, generator=torch.Generator().manual_seed(0)) * 3
PEAKED = torch.tensor([
    [-math.inf, -math.inf, -math.inf, -math.inf, 1.0, 90.0],
    [0.0, 1.0, math.nan, 2.0, 3.0, 4.0],
    [math.inf, 0.0, 0.0, 0.0, 0.0, 0.0],
])  # fmt: skip


RECORDINGS = {
    "two reads": lambda: passes(SEED, 2),
    "three reads": lambda: passes(SEED, 3),
    "split": lambda: split(SEED),
    "not finite": lambda: passes(PEAKED, 2),
    "16 x 64": lambda: passes(WIDE, 2, 16),
} | {f"preset {n}: {each['title']}": partial(lambda each: each, each) for n, each in enumerate(presets.load())}


# The browser. Whatever a test does, the page writes no error and asks the network for nothing.


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    if CHROMIUM is None:
        pytest.skip("chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=[f"--{flag}" for flag in FLAGS])
        yield browser
        browser.close()


Open = Callable[..., Any]


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Open]:
    contexts, troubles = [], []

    def open_page(
        *recordings: dict[str, Any], link: str = "", width: int = 1280, height: int = 900, **more: Any
    ) -> Any:
        text = WHOLE
        assert text.count(SLOT) == 1
        if recordings:
            text = text.replace(SLOT, SLOT.replace("null", json.dumps(recordings).replace("<", "\\u003c")))
        path = tmp_path / f"page{len(contexts)}.html"
        path.write_text(text)
        context = browser.new_context(viewport={"width": width, "height": height}, **more)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: troubles.append(f"console {message.type}: {message.text}"))
        page.on("pageerror", lambda error: troubles.append(f"error: {error}"))
        page.on("request", lambda request: request.url.startswith(("file:", "data:")) or troubles.append(request.url))
        page.goto(f"{path.as_uri()}{link}")
        page.wait_for_selector("main [aria-label]")
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert troubles == []


def position(page: Any) -> int:
    return int(page.locator("[data-position]").inner_text())


def until(page: Any, expression: str) -> None:
    """Waits for a JavaScript expression; the page's policy lets Playwright's own wait evaluate none."""
    end = time.monotonic() + 10
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"never came: {expression}"
        page.wait_for_timeout(20)


def line(page: Any) -> str:
    return page.locator(".code [aria-current]").inner_text()


def shown(page: Any, name: str = "y") -> list[float]:
    values = page.eval_on_selector_all(
        f'[data-tensor="{name}"] tbody td', "cells => cells.map(cell => cell.dataset.value)"
    )
    return [float(value.replace("−", "-")) if value else math.nan for value in values]


def same(actual: list[float], wanted: list[Any]) -> bool:
    pairs = zip(actual, map(float, wanted), strict=True)
    return all(a == b or (math.isnan(a) and math.isnan(b)) for a, b in pairs)


def no_wider(page: Any) -> bool:
    return page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")


# Each way that the page has to show a kernel: passes of ours and of others, edges, tiles, columns, two inputs. A loss's
# is long, and every step of it is drawn alone.
SHOWN = ("two reads", "three reads", "split", "not finite", "preset 6", "preset 9", "preset 10")


@pytest.mark.parametrize(
    "name",
    [
        name if name.partition(":")[0] in SHOWN else pytest.param(name, marks=pytest.mark.exhaustive)
        for name in RECORDINGS
    ],
)
def test_a_recording_stepped_to_its_end_shows_what_the_kernel_wrote(name: str, open_page: Open) -> None:
    recording = RECORDINGS[name]()
    page = open_page(recording)
    (index, output) = next((n, each) for n, each in enumerate(recording["tensors"]) if each["role"] == "output")
    n_steps = len(recording["steps"])
    stride = 1 if n_steps <= 50 else 7 if n_steps <= 200 else 37
    for step in range(0, n_steps, stride):
        assert position(page) == step
        memory = [math.nan] * len(output["before"])  # a cell is empty until it is written, also an integer's
        for each in recording["steps"][:step]:
            for store in each.get("stores", []):
                if store["tensor"] == index:
                    for at, value in zip(store["at"], store["data"], strict=True):
                        memory[at] = value
        if step % (10 * stride) == 0:
            assert same(shown(page, output["name"]), memory)
        for _ in range(min(stride, n_steps - step)):
            page.keyboard.press("ArrowRight")
    assert position(page) == n_steps
    assert same(shown(page, output["name"]), output["after"])
    if recording["operation"] == "softmax":
        x = next(each for each in recording["tensors"] if each["role"] == "input")
        values = torch.tensor([float(each) for each in x["before"]], dtype=torch.float64).reshape(x["shape"])
        rounding = {"float16": 1e-3, "bfloat16": 8e-3}.get(output["dtype"], 1e-6)
        wanted = torch.softmax(values, -1).flatten()
        actual = torch.tensor(shown(page, output["name"]), dtype=torch.float64)
        if name != "not finite":
            torch.testing.assert_close(actual, wanted, rtol=rounding, atol=rounding, equal_nan=True)
    traffic = recording["traffic"]
    counts = [page.locator(f'[data-count="{kind}"]').inner_text().replace("\u202f", "") for kind in ("reads", "writes")]
    assert counts == [str(traffic["reads"]), str(traffic["writes"])]


def test_keys_step_by_line_block_phase_and_program(open_page: Open) -> None:
    recording = passes(SEED, 2)
    page = open_page(recording)
    press = page.keyboard.press
    steps = recording["steps"]
    press("ArrowRight")
    assert position(page) == 1
    assert "line_14" in line(page)
    press("ArrowRight")
    assert "return max(" in line(page)
    assert page.locator(".stack").inner_text().replace("\n", "") == "_forward:16helper:52"
    press("ArrowLeft")
    assert position(page) == 1
    press("Shift+ArrowRight")
    assert steps[position(page) - 1].get("loads")
    assert position(page) == 4
    press("Shift+ArrowLeft")
    assert position(page) == 1
    press("]")
    second = next(n for n, each in enumerate(steps) if recording["frames"][each["frame"]]["program"][0] == 1)
    assert position(page) == second
    press("]")
    press("[")
    assert position(page) == second
    press(".")
    assert steps[position(page)]["phase"] != steps[position(page) - 1]["phase"]
    press("End")
    assert position(page) == len(steps)
    press("Home")
    assert position(page) == 0
    press("?")
    assert page.locator("dialog[open]").get_attribute("aria-label") == "How to read and control this page"
    press("ArrowRight")
    assert position(page) == 0
    press("Escape")
    page.wait_for_selector("dialog[open]", state="detached")
    press("ArrowRight")
    assert position(page) == 1


def test_keys_of_one_letter_can_be_switched_off(open_page: Open) -> None:
    page = open_page(passes(SEED, 2))
    page.keyboard.press("?")
    page.locator("dialog input[type=checkbox]").uncheck()
    page.keyboard.press("Escape")
    page.wait_for_selector("dialog[open]", state="detached")
    page.keyboard.press("]")
    page.keyboard.press("End")
    assert position(page) == 0


def test_space_plays_to_the_end_and_pauses(open_page: Open) -> None:
    recording = passes(SEED, 2)
    page = open_page(recording)
    page.locator(".speed select").select_option("60")
    page.locator("h1").click()
    page.keyboard.press(" ")
    until(page, "Number(document.querySelector('[data-position]').textContent) > 5")
    page.keyboard.press(" ")
    page.wait_for_selector("button[aria-label=Play]")
    paused = position(page)
    page.wait_for_timeout(200)
    assert position(page) == paused
    page.keyboard.press(" ")
    until(page, f"Number(document.querySelector('[data-position]').textContent) === {len(recording['steps'])}")


def test_the_slider_and_the_list_of_phases_seek(open_page: Open) -> None:
    recording = passes(SEED, 2)
    page = open_page(recording)
    page.locator(".track input").fill("20")
    assert position(page) == 20
    page.get_by_label("Go to program and phase").select_option(index=3)
    assert position(page) != 20
    assert "store" not in page.locator(".at-hand").inner_text()


def test_a_link_brings_back_kernel_and_step(open_page: Open) -> None:
    recordings = [passes(SEED, 2), passes(SEED, 3), split(SEED)]
    page = open_page(*recordings, link="#kernel=3-reads&step=17")
    assert position(page) == 17
    assert page.locator("select[name=kernel]").input_value() == "3-reads"
    before = line(page)
    page.keyboard.press("ArrowRight")
    until(page, "location.hash.includes('step=18')")
    page.keyboard.press("ArrowLeft")
    until(page, "location.hash.includes('step=17')")
    again = open_page(*recordings, link=page.evaluate("location.hash"))
    assert (position(again), line(again)) == (17, before)
    again.evaluate("location.hash = '#kernel=split&step=5'")
    until(again, "document.querySelector('[data-position]').textContent === '5'")
    assert again.locator("select[name=kernel]").input_value() == "split"


@pytest.mark.parametrize("link", ["#step=99999999", "#kernel=none&matrix=none", "#view=zzz", "#data=1,x", "#%E0%A4%A"])
def test_a_damaged_link_opens_the_page(link: str, open_page: Open) -> None:
    page = open_page(passes(SEED, 2), link=link)
    assert page.locator(".tensor").count() == 2


def test_a_pasted_matrix_is_replayed_and_labelled_as_computed(open_page: Open) -> None:
    page = open_page(passes(SEED, 2))
    page.get_by_role("button", name="Your numbers").click()
    box = page.locator("textarea")
    assert box.evaluate("each => each === document.activeElement")
    box.fill("1 2 3\n4 five 6")
    assert "“five” at line 2, number 2 is not a number" in page.locator("#paste-state").inner_text()
    assert page.locator("dialog button.primary").is_disabled()
    box.fill("1 2 3\n4 5")
    assert "Row 2 has 2 numbers" in page.locator("#paste-state").inner_text()
    box.fill("1, 2, 3, -inf, 88\n-inf, -inf, -inf, -inf, 2")
    page.locator("dialog select[name=block]").select_option("2")
    page.locator("dialog button.primary").click()
    page.wait_for_selector("dialog[open]", state="detached")
    assert "Computed by the page, not recorded" in page.locator(".origin").inner_text()
    assert "fused-softmax serve" in page.locator(".origin").inner_text()
    page.keyboard.press("End")
    x = torch.tensor([[1, 2, 3, -math.inf, 88], [-math.inf, -math.inf, -math.inf, -math.inf, 2]])
    torch.testing.assert_close(torch.tensor(shown(page)).reshape(2, 5), torch.softmax(x, 1), rtol=1e-6, atol=0)
    until(page, "location.hash.includes('data=')")
    again = open_page(passes(SEED, 2), link=page.evaluate("location.hash"))
    assert same(shown(again), shown(page))


def test_a_file_is_opened_and_a_bad_one_refused_with_its_reason(open_page: Open, tmp_path: Path) -> None:
    page = open_page(passes(SEED, 2))
    good, bad, newer = tmp_path / "good.json", tmp_path / "bad.json", tmp_path / "newer.json"
    good.write_text(json.dumps(split(SEED)))
    bad.write_text("{")
    newer.write_text(json.dumps({"schema": 2}))
    page.locator("input[type=file]").set_input_files(good)
    until(page, "document.querySelector('select[name=kernel]').value === 'split'")
    for path, reason in ((bad, "bad.json"), (newer, "newer.json: this recording has schema 2")):
        page.locator("input[type=file]").set_input_files(path)
        until(page, f"document.querySelector('[role=alert]')?.textContent.includes({json.dumps(reason)})")
    assert page.locator("select[name=kernel]").input_value() == "split"


def test_text_of_a_recording_stays_text(open_page: Open) -> None:
    hostile = '</script><img src="x" onerror="document.title = 1">'
    recording = passes(SEED, 2, kernel=hostile)
    recording["steps"][0]["note"] = recording["sources"][0]["lines"][3] = hostile
    page = open_page(recording, link="#step=1")
    assert page.locator(".note").inner_text() == hostile
    assert hostile in line(page)
    assert page.locator("img").count() == 0


def test_a_page_without_recordings_shows_its_own_model(browser: Any, open_page: Open, tmp_path: Path) -> None:
    path = tmp_path / "bare.html"
    path.write_text(PAGE.read_text())
    page = open_page(passes(SEED, 2))
    page.goto(path.as_uri())
    page.wait_for_selector(".badge")
    page.keyboard.press("End")
    torch.testing.assert_close(torch.tensor(shown(page)).reshape(3, 8), torch.softmax(SEED, 1), rtol=1e-6, atol=0)


def test_two_kernels_on_one_clock_show_who_moves_less(open_page: Open) -> None:
    recordings = [passes(SEED, 3), passes(SEED, 1, 8), passes(SEED, 2)]
    page = open_page(*recordings, link="#view=compare&kernel=3-reads&versus=1-reads")
    sides = page.locator(".side")
    assert [sides.nth(n).get_attribute("data-kernel") for n in range(2)] == ["3-reads", "1-reads"]
    page.locator(".track input").fill("48")
    assert "done" in sides.nth(1).locator(".state").inner_text()
    assert "done" not in sides.nth(0).locator(".state").inner_text()
    page.keyboard.press("End")
    counts = page.locator("[data-count]").all_inner_texts()
    assert counts == ["72", "24", "24", "24"]
    layers = [sides.nth(n).locator(".layer.full").count() for n in range(2)]
    assert layers == [4, 2]
    assert {"3-reads", "1-reads", "2-reads"} <= set(page.locator(".field tbody th").all_inner_texts())


def test_programs_of_a_split_show_their_messages(open_page: Open) -> None:
    recording = split(SEED)
    page = open_page(recording)
    chart = page.locator(".lanes svg")
    assert chart.get_attribute("aria-label") == "No message yet."
    published = next(n for n, each in enumerate(recording["steps"]) if "message" in each) + 1
    page.locator(".track input").fill(str(published))
    assert "program 0 published (m, s) = (3, 1.47)" in chart.get_attribute("aria-label")
    page.keyboard.press("]")
    page.keyboard.press("]")
    assert page.locator(".lanes .arrow.passed").count() > 0


ATTENTION = next(each for each in presets.load() if each["kernel"] == "attention")


def step_of_attention(opening: str, first_key: int, query: int = 8) -> int:
    """The position behind a line of attention, of the tile of this first query, at the block of this first key."""
    for at, step in enumerate(ATTENTION["steps"]):
        source = ATTENTION["sources"][ATTENTION["frames"][step["frame"]]["source"]]
        line = source["lines"][step["line"] - source["first_line"]].strip()
        if line.startswith(opening) and step["rows"][0] == query and step.get("cols", [first_key])[0] == first_key:
            return at + 1
    raise ValueError(opening)


@pytest.mark.parametrize("width", [1400, 390])
def test_attention_shows_its_running_maximum_sum_and_output(width: int, open_page: Open) -> None:
    page = open_page(link="#kernel=attention", width=width, height=900)

    def at(opening: str, first_key: int, query: int = 8) -> str:
        page.evaluate(
            "each => { location.hash = each }", f"#kernel=attention&step={step_of_attention(opening, first_key, query)}"
        )
        until(
            page,
            f"document.querySelector('[data-position]').textContent == {step_of_attention(opening, first_key, query)}",
        )
        return page.locator(".chart").inner_text()

    def output_so_far() -> list[list[str]]:
        rows = "rows => rows.map(row => [...row.cells].map(cell => cell.innerText.trim()))"
        return page.eval_on_selector_all(".accumulator tr", rows)

    assert "No score is known yet" in page.locator(".recurrence").inner_text()
    assert "The maximum so far is 2" in at("top = tl.maximum(top", 0)
    assert page.locator('[data-tensor="z"] tbody tr').nth(8).inner_text().split() == ["8", "−1", "2", "−1", "1"]
    at("o = tl.dot", 0)
    assert output_so_far() == [["o of the first block", "2.375", "3.125", "2.125", "1.75"]]
    said = at("top = tl.maximum(top", 4)
    assert "The maximum rises from 2 to 4" in said
    assert "multiplied by 2−2 = 0.25" in said
    assert output_so_far()[-1] == ["next: × 2−2 = 0.25", "0.5938", "0.7813", "0.5313", "0.4375"]
    assert "s = 1.75 · 0.25 + 1.625 = 2.063" in at("s = s * weight", 4)
    at("o = tl.dot", 4)
    assert output_so_far() == [
        ["o before", "2.375", "3.125", "2.125", "1.75"],
        ["× 2−2 = 0.25", "0.5938", "0.7813", "0.5313", "0.4375"],
        ["+ this block", "3.5", "1.75", "1.625", "1.625"],
        ["= o", "4.094", "2.531", "2.156", "2.063"],
    ]
    at("z = tl.where", 8)
    row = page.locator('[data-tensor="z"] tbody tr').nth(8)
    assert row.inner_text().split()[-4:] == ["5", "−∞", "−∞", "−∞"]
    assert row.locator("td.hidden").count() == 3
    assert page.locator('[data-tensor="z"] td.never').count() == 3 * 16
    assert page.locator('[data-tensor="k"] .visor.hand:visible').count() == 1
    at("store_tile", 8)
    output = [float(each) for each in next(t for t in ATTENTION["tensors"] if t["name"] == "output")["after"][32:36]]
    assert output_so_far()[-1] == ["÷ s = output", *(f"{each:.4g}" for each in output)]
    assert no_wider(page)
    for view in ("compare", "numerics"):
        page.evaluate("each => { location.hash = each }", f"#view={view}&kernel=attention")
        page.wait_for_timeout(50)
        assert no_wider(page)


def test_of_a_query_whose_maximum_stays_the_sum_stays(open_page: Open) -> None:
    page = open_page(link=f"#kernel=attention&row=10&step={step_of_attention('o = tl.dot', 8)}", width=1400)
    assert "The maximum stays 5, so the old sum stays as it is" in page.locator(".recurrence").inner_text()
    assert "× 1, as m stays" in page.locator(".accumulator").inner_text()


@pytest.mark.parametrize("scheme", ["light", pytest.param("dark", marks=pytest.mark.exhaustive)])
def test_attention_passes_axe(scheme: str, open_page: Open) -> None:
    axe = VIZ / "node_modules/axe-core/axe.min.js"
    if not axe.exists():
        pytest.skip("needs `make page`")
    link = f"#kernel=attention&step={step_of_attention('top = tl.maximum(top', 8)}"
    page = open_page(link=link, color_scheme=scheme, reduced_motion="reduce", bypass_csp=True)
    page.wait_for_timeout(350)
    page.add_script_tag(path=str(axe))
    found = page.evaluate("axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'best-practice']})")
    assert [(each["id"], node["html"][:160]) for each in found["violations"] for node in each["nodes"]] == []


@pytest.mark.parametrize(("kernel", "state"), [("split", "(m, s)"), ("backward", "d")])
def test_lanes_name_what_programs_exchange(open_page: Open, kernel: str, state: str) -> None:
    page = open_page(next(each for each in presets.load() if each["kernel"] == kernel))
    assert page.locator(".lanes .legend .publish").inner_text() == f"publishes {state}"
    assert f"publishes its {state} and" in page.locator(".lanes h2").inner_text()


def test_numbers_show_overflow_and_what_saves_them(open_page: Open) -> None:
    page = open_page(passes(SEED, 2), link="#view=numerics")

    def statuses() -> dict[str, str]:
        pairs = "rows => rows.map(row => [row.dataset.trial, row.dataset.status])"
        return dict(page.eval_on_selector_all("[data-trial]", pairs))

    assert set(statuses().values()) == {"ok"}
    page.get_by_role("button", name="+89").click()
    found = statuses()
    assert {name for name, status in found.items() if status == "nan"} == {"float16-raw", "bfloat16-raw", "float32-raw"}
    assert "Overflow: exp(" in page.locator("[data-trial=float32-raw]").inner_text()
    page.locator(".own input").fill("1, x")
    assert "not a number" in page.locator("#row-error").inner_text()
    page.locator(".own input").fill("0")
    page.get_by_role("button", name="0", exact=True).click()
    page.locator(".knobs input[type=range]").nth(1).fill("12")
    assert "3840 of 4096 terms were too small" in page.locator("[data-trial=bfloat16]").inner_text()


@pytest.mark.parametrize("view", ["replay", "compare", "numerics"])
@pytest.mark.parametrize("name", ["two reads", "split", "16 x 64"])
def test_at_380_pixels_nothing_overflows(view: str, name: str, open_page: Open) -> None:
    page = open_page(RECORDINGS[name](), passes(SEED, 3), width=380, height=740, link=f"#view={view}&step=20&clock=40")
    assert no_wider(page)
    page.keyboard.press("p")
    assert no_wider(page)
    page.keyboard.press("Escape")
    page.set_viewport_size({"width": 320, "height": 700})
    page.wait_for_timeout(50)
    assert no_wider(page)


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("view", ["replay", "compare", "numerics", "paste", "help"])
def test_names_roles_and_contrast_pass_axe(scheme: str, view: str, open_page: Open) -> None:
    axe = VIZ / "node_modules/axe-core/axe.min.js"
    if not axe.exists():
        pytest.skip("needs `make page`")
    link = f"#view={view}&kernel=2-reads&step=3&clock=30" if view in ("replay", "compare", "numerics") else "#step=5"
    page = open_page(
        split(SEED),
        passes(SEED, 3),
        passes(SEED, 2),
        link=link,
        color_scheme=scheme,
        reduced_motion="reduce",
        bypass_csp=True,
    )
    if view in ("paste", "help"):
        page.keyboard.press({"paste": "p", "help": "?"}[view])
    page.wait_for_timeout(350)
    page.add_script_tag(path=str(axe))
    found = page.evaluate("axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'best-practice']})")
    assert found["passes"]
    assert [
        (each["id"], node["html"][:160], node["failureSummary"][:300])
        for each in found["violations"]
        for node in each["nodes"]
    ] == []


def test_a_step_is_announced_and_the_theme_can_be_chosen(open_page: Open) -> None:
    page = open_page(passes(SEED, 2))
    page.keyboard.press("ArrowRight")
    until(page, "document.querySelector('[aria-live]').textContent.startsWith('Step 1 of')")
    assert "Reads 4 elements of x" in page.locator("[aria-live]").inner_text()
    ground = "getComputedStyle(document.body).backgroundColor"
    light = page.evaluate(ground)
    page.get_by_role("button", name="Theme: auto").click()
    page.get_by_role("button", name="Theme: light").click()
    until(page, f"{ground} !== {json.dumps(light)}")


def test_the_page_works_in_a_frame_without_an_origin(open_page: Open, tmp_path: Path) -> None:
    inner = html.escape(WHOLE.replace(SLOT, SLOT.replace("null", json.dumps([passes(SEED, 2)]))))
    path = tmp_path / "notebook.html"
    path.write_text(f'<iframe srcdoc="{inner}" sandbox="allow-scripts" style="width: 1000px; height: 800px"></iframe>')
    page = open_page(passes(SEED, 2))
    page.goto(path.as_uri())
    frame = page.frame_locator("iframe")
    frame.locator("button.play").wait_for()
    frame.get_by_role("button", name="Step", exact=True).click()
    assert frame.locator("[data-position]").inner_text() == "1"
    page.wait_for_timeout(400)


FRAMED = "#kernel=split&matrix=none&bare=1&play=30"


@pytest.mark.parametrize(("width", "height"), [(1300, 560), (350, 520)])
def test_a_frame_of_another_page_plays_by_itself_without_the_pages_head(
    open_page: Open, width: int, height: int
) -> None:
    page = open_page(width=width, height=height, link=FRAMED)
    until(page, "Number(document.querySelector('[data-position]').textContent) > 3")
    assert page.locator("button.play").get_attribute("aria-label") == "Pause"
    assert page.locator(".speed select").count() == 0 or page.locator(".speed select").input_value() == "30"
    page.locator("button.play").click()
    assert not page.locator("header").is_visible()
    for each in (".tensor", ".lanes svg"):
        below_and_above(page, each, 0)
    page.keyboard.press("s")
    assert page.locator(".story").count() == 0
    until(page, "location.hash.includes('step=')")
    assert "bare=1" in page.evaluate("location.hash")
    assert "play" not in page.evaluate("location.hash")


def test_a_frame_does_not_play_where_less_motion_is_asked(open_page: Open) -> None:
    page = open_page(link=FRAMED, reduced_motion="reduce")
    page.wait_for_timeout(300)
    assert position(page) == 0
    assert page.locator("button.play").get_attribute("aria-label") == "Play"
    assert "Press → to run the first line, or Space to play." in page.locator(".note").inner_text()
    assert "Story" not in page.locator(".note").inner_text()


def test_a_frame_takes_the_theme_of_the_page_around_it_and_does_not_keep_it(open_page: Open, tmp_path: Path) -> None:
    (tmp_path / "inner.html").write_text(WHOLE)
    (tmp_path / "outer.html").write_text(
        '<iframe src="inner.html" width="1000" height="600"></iframe><script>'
        'addEventListener("message", ({ data, source }) =>'
        ' data.ask === "theme" && source.postMessage({ theme: "dark" }, "*"))</script>'
    )
    page = open_page()
    page.goto((tmp_path / "outer.html").as_uri())
    page.frame_locator("iframe").locator("html[data-theme=dark]").wait_for()
    page.frame_locator("iframe").get_by_role("button", name="Theme: dark").wait_for()
    inner = page.frames[1]
    assert inner.evaluate("localStorage.getItem('fused-softmax-theme')") is None
    page.evaluate("frames[0].postMessage({ theme: 'light' }, '*')")
    page.frame_locator("iframe").locator("html[data-theme=light]").wait_for()
    page.evaluate("frames[0].postMessage('nothing that it knows', '*')")


def test_values_of_a_wide_matrix_can_be_read(open_page: Open) -> None:
    page = open_page(passes(WIDE, 1, 16))
    cells = page.locator('[data-tensor="x"] tbody td')
    assert cells.first.inner_text() == ""
    page.get_by_role("button", name="values").click()
    assert float(cells.first.inner_text().replace("−", "-")) == pytest.approx(WIDE[0, 0].item(), rel=0.05)
    cells.nth(70).hover()
    assert cells.nth(70).get_attribute("title") == f"x[1, 6] = {json.dumps(WIDE[1, 6].item())}".replace("-", "−")
    page.keyboard.press("v")
    assert cells.first.inner_text() == ""


def test_what_a_line_computes_on_its_way_is_shown_with_its_expression(open_page: Open) -> None:
    page = open_page(passes(SEED, 2), link="#step=3")
    assert page.locator(".interim code").inner_text() == "tl.exp(x - m)"
    assert page.locator(".interim .lane").all_inner_texts() == ["0.368", "0.0183", "1", "0.0821"]


def test_motion_is_reduced_where_asked(open_page: Open) -> None:
    page = open_page(passes(SEED, 2), reduced_motion="reduce", link="#step=3")
    assert page.eval_on_selector(".visor", "each => getComputedStyle(each).transitionDuration") == "0s"


def test_the_page_is_small() -> None:
    assert len(WHOLE.encode()) < 400_000


@pytest.mark.exhaustive
def test_the_page_is_ready_within_a_second(open_page: Open) -> None:
    times = []
    for _ in range(3):
        page = open_page(passes(WIDE, 2, 16))
        timing = "performance.getEntriesByType('navigation')[0].domInteractive"
        start = time.perf_counter()
        page.keyboard.press("ArrowRight")
        assert position(page) == 1
        times.append(page.evaluate(timing) / 1000 + time.perf_counter() - start)
    assert min(times) < 1, times


@pytest.mark.exhaustive
def test_sixty_steps_a_second_on_16_by_64(open_page: Open) -> None:
    page = open_page(passes(WIDE, 2, 16))
    page.locator(".speed select").select_option("60")
    rates = []
    for _ in range(4):
        page.keyboard.press("Home")
        page.evaluate("document.querySelector('.play').focus()")
        page.locator(".play").click()
        page.wait_for_timeout(150)
        first, start = position(page), time.perf_counter()
        page.wait_for_timeout(1500)
        last, end = position(page), time.perf_counter()
        rates.append((last - first) / (end - start))
        page.locator(".play").click()
    # The clock of the frames is not the test's: a step more or less at either end.
    assert max(rates) > 58, rates


KERNELS = {"kernels": [{"name": "online", "title": "in one pass", "block": True, "dtypes": ["float32"]}]}


class Server(BaseHTTPRequestHandler):
    """What `fused-softmax serve` is to the page: the page, and recordings of what is posted to it."""

    def do_GET(self) -> None:
        assert self.path == "/"
        return self.answer(200, "text/html", page_of.embed([], presets.load(), server=KERNELS))

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        matrix = torch.tensor([[float(each) for each in row] for row in request["matrix"]])
        if matrix.numel() == 1:
            return self.answer(400, "application/json", json.dumps({"error": "one element is too few"}))
        recording = passes(matrix, 2, request["block"], request["kernel"])
        return self.answer(200, "application/json", json.dumps(recording))

    def answer(self, status: int, kind: str, text: str) -> None:
        self.send_response(status)
        self.send_header("Content-Type", kind)
        self.end_headers()
        self.wfile.write(text.encode())

    def log_message(self, *args: Any) -> None:
        pass


def test_a_served_page_shows_the_real_recording_of_a_pasted_matrix(browser: Any) -> None:
    server = ThreadingHTTPServer(("127.0.0.1", 0), Server)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    page = browser.new_page()
    try:
        page.goto(f"http://127.0.0.1:{server.server_port}/")
        page.get_by_role("button", name="Your numbers").click()
        assert page.get_by_text("Record and replay").count() == 1  # at once: the page asks nobody
        assert "fused-softmax serve" not in page.locator("dialog[open]").inner_text()
        page.locator("textarea").fill("7")
        page.locator("dialog button.primary").click()
        until(page, "document.querySelector('#paste-state').textContent === 'one element is too few'")
        page.locator("textarea").fill("1 2 3 inf\n-inf 0 1 2")
        page.locator("dialog button.primary").click()
        page.wait_for_selector("dialog[open]", state="detached")
        assert "Recorded: the real kernel" in page.locator(".origin").inner_text()
        page.keyboard.press("End")
        x = torch.tensor([[1, 2, 3, math.inf], [-math.inf, 0, 1, 2]])
        torch.testing.assert_close(torch.tensor(shown(page)).reshape(2, 4), torch.softmax(x, 1), equal_nan=True)
        page.goto(f"http://127.0.0.1:{server.server_port}/#kernel=online&data=1,2")
        page.wait_for_selector(".badge")
        assert "Your numbers" in page.locator(".origin").inner_text()
        assert "fused-softmax serve" not in page.locator("body").inner_text()
    finally:
        page.close()
        server.shutdown()


# What the page is built from.


@needs_node
def test_the_model_passes_its_own_tests() -> None:
    run = subprocess.run(["npm", "test"], cwd=VIZ, capture_output=True, text=True, timeout=300, check=False)
    assert run.returncode == 0, run.stdout[-4000:] + run.stderr[-2000:]


@needs_node
def test_the_committed_page_is_what_its_source_builds(tmp_path: Path) -> None:
    run = subprocess.run(
        ["npm", "run", "build"], cwd=VIZ, env=os.environ | {"PAGE_OUT": str(tmp_path)},
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    assert (tmp_path / "page.html").read_bytes() == PAGE.read_bytes(), "run `make page` and commit the page"


def test_the_page_and_its_lock_file_name_no_address_of_a_registry() -> None:
    assert '"resolved"' not in (VIZ / "package-lock.json").read_text()
    assert not re.search(r"""(?:src|href)=["']?https?:|@import|url\(["']?https?:""", WHOLE)


def test_the_page_opens_where_the_maximum_rises_in_every_tile(open_page: Open) -> None:
    page = open_page()
    assert page.locator("select[name=matrix] option:checked").inner_text() == "Every tile raises the maximum"


@pytest.mark.parametrize(
    ("link", "said"),
    [
        ("#kernel=nothing", "no recording of a kernel “nothing”"),
        ("#kernel=online&matrix=1x1-z", "no recording of the matrix"),
    ],
)
def test_a_link_to_what_the_page_does_not_have_says_so(open_page: Open, link: str, said: str) -> None:
    page = open_page(link=link)
    assert said in page.locator(".message").inner_text()


def test_source_lines_are_readable_in_full_and_values_cover_none(open_page: Open) -> None:
    recording = next(each for each in presets.load() if each["kernel"] == "draw")
    page = open_page(recording, width=1400, height=1000)
    for step in range(1, len(recording["steps"]), 12):
        page.evaluate("each => { location.hash = each }", f"#kernel=draw&step={step}")
        page.wait_for_timeout(30)
        assert page.eval_on_selector(".code", "each => each.scrollWidth <= each.clientWidth")
        covered = """each => [...each.querySelectorAll('li')].some(line => {
            const box = name => line.querySelector(name)?.getBoundingClientRect();
            const [code, values] = [box('code'), box('.inline')];
            return values && values.top < code.bottom - 1 && values.left < code.right - 1;
        })"""
        assert not page.eval_on_selector(".code", covered)


SIZES = pytest.mark.parametrize(("width", "height"), [(390, 844), (800, 900), (1400, 900)])
BOTH = pytest.mark.parametrize(("width", "height"), [(390, 844), (1400, 900)])


def below_and_above(page: Any, selector: str, above: float, room: float = math.inf) -> None:
    """Fails unless something stands between `above` and the transport, or at least its upper `room` pixels do."""
    box, end = page.locator(selector).first.bounding_box(), page.locator(".transport").bounding_box()["y"]
    assert above <= box["y"], (selector, box, above)
    assert box["y"] + min(box["height"], room) <= end, (selector, box, end)


@SIZES
def test_what_a_card_of_the_story_speaks_of_is_in_sight_of_it(open_page: Open, width: int, height: int) -> None:
    page = open_page(width=width, height=height)
    page.get_by_role("button", name="Story").click()
    shown = ("tensors", "chart", "tensors", "lanes", "lanes", "meter", "tensors", "tensors", "chart", "tensors")
    for card, sight in enumerate(shown, 1):
        until(page, f"document.querySelector('.story h2').innerText.endsWith('{card} of 10')")
        page.wait_for_timeout(50)
        told = page.locator(".story").bounding_box()
        assert told["y"] >= 0
        below_and_above(page, f".left > .{sight}:not(.aside)", told["y"] + told["height"], 250)
        assert no_wider(page)
        page.get_by_role("button", name="Done" if card == 10 else "Next").click()
    assert page.locator(".story").count() == 0


def test_the_story_is_walked_by_keys_alone(open_page: Open) -> None:
    page = open_page(width=1400)
    press, focused = page.keyboard.press, "document.activeElement"
    press("s")
    titles, kernels = [], []
    for card in range(1, 11):
        until(page, f"document.querySelector('.story h2').innerText.endsWith('{card} of 10')")
        until(page, f"{focused} === document.querySelector('.story h2')")  # so that it is read aloud
        until(page, f"location.hash.includes('story={card}')")
        titles.append(page.locator(".story h2").inner_text())
        at = position(page)
        assert at > 0
        assert page.locator(".places [aria-current]").count() == 1
        press("ArrowLeft")  # the page answers while a card is open
        assert position(page) == at - 1
        assert page.locator(".places [aria-current]").count() == 0
        press("Tab")
        assert page.evaluate(f"{focused}.matches('.places a')")
        press("Enter")  # back to the step of which the card speaks
        assert position(page) == at
        kernels.append(page.evaluate(f"new URLSearchParams({focused}.hash.slice(1)).get('kernel')"))
        if card < 10:
            press("n")
    assert kernels == ["hybrid-tiled", "online", "split", "split", "split", "split", "cross-entropy", "draw",
                       "attention", "route"]  # fmt: skip
    press("b")
    until(page, "document.querySelector('.story h2').innerText.endsWith('9 of 10')")
    press("Escape")
    page.wait_for_selector(".story", state="detached")
    assert page.evaluate(f"{focused}.id") == "open-story"
    press("s")
    until(page, "document.querySelector('.story h2').innerText.endsWith('9 of 10')")


def test_a_link_opens_a_card_of_the_story(open_page: Open) -> None:
    page = open_page(link="#story=5")
    assert page.locator(".story h2").inner_text().startswith("The helper")
    at = position(page)
    href = page.locator(".places a").first.get_attribute("href")
    again = open_page(link=href)
    assert (position(again), again.locator(".story h2").inner_text()) == (at, page.locator(".story h2").inner_text())
    for link in ("#story=0", "#story=11", "#story=x"):
        assert open_page(link=link).locator(".story").count() == 0


@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize(("card", "width"), [(1, 390), (5, 1400), (4, 390), (10, 1400)])
def test_cards_of_the_story_pass_axe(open_page: Open, scheme: str, card: int, width: int) -> None:
    axe = VIZ / "node_modules/axe-core/axe.min.js"
    if not axe.exists():
        pytest.skip("needs `make page`")
    page = open_page(
        link=f"#story={card}", width=width, height=880, color_scheme=scheme, reduced_motion="reduce", bypass_csp=True
    )
    if card == 4:
        page.get_by_role("button", name="bits").click()
    page.wait_for_timeout(350)
    page.add_script_tag(path=str(axe))
    found = page.evaluate("axe.run(document, {runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa', 'best-practice']})")
    assert [(each["id"], node["html"][:160]) for each in found["violations"] for node in each["nodes"]] == []


def the_worked(kernel: str) -> dict[str, Any]:
    return next(each for each in presets.load() if each["kernel"] == kernel and each["title"].startswith("3 x 8"))


@BOTH
@pytest.mark.parametrize("kernel", ["split", "backward", "cross-entropy"])
def test_the_exchange_is_in_the_first_screen(open_page: Open, kernel: str, width: int, height: int) -> None:
    at = next(n for n, step in enumerate(the_worked(kernel)["steps"], 1) if "message" in step)
    page = open_page(width=width, height=height, link=f"#kernel={kernel}&matrix=none&step={at}")
    page.locator("select[name=kernel]").select_option(kernel)
    page.locator(".track input").fill(str(at))
    assert page.evaluate("scrollY") == 0
    for each in (".tensor", ".lanes svg", ".lanes .legend"):
        below_and_above(page, each, 0)


@pytest.mark.parametrize("kernel", trace.kernels())
def test_on_a_phone_matrix_line_and_transport_share_the_first_screen(open_page: Open, kernel: str) -> None:
    page = open_page(width=390, height=844)
    page.locator("select[name=kernel]").select_option(kernel)
    length = int(page.locator(".track input").get_attribute("max"))
    for step in (0, length // 3, length // 2, length):
        page.locator(".track input").fill(str(step))
        main = '[data-tensor="z"]' if kernel == "attention" else ".tensor"
        below_and_above(page, main, 0)
        now, transport = page.locator(".now-line").bounding_box(), page.locator(".transport").bounding_box()
        assert transport["y"] <= now["y"]
        assert now["y"] + now["height"] <= 844
        assert transport["y"] + transport["height"] <= 844
        assert page.locator("button.play").is_visible()
        assert no_wider(page)


@pytest.mark.parametrize("first", ["", "#kernel=split&matrix=none", "#kernel=naive"])
def test_a_kernel_that_is_chosen_opens_its_worked_example(open_page: Open, first: str) -> None:
    page = open_page(link=first)
    for kernel in ("split", "naive", "stream", "draw", "route", "split", "attention", "split"):
        page.locator("select[name=kernel]").select_option(kernel)
        said = page.locator("select[name=matrix] option:checked").inner_text()
        assert said == ("12 tokens, causal" if kernel == "attention" else "3 x 8 worked example"), kernel


def test_messages_are_shown_as_m_and_s_and_their_bits_when_asked(open_page: Open) -> None:
    recording = the_worked("split")
    step, at = next((each, n) for n, each in enumerate(recording["steps"], 1) if "message" in each)
    page = open_page(width=1400, height=900)
    page.locator("select[name=kernel]").select_option("split")
    page.locator(".track input").fill(str(at))
    assert page.locator(".lanes svg .message").all_text_contents() == ["(3, 1.47)"]
    assert page.locator('[data-tensor="slots"] tbody td').first.inner_text() == "(3, 1.47)"
    assert "(m, s) = (3, 1.468)" in page.locator(".locals").inner_text()
    (bits,) = step["stores"][0]["data"]
    assert bits not in page.locator("body").inner_text()
    assert page.locator(".bits").count() == 0
    page.get_by_role("button", name="bits").click()
    shown_bits = page.locator(".bits code").inner_text().replace(" ", "")
    assert int(shown_bits, 2) == int(bits)
    assert len(shown_bits) == 64
    assert page.locator(".bits li b").inner_text() == "(3, 1.47)"
    words = [each.inner_text() for each in page.locator(".bits code span").all()]
    numbers = [torch.tensor(int(word, 2)).int().view(torch.float32).item() for word in (words[0], words[2])]
    assert numbers == [step["message"]["m"], pytest.approx(step["message"]["s"], rel=1e-7)]


@pytest.mark.parametrize("kernel", ["split", "attention", "draw", "cross-entropy", "route"])
def test_the_source_opens_at_the_line_that_runs(open_page: Open, kernel: str) -> None:
    page = open_page(width=1400, height=900)
    page.locator("select[name=kernel]").select_option(kernel)
    length = int(page.locator(".track input").get_attribute("max"))
    for step in (0, 1, length // 4, length // 2, length):
        page.locator(".track input").fill(str(step))
        places = ".code [aria-current], .code .next", ".code"
        line_, box = (page.locator(each).first.bounding_box() for each in places)
        assert box["y"] <= line_["y"], step
        assert line_["y"] + line_["height"] <= box["y"] + box["height"], step
    page.locator(".track input").fill("0")
    coming = page.locator(".code .next .number").first.inner_text()
    page.keyboard.press("ArrowRight")
    assert page.locator(".code [aria-current] .number").inner_text() == coming


def test_a_page_of_ones_own_recordings_alone_has_no_story(browser: Any, open_page: Open, tmp_path: Path) -> None:
    path = tmp_path / "own.html"
    path.write_text(page_of.embed([passes(SEED, 2)]))
    page = open_page(passes(SEED, 2))
    page.goto(path.as_uri())
    page.wait_for_selector("main [aria-label]")
    assert page.get_by_role("button", name="Story").count() == 0


def test_on_a_phone_the_line_that_ran_stands_above_the_transport(open_page: Open) -> None:
    recording = next(each for each in presets.load() if each["kernel"] == "online")
    page = open_page(recording, width=390, height=844, link="#kernel=online&step=11")
    now = page.locator(".now-line")
    assert now.inner_text().endswith(page.locator(".code [aria-current] code").inner_text().strip())
    assert now.bounding_box()["y"] + now.bounding_box()["height"] <= page.locator(".track").bounding_box()["y"] < 844
    page.set_viewport_size({"width": 1400, "height": 900})
    assert not now.is_visible()
