"""What the packages say of themselves, without building them; `make dist-test` builds and tries them."""

import re
import runpy
import sys
import time
import tomllib
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace

import pytest
from check_dist import RELATIVE
from fresh import TooLate, run

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
ADDRESS = "https://a.example/owner/name"


@pytest.fixture
def hook(monkeypatch):
    """What builds the packages, beside whatever stands for its base class: pip gets it for a build alone."""
    base = type("Base", (), {"MetadataHookInterface": object})
    monkeypatch.setitem(sys.modules, "hatchling.metadata.plugin.interface", base)
    monkeypatch.delenv("FUSED_SOFTMAX_ADDRESS", raising=False)
    return SimpleNamespace(**runpy.run_path(str(ROOT / "hatch_build.py")))


@pytest.fixture
def for_an_index(hook):
    return hook.for_an_index


def test_the_readme_leads_nowhere_that_an_index_has_not(for_an_index):
    text = (ROOT / "README.md").read_text()
    shown = for_an_index(text)
    assert RELATIVE.search(shown) is None
    assert shown.count("\n#") == text.count("\n#")
    # A picture that is left out is above no more.
    assert re.findall(r"(?i)\b(?:above|below)\b.*", shown) == []
    paragraphs = re.sub(r"^(```.*?^)(?=```)", "```\n", shown, flags=re.M | re.S).split("\n\n")
    for before, after in pairwise(paragraphs):
        shows = after.startswith(("```", "- ", "|", "<!--"))
        assert shows or not before.rstrip().endswith(":"), f"nothing follows {before[-60:]!r}"


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a ![plot](docs/plot.png) b", "a  b"),
        ("[![plot](docs/plot.png)](docs/plot.html)\n\nb", "b"),
        ('<img alt="a" src="plot.png" width="9">\nb', "b"),
        ('<picture>\n<source srcset="a.png"><img src="https://a.example/b.png">\n</picture>\nb', "b"),
        ("see [the\nlist](MEASURED.md#list), (or [Limits](#limits))", "see the\nlist, (or Limits)"),
        ('<a href="docs/">docs</a>', "docs"),
        ("[torch](https://a.example/b) ![x](https://a.example/x.png)", None),
        ("kernel[grid](x) and record(kernel)[(n_rows,)](x, y, x.stride(0))", None),
    ],
)
def test_what_an_index_shows(for_an_index, text, shown):
    assert for_an_index(text) == (text if shown is None else shown)


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("a ![plot](docs/plot.png) b", "a ![plot](A/raw/v1.2.3/docs/plot.png) b"),
        ("[![plot](docs/plot.png)](docs/a.md)", "[![plot](A/raw/v1.2.3/docs/plot.png)](A/blob/v1.2.3/docs/a.md)"),
        ('<img srcset="a.png" src="b.png">', '<img srcset="A/raw/v1.2.3/a.png" src="A/raw/v1.2.3/b.png">'),
        ("see [the\nlist](a.md#b)", "see [the\nlist](A/blob/v1.2.3/a.md#b)"),
        ("(or [Limits](#l))", "(or [Limits](A/blob/v1.2.3/README.md#l))"),
        ('<a href="docs/">docs</a>', '<a href="A/blob/v1.2.3/docs/">docs</a>'),
        ("[torch](https://a.example/b) ![x](https://a.example/x.png)", None),
        ("kernel[grid](x) and record(kernel)[(n_rows,)](x, y, x.stride(0))", None),
    ],
)
def test_what_an_index_shows_of_a_project_that_has_an_address(for_an_index, text, shown):
    assert for_an_index(text, ADDRESS, "1.2.3") == (text if shown is None else shown.replace("A/", f"{ADDRESS}/"))


def test_all_of_the_readme_leads_to_the_address(for_an_index):
    text = (ROOT / "README.md").read_text()
    shown = for_an_index(text, ADDRESS, "1.2.3")
    assert RELATIVE.search(shown) is None
    assert re.sub(rf"{ADDRESS}/(raw|blob)/v1\.2\.3/(README\.md(?=#))?", "", shown) == text


@pytest.mark.parametrize("said", ["environment", "sdist", None])
def test_where_the_project_is(hook, monkeypatch, tmp_path, said):
    """Of two that differ the environment's counts; without both there are no URLs."""
    (tmp_path / "README.md").write_text("[a](a.md)")
    if said is not None:
        where = "https://b.example" if said == "environment" else ADDRESS
        urls = f"Project-URL: Issues, https://c\nProject-URL: Source, {where}\n"
        (tmp_path / "PKG-INFO").write_text(f"Name: a\n{urls}\nB")
    if said == "environment":
        monkeypatch.setenv("FUSED_SOFTMAX_ADDRESS", f"{ADDRESS}/")
    made, metadata = hook.Hook(), {"version": "1.2.3"}
    made.root = str(tmp_path)
    made.update(metadata)
    assert metadata["readme"]["text"] == ("a" if said is None else f"[a]({ADDRESS}/blob/v1.2.3/a.md)")
    assert metadata["urls"].get("Source") == (None if said is None else ADDRESS)
    assert all(url.startswith(ADDRESS) for url in metadata["urls"].values())


def test_the_version_stands_in_one_place():
    assert "version" in PROJECT["project"]["dynamic"]
    text = (ROOT / PROJECT["tool"]["hatch"]["version"]["path"]).read_text()
    assert re.findall(r'^__version__ = "(\d+\.\d+\.\d+)"$', text, re.MULTILINE)


def test_the_recipe_for_conda_says_what_pyproject_says():
    rattler_build = pytest.importorskip("rattler_build", reason="py-rattler-build is not installed")
    about = PROJECT["project"]
    python_min = about["requires-python"].removeprefix(">=")
    recipe = rattler_build.Stage0Recipe.from_file(ROOT / "recipe/recipe.yaml")
    (rendered,) = recipe.render(rattler_build.VariantConfig({"python_min": [python_min]}))
    found = rendered.recipe.to_dict()
    version = re.search(r'^__version__ = "(.*)"$', (ROOT / "src/fused_softmax/__init__.py").read_text(), re.M)[1]
    assert found["package"] == {"name": about["name"], "version": version}
    assert found["source"] == [{"path": f"../dist/fused_softmax-{version}.tar.gz"}]
    names = {"torch": "pytorch"}
    wanted = [re.match(r"([a-z]+)([^;]*)", each).groups() for each in about["dependencies"]]
    wanted = {f"{names.get(name, name)} {versions}" for name, versions in wanted}
    assert set(found["requirements"]["run"]) == {f"python >={python_min}", "__linux", *wanted}
    host = {re.sub("(?=>)", " ", each) for each in PROJECT["build-system"]["requires"]}
    assert set(found["requirements"]["host"]) == {f"python {python_min}.*", "pip", *host}
    scripts = [f"{name} = {what}" for name, what in about["scripts"].items()]
    assert found["build"]["python"]["entry_points"] == scripts
    assert (found["about"]["license"], found["about"]["summary"]) == (about["license"], about["description"])


def test_triton_is_asked_for_on_linux_alone():
    (triton,) = [each for each in PROJECT["project"]["dependencies"] if each.startswith("triton")]
    assert triton.endswith("platform_system == 'Linux'")


@pytest.mark.guard  # it waits for five seconds
def test_what_is_too_late_ends_with_all_that_it_began(tmp_path):
    """pip for another interpreter began a process that still wrote into a folder while it was removed."""
    writes = "import time\nwhile True: open('alive', 'a').write('.'); time.sleep(0.01)"
    begins = f"import subprocess, sys; subprocess.run([sys.executable, '-IS', '-c', {writes!r}])"
    with pytest.raises(TooLate):
        run(sys.executable, "-c", begins, cwd=tmp_path, timeout=5)
    said = (tmp_path / "alive").read_text()
    time.sleep(0.2)
    assert said
    assert (tmp_path / "alive").read_text() == said
