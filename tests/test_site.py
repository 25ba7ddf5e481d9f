"""The site in a browser, from a folder and without a network, on a wide screen and on a phone.

Needs the packages of `make docs`, Debian's chromium and playwright; what looks at contrast needs viz/node_modules.
"""

import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from typing import Any
from urllib.parse import unquote

import pytest

pytest.importorskip("mkdocs", reason="the site's packages are not installed")
sync_api = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")

ROOT = Path(__file__).parents[1]
AXE = ROOT / "viz/node_modules/axe-core/axe.min.js"
SCREENS = [(1400, 900), (390, 844)]
SIZES = pytest.mark.parametrize(("width", "height"), SCREENS)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    subprocess.run(build, cwd=ROOT, check=True, env=os.environ | {"NO_MKDOCS_2_WARNING": "1"})
    return folder


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    chromium = shutil.which("chromium") or pytest.skip("chromium is not installed")
    with sync_api.sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox", "--disable-gpu"])
        yield browser
        browser.close()


def watched(page: Any, troubles: list[str]) -> Any:
    """The page, which adds to `troubles` what it writes as an error and asks the network for."""
    page.on("console", lambda message: troubles.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: troubles.append(str(error)))
    page.on("request", lambda request: request.url.startswith(("file:", "data:")) or troubles.append(request.url))
    return page


@pytest.fixture
def open_page(browser: Any, site: Path) -> Iterator[Any]:
    """Opens a page of the site. No page writes an error or asks the network for anything."""
    contexts, troubles = [], []

    def open_page(name: str, width: int = 1400, height: int = 900, **more: Any) -> Any:
        context = browser.new_context(viewport={"width": width, "height": height}, **more)
        contexts.append(context)
        page = watched(context.new_page(), troubles)
        page.goto((site / name).as_uri())
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert troubles == []


def pages(site: Path) -> list[Path]:
    made = {site / "page.html", site / "404.html"}  # the visualizer; a page whose links are a server's
    return sorted({*site.glob("*.html"), *site.glob("measured/*.html")} - made)


def tasks() -> list[str]:
    contents = re.search(r"^  - Tasks:\n((?:      - .*\n)+)", (ROOT / "mkdocs.yml").read_text(), re.M)
    return re.findall(r"(\S+)\.md$", contents[1], re.M)


def until(page: Any, expression: str) -> None:
    end = time.monotonic() + 20
    while not page.evaluate(expression):
        assert time.monotonic() < end, f"never came: {expression}"
        page.wait_for_timeout(50)


# What stands in the files.


class Links(HTMLParser):
    def __init__(self, text: str) -> None:
        super().__init__()
        self.links: list[str] = []
        self.ids: set[str] = set()
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        found = dict(attrs)
        self.ids |= {found[name] for name in ("id", "name") if found.get(name)}
        self.links += [found[name] for name in ("href", "src") if found.get(name)]


def test_every_link_of_the_site_leads_somewhere(site: Path) -> None:
    of_page = {path: Links(path.read_text()) for path in pages(site)}
    of_page[site / "page.html"] = Links("")
    for page, found in of_page.items():
        for link in found.links:
            if link.startswith(("http:", "https:", "data:", "mailto:")):
                continue
            path, _, anchor = unquote(link).partition("#")
            target = (page.parent / path).resolve() if path else page
            assert target.is_file(), f"{page.name} links to {link}"
            if anchor and target in of_page and target.name != "page.html":
                assert anchor in of_page[target].ids, f"{page.name} links to {link}"


def test_words_to_search_for_stand_in_their_pages(site: Path) -> None:
    index = json.loads((site / "search/search_index.json").read_text())["docs"]
    tagged = {each["location"]: each["tags"] for each in index if each.get("tags") and "#" not in each["location"]}
    assert {f"{task}.html" for task in tasks()} | {"getting-started.html"} <= tagged.keys()
    for location, tags in tagged.items():
        text = re.sub(r"<[^>]*>", "", (site / location).read_text()).lower()
        assert [tag for tag in tags if tag.lower() not in text] == [], location


def test_the_logo_and_the_icon_are_drawn_here(site: Path) -> None:
    home = (site / "index.html").read_text()
    assert '<link rel="icon" href="images/logo.svg"' in home
    bars = re.search(r"The bars are (\d+), (\d+), (\d+) and (\d+) sixteenths", (site / "images/logo.svg").read_text())
    heights = [float(high) for high in re.findall(r"42V([\d.]+)H", (site / "images/logo.svg").read_text())]
    assert [(42 - each) / 3.25 for each in heights] == [int(each) for each in bars.groups()]
    assert sum(map(int, bars.groups())) == 16


# What a browser shows.


LAID_OUT = """width => ({
    width: document.documentElement.scrollWidth,
    cut: [...document.querySelectorAll("pre, pre > code")]
        .filter(each => each.scrollWidth > each.clientWidth).map(each => each.innerText.slice(0, 80)),
    lines: width < 1000 ? [] : [...document.querySelectorAll(".language-python pre > code > span[id]")]
        .map(each => [each.offsetHeight / parseFloat(getComputedStyle(each).lineHeight), each.innerText]),
})"""


@pytest.fixture(scope="module")
def laid_out(browser: Any, site: Path) -> dict[tuple[Path, int], Any]:
    """What a browser makes of every page on a screen of each width."""
    troubles, found = [], {}
    page = watched(browser.new_page(), troubles)
    for width, height in SCREENS:
        page.set_viewport_size({"width": width, "height": height})
        for path in pages(site):
            page.goto(path.as_uri())
            found[path, width] = page.evaluate(LAID_OUT, width)
    page.close()
    assert troubles == []
    return found


@pytest.mark.parametrize("width", [width for width, _ in SCREENS])
def test_no_page_is_wider_than_the_screen_and_no_code_is_cut_off(width: int, site: Path, laid_out: Any) -> None:
    for path in pages(site):
        assert laid_out[path, width]["width"] <= width, path.name
        assert laid_out[path, width]["cut"] == [], path.name


def test_lines_of_code_are_whole_on_a_wide_screen(site: Path, laid_out: Any) -> None:
    n_lines = 0
    for path in pages(site):
        if path.parent == site / "measured" or path.name == "reference.html":
            continue
        lines = laid_out[path, SCREENS[0][0]]["lines"]
        n_lines += len(lines)
        assert [text for high, text in lines if high > 1.5] == [], path.name
    assert n_lines > 200


def test_code_is_copied_as_it_is(open_page: Any) -> None:
    """The theme copies the text as laid out, marked with this attribute."""
    page = open_page("softmax.html")
    laid_out = page.eval_on_selector_all(
        "pre > code",
        "all => all.map(each => { each.querySelector('nav')?.remove(); each.setAttribute('data-md-copying', '');"
        " return [each.innerText.trimEnd(), each.textContent.trimEnd()]; })",
    )
    assert len(laid_out) > 3
    assert "import torch\nfrom fused_softmax import" in laid_out[0][0]
    for shown, text in laid_out:
        assert shown == text


@SIZES
def test_the_home_page_shows_a_kernel_that_plays(width: int, height: int, open_page: Any) -> None:
    page = open_page("index.html", width, height)
    box = page.locator("iframe.recording").bounding_box()
    assert box["y"] < height / 2
    frame = page.frame_locator("iframe.recording")
    frame.locator("button.play[aria-label=Pause]").wait_for()
    matrix = frame.locator(".tensor").first.bounding_box()
    lanes = frame.locator(".lanes svg").bounding_box()
    assert matrix["y"] + matrix["height"] < height
    assert lanes["y"] + lanes["height"] < height
    for _ in range(200):
        if int(frame.locator("[data-position]").inner_text()) > 2:
            break
        page.wait_for_timeout(50)
    assert int(frame.locator("[data-position]").inner_text()) > 2
    assert box["y"] + box["height"] < height + 60, "its buttons are in sight, or nearly"


def test_the_home_page_stands_still_where_less_motion_is_asked(open_page: Any) -> None:
    page = open_page("index.html", reduced_motion="reduce")
    frame = page.frame_locator("iframe.recording")
    frame.locator("button.play[aria-label=Play]").wait_for()
    page.wait_for_timeout(400)
    assert frame.locator("[data-position]").inner_text() == "0"


def test_recordings_have_the_theme_of_the_site(open_page: Any) -> None:
    page = open_page("index.html")
    frame = page.frame_locator("iframe.recording")
    frame.locator("html[data-theme=light]").wait_for(state="attached")
    page.get_by_title("Dark").click()
    frame.locator("html[data-theme=dark]").wait_for(state="attached")
    page.goto(page.url.replace("index.html", "story.html"))
    page.frame_locator("iframe >> nth=0").locator("html[data-theme=dark]").wait_for(state="attached")


def test_a_recording_in_a_page_is_stepped(open_page: Any) -> None:
    page = open_page("story.html")
    frame = page.frame_locator("iframe >> nth=0")
    frame.get_by_role("button", name="Step", exact=True).click()
    assert frame.locator("[data-position]").inner_text() == "1"


@SIZES
def test_each_task_has_a_card_that_is_a_link(width: int, height: int, open_page: Any) -> None:
    page = open_page("index.html", width, height)
    links = page.locator(".cards li p:first-child a")
    assert links.evaluate_all("all => all.map(each => each.getAttribute('href'))") == [
        f"{each}.html" for each in tasks()
    ]
    links.first.focus()
    for i in range(len(tasks())):
        assert links.nth(i).evaluate("each => each === document.activeElement")
        page.keyboard.press("Tab")
    cards = page.locator(".cards li")
    for i in (0, len(tasks()) - 1):
        cards.nth(i).scroll_into_view_if_needed()
        box = cards.nth(i).bounding_box()
        page.mouse.click(box["x"] + box["width"] - 8, box["y"] + box["height"] - 8)
        page.wait_for_url(f"**/{tasks()[i]}.html")
        page.go_back()
        page.wait_for_url("**/index.html")


# Who finds what. Notes of the laboratory and what is for contributors come after all else.
FOUND = {
    "top-p": "sample", "min-p": "sample", "temperature": "sample", "bitmask": "sample", "segments": "segments",
    "gradient": "attention", "install": "getting-started", "softmax": "softmax", "mask": "softmax",
    "cross entropy": "train", "label_smoothing": "train", "autocast": "train", "GRPO": "post-training",
    "kl": "post-training", "entropy": "post-training", "tensor parallel": "shards", "DTensor": "shards",
    "experts": "route", "bias": "attention", "hugging face": "transformers", "enable": "patch",
    "explain": "explain", "warmup": "warm",
}  # fmt: skip
LAST = re.compile(r"^(?:measured/|MEASURED|CONTRIBUTING|CHANGELOG)")


def test_the_search_finds_tasks_first_and_notes_of_the_laboratory_last(site: Path, open_page: Any) -> None:
    page = open_page("index.html")
    field = page.locator("input.md-search__input")
    field.click()
    page.wait_for_function("document.querySelector('.md-search-result__meta').textContent.includes('Type')")
    hrefs = "all => all.map(each => each.querySelector('a').href)"
    for words, first in FOUND.items():
        before = page.locator(".md-search-result__meta").inner_text()
        field.fill("")
        field.press_sequentially(words)
        end = time.monotonic() + 20
        found: list[str] = []
        while not found or not found[0].startswith(first):
            found = [
                each.removeprefix(site.as_uri() + "/").partition("?")[0]
                for each in page.eval_on_selector_all(".md-search-result__item", hrefs)
            ]
            assert time.monotonic() < end, (words, before, found)
            page.wait_for_timeout(50)
        assert found[0].startswith(f"{first}.html"), (words, found)
        last = [bool(LAST.match(each)) for each in found]
        assert last == sorted(last), (words, found)


@pytest.mark.parametrize(
    ("width", "height", "scheme"),
    [
        (1400, 900, "light"),
        (390, 844, "dark"),
        pytest.param(1400, 900, "dark", marks=pytest.mark.exhaustive),
        pytest.param(390, 844, "light", marks=pytest.mark.exhaustive),
    ],
)
def test_text_has_contrast_and_names(scheme: str, width: int, height: int, site: Path, open_page: Any) -> None:
    if not AXE.exists():
        pytest.skip("needs `make page`")
    rules = "{runOnly: ['wcag2a', 'wcag2aa', 'wcag21a', 'wcag21aa'], iframes: false, preload: false}"
    names = ("index", "examples", "softmax", "results", "measured/bench")
    page = open_page("index.html", width, height, color_scheme=scheme, reduced_motion="reduce")
    for name in names:
        page.goto((site / f"{name}.html").as_uri())
        page.add_script_tag(path=str(AXE))
        found = page.evaluate(f"axe.run(document, {rules})")
        assert any(each["id"] == "color-contrast" for each in found["passes"])
        assert [
            (name, each["id"], node["html"][:160], node["failureSummary"][:300])
            for each in found["violations"]
            for node in each["nodes"]
        ] == []
