"""A first look at the wheel under each Python and each torch supported: `python tests/smoke_matrix.py dist`.

Each Python first installs the command alone, without torch, which takes seconds. Then come pairs of a Python and a
torch: the newest of both, the oldest of both, and all others.

Interpreters are those on PATH, pyenv's and uv's; uv is asked to download others, where a network lets it. With
`--seconds` all ends by then: uv is not asked, and no pair begins if the one before took longer than what is left. A
line is printed for each, and the exit code is 1 if one failed. Pairs that were not reached, and interpreters that were
not found, are named and are no failure.
"""

import argparse
import json
import os
import re
import shutil
import sys
import tempfile
import time
from functools import cache
from pathlib import Path

from fresh import Failed, TooLate, environment, install, run, smoke

PYTHONS = ("3.11", "3.12", "3.13", "3.14")
OLDEST_TORCH = (2, 11)


def version_of(python):
    """An interpreter's version, "3.12"; None if it does not run."""
    try:
        return run(python, "-c", "import sys, venv; print('%d.%d' % sys.version_info[:2])", timeout=30)
    except (Failed, OSError):
        return None


def interpreters():
    """The interpreter of each version that is on this machine."""
    found = {version_of(sys.executable): sys.executable}
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    for version in PYTHONS:
        candidates = [shutil.which(f"python{version}"), *sorted(pyenv.glob(f"{version}.*/bin/python"))]
        for python in candidates:
            if python and version not in found and version_of(python) == version:
                found[version] = str(python)
    return {version: found[version] for version in PYTHONS if version in found}


def by_uv(versions, folder):
    """uv's interpreters, downloaded into `folder`, or sentences that say why there are none. pip installs uv."""
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
        # Where pip's configuration names a constraint, the newest is not the newest listed.
        wanted = ("install", "--dry-run", "--quiet", "--ignore-installed", "--no-deps", "--report", "-", "torch")
        newest = json.loads(run(python, "-m", "pip", *wanted, timeout=120, errors=False))
    except Failed:
        return []
    newest = newest["install"][0]["metadata"]["version"]
    listed = re.search(r"Available versions: (.*)", said)[1].split(", ")
    last = {}
    for version in listed[listed.index(newest) :]:
        minor = tuple(int(part) for part in version.split(".")[:2])
        if minor >= OLDEST_TORCH:
            last.setdefault(minor, version)
    return [last[minor] for minor in sorted(last, reverse=True)]


def pairs(found):
    """Pairs of a Python and a torch, the corners first. What pip offers a Python is asked when its turn comes."""
    offered = cache(lambda version: torches(found[version]))
    versions = list(found)
    newest = [(versions[-1], torch) for torch in offered(versions[-1])[:1]]
    yield from newest
    oldest = [(versions[0], torch) for torch in offered(versions[0])[-1:]]
    yield from (pair for pair in oldest if pair not in newest)
    for version in reversed(versions):
        yield from (pair for torch in offered(version) if (pair := (version, torch)) not in newest + oldest)


def command_alone(place, python, version, wheel, timeout):
    """Without torch: every file compiles without a warning, and the command helps and knows its version."""
    python = environment(place, python)
    install(python, "click", "rich", timeout=timeout)
    install(python, "--no-deps", wheel, timeout=timeout)
    (package,) = place.glob("venv/lib/*/site-packages/fused_softmax")
    run(python, "-W", "error", "-m", "compileall", "-q", "-f", package, timeout=timeout)
    for arguments in (["--help"], ["bench", "--list"]):
        run(python, "-W", "error", "-m", "fused_softmax", *arguments, cwd=place, timeout=timeout)
    said = run(python, "-m", "fused_softmax", "--version", cwd=place, timeout=timeout)
    if version not in said:
        raise Failed(f"--version prints {said!r}, and the wheel is {version}")
    return "the command alone"


class Tries:
    """What is tried within the time, and how often it failed."""

    def __init__(self, seconds, folder):
        self.ends, self.folder, self.failed, self.longest = time.monotonic() + seconds, folder, 0, 0.0

    def left(self):
        return self.ends - time.monotonic()

    def attempt(self, name, look, *arguments):
        """Print what `look` says in a new folder, if there is as much time left as the longest took. False if not."""
        began, left = time.monotonic(), self.left()
        if left <= self.longest:
            return False
        place = Path(tempfile.mkdtemp(dir=self.folder))
        try:
            print(f"{name}: {look(place, *arguments, timeout=None if left == float('inf') else left)}", flush=True)
            self.longest = max(self.longest, time.monotonic() - began)
        except TooLate:
            return False
        except Failed as error:
            self.failed += 1
            print(f"{name}: failed\n{error}", flush=True)
        finally:
            shutil.rmtree(place)  # torch and its libraries take gigabytes
        return True


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("dist", type=Path)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="all ends by then")
    parser.add_argument("--python", action="append", choices=PYTHONS, help="only this one; may be given again")
    parser.add_argument("--torch", action="append", metavar="MINOR", help="only this one, such as 2.13")
    asked = parser.parse_args()
    (wheel,) = asked.dist.resolve().glob("*.whl")
    version = wheel.name.split("-")[1]
    with tempfile.TemporaryDirectory() as made:
        tries = Tries(asked.seconds, made)
        found = interpreters()
        missing = [each for each in PYTHONS if each not in found and each in (asked.python or PYTHONS)]
        reasons = by_uv(missing, Path(made)) if missing and asked.seconds == float("inf") else {}
        for each in missing:
            if os.path.exists(reasons.get(each, "")):
                found[each] = reasons[each]
            else:
                print(f"Python {each}: {reasons.get(each, 'not found')}", flush=True)
        found = {each: found[each] for each in PYTHONS if each in found and each in (asked.python or PYTHONS)}
        for python, path in found.items():
            if not tries.attempt(f"Python {python}", command_alone, path, version, wheel):
                print(f"Python {python}: not reached within {asked.seconds:.0f} s", flush=True)
        for python, torch in pairs(found) if found and tries.left() > 0 else ():
            if asked.torch and ".".join(torch.split(".")[:2]) not in asked.torch:
                continue
            name = f"Python {python}, torch {torch}"
            if not tries.attempt(name, smoke, found[python], version, f"torch=={torch}", f"{wheel}[viz]"):
                print(f"{name}, and what comes after it: not reached within {asked.seconds:.0f} s", flush=True)
                break
    sys.exit(tries.failed > 0)


if __name__ == "__main__":
    main()
