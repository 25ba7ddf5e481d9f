"""What the site is made of beside the pages of this folder, and a check that it asks no network for anything.

Pages may link to any file of the repository, as they are read there: `../benchmarks/results/h200_softmax.json`. Such a
file becomes part of the site. Markdown files at the root and in measured/ become pages of it.
"""

import json
import logging
import re
import runpy
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
MEASURED = sorted(f"measured/{path.name}" for path in (ROOT / "measured").glob("*.md"))
PAGES = ("MEASURED.md", "CONTRIBUTING.md", "CHANGELOG.md", *MEASURED)
OUTSIDE = re.compile(r"\]\(\.\./([^)#\s]+)(#[^)\s]*)?\)")
TEXT = {".py", ".json", ".toml"}  # which browsers show as text by this name, and not by their own
# What a browser loads by itself: scripts, styles, pictures, frames. A link to another site loads nothing.
REMOTE = re.compile(r"<(?:script|link|img|iframe|source)\b[^>]*\b(?:src|href)=\"(?:https?:)?//[^\"]*\"")
# The theme's way to search pages that are opened from a folder is a script of the web; offline.js takes its place.
SHIM = '<script src="https://unpkg.com/iframe-worker/shim"'

log = logging.getLogger("mkdocs.hooks.site")


def on_files(files: Files, config: MkDocsConfig) -> Files:
    for name in PAGES:
        files.append(File.generated(config, name, content=(ROOT / name).read_text().replace("](docs/", "](")))
    files.append(File.generated(config, "page.html", content=visualizer()))
    outside = {path for file in files.documentation_pages() for path, _ in OUTSIDE.findall(file.content_string)}
    for path in sorted(outside - {*PAGES, "README.md"}):
        if (ROOT / path).is_file() and not path.startswith("docs/"):
            files.append(File.generated(config, served_as(path), content=(ROOT / path).read_bytes()))
    return files


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    def inside(match: re.Match[str]) -> str:
        path, anchor = match[1], match[2] or ""
        if not (ROOT / path).is_file():
            log.warning("%s links to %s, which does not exist", page.file.src_uri, path)
        return f"]({to_root(page)}{served_as(path)}{anchor})"

    return OUTSIDE.sub(inside, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    output = output.replace(SHIM, f'<script src="{to_root(page)}offline.js"')
    for found in REMOTE.findall(output):
        log.warning("%s loads from the network: %s", page.file.src_uri, found)
    return output


def to_root(page: Page) -> str:
    """What leads from a page to the root of the site."""
    return "../" * page.file.src_uri.count("/")


def served_as(path: str) -> str:
    """The place in the site of a file of the repository."""
    if path in PAGES or path.startswith("docs/"):
        return path.removeprefix("docs/")
    return f"files/{path}" + (".txt" if Path(path).suffix in TEXT - {".json"} else "")


def visualizer() -> str:
    """The page that `fused-softmax trace -o` writes, made without the package, which would import torch."""
    trace = ROOT / "src/fused_softmax/trace"
    page = runpy.run_path(str(trace / "page.py"))
    return page["embed"]([], json.loads((trace / "presets.json").read_text()))
