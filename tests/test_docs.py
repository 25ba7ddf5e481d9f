"""README and docs: links and pictures exist, code runs as written, commands exist and print what is said."""

import importlib.util
import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import click
import pytest
import torch
from click.testing import CliRunner

from fused_softmax.cli import main

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"
OF_THE_ROOT = [ROOT / name for name in ("README.md", "MEASURED.md", "CONTRIBUTING.md", "CHANGELOG.md")]
MEASURED = sorted((ROOT / "measured").glob("*.md"))
PAGES = sorted(DOCS.glob("*.md"))
MADE = {"page.html"}  # what `make docs` adds to the site
LINK = re.compile(r"!?\[[^\]]*\]\(([^)\s]+)\)")
BLOCK = re.compile(r"^(?:<!-- not run: (?P<why>[^\n]+) -->\n)?```python\n(?P<code>.*?)^```$", re.M | re.S)

every_page = pytest.mark.parametrize(
    "page", [*OF_THE_ROOT, *MEASURED, *PAGES], ids=lambda page: str(page.relative_to(ROOT))
)


def without_code(text):
    return re.sub(r"`[^`\n]*`", "", re.sub(r"^```.*?^```$", "", text, flags=re.M | re.S))


def anchors(page):
    """As GitHub and the site name the headings of a page."""
    text = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.M | re.S)
    headings = re.findall(r"^#+ (.+)$", text, re.M)
    return {re.sub(r"[^\w\- ]", "", heading).lower().replace(" ", "-") for heading in headings}


@every_page
def test_every_link_and_picture_leads_somewhere(page):
    for link in LINK.findall(without_code(page.read_text())):
        if link.startswith("http"):
            continue
        path, _, anchor = link.partition("#")
        target = page.parent / path if path else page
        if path in MADE and page.parent == DOCS:
            continue
        assert target.is_file(), f"{page.name} links to {link}"
        assert ROOT in target.resolve().parents
        if anchor:
            assert anchor in anchors(target), f"{page.name} links to {link}"
        if target.suffix == ".png":
            assert target.read_bytes().startswith(b"\x89PNG")


def test_the_readme_can_be_read_in_a_minute():
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 150
    assert {"benchmarks/results/h200_softmax.png", "docs/images/page.png"} <= set(LINK.findall(text))
    first = text.split("\n\n")[1]
    assert len(re.findall(r"\.(?=\s|$)", first)) == 3, "what it is and for whom, in three sentences"
    commands = re.search(r"^## Start\n.*?^```\n(.*?)^```$", text, re.M | re.S)[1]
    assert [line.split()[:2] for line in commands.splitlines()] == [["make", "demo"], ["make", "test"]]
    example = re.search(r"^## Use\n+```python\n(.*?)^```$", text, re.M | re.S)[1]
    without = re.search(r"^## What it does not do\n(.*?)^## ", text, re.M | re.S)[1]
    for ten in (example, without):
        assert len([line for line in ten.splitlines() if line]) <= 10
    assert (DOCS / "images/page.png").stat().st_size < 200_000


def test_the_readme_leads_to_every_example():
    linked = {Path(link) for link in LINK.findall((ROOT / "README.md").read_text())}
    programs = {path.relative_to(ROOT) for path in (ROOT / "examples").glob("*.py") if "def main(" in path.read_text()}
    assert programs <= linked


def test_every_page_is_in_the_sites_contents():
    contents = (ROOT / "mkdocs.yml").read_text().partition("nav:")[2]
    listed = set(re.findall(r": (\S+\.md)$", contents, re.M))
    assert listed == {page.name for page in [*PAGES, *OF_THE_ROOT[1:]]} | {f"measured/{page.name}" for page in MEASURED}


def blocks(page, every=False):
    """The Python of a page, which runs from its top: (line, code). With `every`, also blocks that do not run."""
    text = page.read_text()
    found = [each for each in BLOCK.finditer(text) if every or not each["why"]]
    return [(text[: each.start("code")].count("\n"), each["code"]) for each in found]


RUN = """
import json, sys
for page, blocks in json.load(sys.stdin):
    names = {}
    for line, code in blocks:
        try:
            exec(compile("\\n" * line + code, page, "exec"), names)
        except Exception:
            print(page, "from line", line + 1, file=sys.stderr)
            raise
"""


def test_python_of_readme_and_docs_runs_as_written():
    """By whatever computes where the tests run: on a CPU torch's operations, and not the interpreter."""
    here = [page for page in PAGES if page.name != "visualizer.md"]  # whose recordings would start a worker
    pages = [(page.name, blocks(page)) for page in [ROOT / "README.md", *here]]
    assert sum(len(each) for _, each in pages) >= 12
    left_out = {"FUSED_SOFTMAX_INTERPRET", "TRITON_INTERPRET"}
    environment = {name: value for name, value in os.environ.items() if name not in left_out}
    environment["PYTHONPATH"] = str(ROOT / "src")
    command = [sys.executable, "-c", RUN]
    done = subprocess.run(
        command, input=json.dumps(pages), env=environment, capture_output=True, text=True, timeout=300
    )  # fmt: skip
    assert done.returncode == 0, done.stderr


def test_calls_of_sampling_run_by_the_kernels(device):
    """On a vocabulary that is small enough for the interpreter."""
    names = {"torch": torch}
    for _, code in blocks(DOCS / "sample.md"):
        code = re.sub(r"^device = .*$", f'device = "{device}"', code, flags=re.M)
        exec(code.replace("128256", "96"), names)
    assert names["tokens"].shape == (8,)
    assert names["out"].top_tokens.shape == (8, 5)
    assert names["drafted"].tokens.shape == (8, 4)


def test_recordings_are_made_as_written():
    names = {}
    for _, code in blocks(DOCS / "visualizer.md"):
        exec(code, names)
    assert names["recording"]["rows"][0]["max"] == 3.0


def commands_shown():
    """Of README and docs, each command with its output."""
    text = "\n".join(page.read_text() for page in [ROOT / "README.md", *PAGES])
    found = re.findall(r"^```\n\$ fused-softmax (\S[^\n]*)\n(.*?)^```$", text, re.M | re.S)
    return [pytest.param(arguments, said, id=arguments) for arguments, said in found]


@pytest.mark.parametrize(("arguments", "said"), commands_shown())
def test_what_a_command_is_said_to_print_it_prints(monkeypatch, arguments, said):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    result = CliRunner().invoke(main, arguments.split(), prog_name="fused-softmax")
    assert result.exit_code == 0
    if arguments == "env":  # its values are the machine's
        assert [line.split()[0] for line in result.output.splitlines()] == [
            line.split()[0] for line in said.splitlines()
        ]
    else:
        assert result.output == said


def test_the_outputs_of_two_commands_are_shown():
    assert [each.id.split()[0] for each in commands_shown()] == ["plan", "env"]


def commands_named():
    """Every `fused-softmax ...` in README and docs, in a line of its own or within a sentence."""
    text = "\n".join(page.read_text() for page in [ROOT / "README.md", *PAGES])
    text = re.sub(r"^`?fused-softmax bench.*--out \w+\.json`\.$", "", text, flags=re.M)  # in tables of results
    alone = re.findall(r"^(?:\$ )?fused-softmax (\S[^\n]*)", text, re.M)
    within = re.findall(r"`fused-softmax (\w[^`]*)`", text)
    return sorted({" ".join(line.partition(" #")[0].split()) for line in [*alone, *within]})


@pytest.mark.parametrize("line", commands_named())
def test_a_command_that_is_named_exists_with_its_options(line):
    command, context = main, click.Context(main)
    words = shlex.split(line)
    while isinstance(command, click.Group) and words and command.get_command(context, words[0]):
        command = command.get_command(context, words.pop(0))
        context = click.Context(command, parent=context)
    assert command is not main, line
    takers = [command, *filter(None, [getattr(command, "sweep", None)])]  # `bench` without a command is a sweep
    known = {option for each in takers for parameter in each.get_params(context) for option in parameter.opts}
    for word in words:
        assert not word.startswith("-") or word in known, f"{line}: no {word}"


TARGETS = set(re.findall(r"^([a-z][\w-]*):", (ROOT / "Makefile").read_text(), re.M))


@every_page
def test_every_target_of_make_that_is_named_exists(page):
    for target in re.findall(r"`make ([a-z-]+)", page.read_text()):
        assert target in TARGETS


def test_docstrings_become_markdown():
    pytest.importorskip("griffe", reason="the site's packages are not installed")
    spec = importlib.util.spec_from_file_location("docstrings", DOCS / "docstrings.py")
    docstrings = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(docstrings)
    text = "What it does.\n\ndim: one of\n    them.\nscale, mask and sink: more.\n\nReturns a: b.\n\n>>> f(1)\n2"
    assert docstrings.markdown(text).split("\n") == [
        "What it does.", "", "- **dim**: one of", "    them.", "- **scale, mask and sink**: more.", "", "",
        "Returns a: b.", "", "", "```pycon", ">>> f(1)", "2", "```",
    ]  # fmt: skip
