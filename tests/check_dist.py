"""Looks at a wheel and an sdist as those who install them do: `python tests/check_dist.py dist`.

What they hold, whether each installs into a new environment and works there, and whether the sdist passes its tests:
those that read the tree, or those named after the folder, `tests` for all.
"""

import hashlib
import re
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from concurrent.futures import ThreadPoolExecutor
from email import message_from_bytes
from pathlib import Path

from fresh import Failed, run, smoke

ROOT = Path(__file__).parents[1]
# Of other files than the package's; all others are collected.
READ_THE_TREE = [
    f"tests/test_{name}.py" for name in ("bench", "examples", "faults", "imports", "readme", "renew", "report")
]
# A link or a picture of Markdown or HTML that leads to no address; `kernel[grid](x)` is code.
RELATIVE = re.compile(
    r"(?<![\w)\]])\[[^\]]*\]\((?![a-z]+:)[^)\s]*\)"
    r"|\b(?:src|href|srcset)=\"(?![a-z]+:)[^\"]*\""
    r"|^\[[^\]]+\]: +(?![a-z]+:)\S+",
    re.MULTILINE,
)


def one(folder, pattern):
    found = sorted(folder.glob(pattern))
    if len(found) != 1:
        raise SystemExit(f"{folder} holds {len(found)} files {pattern}: run `make dist` in a clean folder")
    return found[0]


def check_wheel(path):
    """Its version. Nothing is in it twice, nothing but the package, and its readme needs no other file."""
    seen = {}
    with zipfile.ZipFile(path) as wheel:
        for name in wheel.namelist():
            content = wheel.read(name)
            digest = hashlib.sha256(content).digest()
            assert not content or digest not in seen, f"{name} is {seen[digest]} again"
            seen[digest] = name
            assert re.match(r"fused_softmax(-[^/]+\.dist-info)?/", name), f"{name} is no part of the package"
            if name.endswith(".dist-info/METADATA"):
                about = message_from_bytes(content)
                if "Project-URL" not in about:
                    print("note: no Project-URL, so an index links to no source: see RELEASING.md", flush=True)
                link = RELATIVE.search(content.decode())
                assert link is None, f"the readme has {link[0]!r}, which an index cannot show"
    return about["Version"]


def check_sdist(path):
    """It holds every file of the checkout but the CI's."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, text=True)
    with tarfile.open(path) as sdist:
        held = {name.partition("/")[2] for name in sdist.getnames()}
    missing = {name for name in done.stdout.split("\0")[:-1] if not name.startswith(".ci/")} - held
    assert not missing, f"the sdist lacks {', '.join(sorted(missing)[:5])}"


def check_tests(path, folder, tests):
    """Its tests by this interpreter, which has what they need, on its own source."""
    with tarfile.open(path) as sdist:
        sdist.extractall(folder, filter="data")
    (source,) = folder.glob("fused_softmax-*")
    pytest = ("env", "PYTHONPATH=src", "FUSED_SOFTMAX_INTERPRET=1", sys.executable, "-m", "pytest")
    asked = ("-m", "not gpu and not compiles and not exhaustive")
    run(*pytest, "--collect-only", "--assert=plain", *asked, cwd=source)  # nothing runs, so no assert need be rewritten
    return run(*pytest, *asked, *tests, cwd=source).splitlines()[-1]


def main():
    folder, tests = Path(sys.argv[1]).resolve(), sys.argv[2:] or READ_THE_TREE
    wheel, sdist = one(folder, "*.whl"), one(folder, "*.tar.gz")
    version = check_wheel(wheel)
    check_sdist(sdist)
    print(f"{wheel.name}, {sdist.name}: complete, and nothing twice", flush=True)
    constraints = ("--constraint", ROOT / "constraints.txt")
    with tempfile.TemporaryDirectory() as made:

        def used(package):
            place = Path(made, package.suffix[1:])
            place.mkdir()
            return smoke(place, sys.executable, version, *constraints, f"{package}[viz,cli]")

        with ThreadPoolExecutor() as pool:  # pip waits for the network and the disk
            for package, found in zip((wheel, sdist), pool.map(used, (wheel, sdist)), strict=True):
                print(f"{package.name}: {found}", flush=True)
        print(f"{sdist.name}: {check_tests(sdist, Path(made), tests)}", flush=True)


if __name__ == "__main__":
    try:
        main()
    except Failed as error:
        sys.exit(str(error))
