"""A first look at the wheel under each Python and each torch supported: `python tests/smoke_matrix.py dist`.

Interpreters are those on PATH, pyenv's and uv's; uv is asked to download others, where a network lets it. With
`--seconds`, no cell begins later than that. It prints a line a cell, and exits with 1 if one failed. Cells that were
not reached, and interpreters that were not found, are named and are no failure.
"""

import argparse
import itertools
import os
import re
import shutil
import sys
import tempfile
import time
from pathlib import Path

from fresh import Failed, run, smoke

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
OLDEST_TORCH = (2, 11)
BESIDE = {"2.11": ["numpy<2.4"]}  # its Triton is 3.6, whose interpreter converts arrays as NumPy 2.4 does not


def version_of(python):
    """An interpreter's version, "3.12"; None if it does not run."""
    try:
        return run(python, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])", timeout=30)
    except (Failed, OSError):
        return None


def interpreters(folder):
    """The interpreter of each version, or a sentence that says why there is none."""
    found = {version_of(sys.executable): sys.executable}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in PYTHONS:
        candidates = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))]
        for python in candidates:
            if python and version not in found and version_of(python) == version:
                found[version] = str(python)
    missing = [version for version in PYTHONS if version not in found]
    return found | (by_uv(missing, folder) if missing else {})


def by_uv(versions, folder):
    """The same of uv's interpreters, downloaded into `folder` where it can; uv itself comes from the package index."""
    try:
        run(sys.executable, "-m", "venv", folder / "uv")
        run(folder / "uv/bin/python", "-m", "pip", "install", "--quiet", "uv", timeout=300)
    except Failed as error:
        return dict.fromkeys(versions, f"not found, and uv could not be installed: {last_line(error)}")
    found, uv = {}, folder / "uv/bin/uv"
    for version in versions:
        try:
            run(uv, "python", "install", "--install-dir", folder / "pythons", version, timeout=300)
            (found[version],) = sorted((folder / "pythons").glob(f"cpython-{version}.*/bin/python3"))[-1:]
        except Failed as error:
            found[version] = f"not found, and uv could not download it: {last_line(error)}"
        except ValueError:
            found[version] = "not found, nor where uv put its download"
    return found


def last_line(error):
    return str(error).strip().splitlines()[-1].strip()


def torches(python):
    """The versions of torch that pip offers an interpreter, the last of each minor version, newest first."""
    try:
        said = run(python, "-m", "pip", "index", "versions", "torch", timeout=120)
    except Failed:
        return []
    listed = re.search(r"Available versions: (.*)", said)
    last = {}
    for version in listed[1].split(", ") if listed else ():
        minor = tuple(int(part) for part in version.split(".")[:2])
        if minor >= OLDEST_TORCH:
            last.setdefault(minor, version)
    return [last[minor] for minor in sorted(last, reverse=True)]


def cells(found):
    """Pairs of a Python and a torch: the newest torch of each first, then the oldest, then what lies between."""
    columns = []
    for version, python in found.items():
        newest, *others = torches(python) or [None]
        ranked = [newest, *others[-1:], *others[:-1]]
        columns.append([(version, torch) for torch in ranked])
    rows = itertools.zip_longest(*columns)
    return [cell for row in rows for cell in row if cell is not None]


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dist", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="no cell begins later")
    parser.add_argument("--python", action="append", choices=PYTHONS, help="only this one; may be given again")
    parser.add_argument("--torch", action="append", metavar="MINOR", help="only this one, such as 2.13")
    asked = parser.parse_args()
    (wheel,) = asked.dist.resolve().glob("*.whl")
    version = wheel.name.split("-")[1]
    began, failed, skipped = time.monotonic(), 0, []
    with tempfile.TemporaryDirectory() as made:
        found = {}
        for python, path in sorted(interpreters(Path(made)).items()):
            if asked.python and python not in asked.python:
                continue
            if os.path.exists(path):
                found[python] = path
            else:
                print(f"Python {python}: {path}", flush=True)
        for python, torch in cells(found):
            if torch is None:
                print(f"Python {python}: pip offers it no torch from {'.'.join(map(str, OLDEST_TORCH))} on", flush=True)
                continue
            if asked.torch and ".".join(torch.split(".")[:2]) not in asked.torch:
                continue
            name = f"Python {python}, torch {torch}"
            if time.monotonic() - began > asked.seconds:
                skipped.append(name)
                continue
            place = Path(tempfile.mkdtemp(dir=made))
            wanted = [f"torch=={torch}", f"{wheel}[viz]", *BESIDE.get(".".join(torch.split(".")[:2]), ())]
            try:
                print(f"{name}: {smoke(place, found[python], version, *wanted)}", flush=True)
            except Failed as error:
                failed += 1
                print(f"{name}: failed\n{error}", flush=True)
            shutil.rmtree(place)  # torch and its libraries take gigabytes
    if skipped:
        print(f"not reached within {asked.seconds:.0f} s: {'; '.join(skipped)}")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main()
