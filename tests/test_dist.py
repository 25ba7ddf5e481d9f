"""What the packages say of themselves, without building them; `make dist-test` builds and tries them."""

import re
import sys
import time
import tomllib
from itertools import pairwise
from pathlib import Path

import pytest
from check_dist import RELATIVE
from fresh import TooLate, run

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
SUBSTITUTIONS = PROJECT["tool"]["hatch"]["metadata"]["hooks"]["fancy-pypi-readme"]["substitutions"]


def for_an_index(text):
    for each in SUBSTITUTIONS:
        text = re.sub(each["pattern"], each["replacement"], text)
    return text


def test_the_readme_leads_nowhere_that_an_index_has_not():
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
def test_what_an_index_shows(text, shown):
    assert for_an_index(text) == (text if shown is None else shown)


def test_the_version_stands_in_one_place():
    assert "version" in PROJECT["project"]["dynamic"]
    text = (ROOT / PROJECT["tool"]["hatch"]["version"]["path"]).read_text()
    assert re.findall(r'^__version__ = "(\d+\.\d+\.\d+)"$', text, re.MULTILINE)


def test_triton_is_asked_for_on_linux_alone():
    (triton,) = [each for each in PROJECT["project"]["dependencies"] if each.startswith("triton")]
    assert triton.endswith("platform_system == 'Linux'")


def test_what_is_too_late_ends_with_all_that_it_began(tmp_path):
    """pip for another interpreter began a process that still wrote into a folder while it was removed."""
    writes = "import time\nwhile True: open('alive', 'a').write('.'); time.sleep(0.01)"
    begins = f"import subprocess, sys; subprocess.run([sys.executable, '-c', {writes!r}])"
    with pytest.raises(TooLate):
        run(sys.executable, "-c", begins, cwd=tmp_path, timeout=2)
    said = (tmp_path / "alive").read_text()
    time.sleep(0.2)
    assert said
    assert (tmp_path / "alive").read_text() == said
