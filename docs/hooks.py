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
# By the section of the contents that a page is in, what its score in the search is multiplied by: tasks come first, and
# notes of the laboratory last. A word of a heading counts for a thousand of the text, so last is below a thousandth.
BOOST = {
    "Start": 2.0, "Tasks": 4.0, "How it works": 1.0, "Reference": 0.5, "Measurements": 1.0, "What was learnt": 1e-5,
    "Project": 1e-5,
}  # fmt: skip
OF_NO_SECTION = 2.0
# What a reader types who looks for a page: functions, options and terms that its headings lack. A word here counts for
# a million of the text.
SOUGHT = {
    "getting-started.md": ("install", "requirements", "environment variables"),
    "examples.md": ("examples", "example"),
    "train.md": ("cross_entropy", "linear_cross_entropy", "loss", "label_smoothing", "z-loss", "softcap", "autocast"),
    "post-training.md": (
        "log_prob", "linear_log_prob", "divergence", "log-probabilities", "entropy", "GRPO", "PPO", "DPO", "TRL", "KL",
        "JSD", "teacher",
    ),
    "shards.md": ("group", "ranks", "tensor-parallel", "DTensor", "loss_parallel", "NVLink"),
    "sample.md": ("sample", "speculative_sample", "penalize", "top-p", "top-k", "min-p", "temperature", "bitmask"),
    "route.md": ("route", "router", "mixture of experts"),
    "attention.md": ("attention", "bias", "sinks", "softcap", "window", "ALiBi", "cuDNN"),
    "softmax.md": ("softmax", "log_softmax", "logsumexp", "mask", "sinks", "batch"),
    "segments.md": ("segment_softmax", "segment_log_softmax", "segment_logsumexp", "graph", "PyTorch Geometric"),
    "transformers.md": ("hf.apply", "Hugging Face", "Llama"),
    "patch.md": ("enable", "enabled", "disable", "torch.compile"),
    "explain.md": ("explain",),
    "warm.md": ("warmup", "compile", "first call"),
}  # fmt: skip
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
    page.meta["search"] = {"boost": BOOST[page.parent.title] if page.parent else OF_NO_SECTION}
    page.meta["tags"] = list(SOUGHT.get(page.file.src_uri, ()))

    def inside(match: re.Match[str]) -> str:
        path, anchor = match[1], match[2] or ""
        if not (ROOT / path).is_file():
            log.warning("%s links to %s, which does not exist", page.file.src_uri, path)
        return f"]({to_root(page)}{served_as(path)}{anchor})"

    return OUTSIDE.sub(inside, markdown)


def on_post_page(output: str, page: Page, config: MkDocsConfig) -> str:
    output = output.replace(SHIM, f'<script src="{to_root(page)}offline.js"')
    output = output.replace('role="dialog">', 'role="dialog" aria-label="Search">')  # which the theme leaves nameless
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
