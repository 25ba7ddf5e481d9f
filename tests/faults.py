"""Whether the suite notices faults: each is put into a copy of the source, one at a time, and tests run there.

The nearest tests run first; with --whole the rest of the quick suite follows where they pass. Not part of `make test`.

    python tests/faults.py --list
    python tests/faults.py --only stale-tag --only z-loss-left-out
    python tests/faults.py --clean      # the nearest tests of the unchanged source, which have to pass
"""

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from queue import SimpleQueue

from fault import FAULTS, Fault

ROOT = Path(__file__).parents[1]
SOURCE = Path("src", "fused_softmax")
# As CI has them.
INTERPRETED = "not gpu and not compiles and not exhaustive"
COMPILED = "compiles and not gpu and not exhaustive"
PASSED, NOTHING_RAN = 0, (2, 4, 5)  # pytest's exit codes
SECONDS = 1200  # of one run of tests; a fault that hangs is noticed too


def faulty(fault: Fault, source: str) -> str:
    """The source with the fault. ValueError where the old text is not found exactly once, or is the new one."""
    found = source.count(fault.old)
    if found != 1 or fault.old == fault.new:
        raise ValueError(f"{fault.name}: {fault.file} has the old text {found} times, and a fault changes one place")
    return source.replace(fault.old, fault.new)


def copy_tree(to: Path) -> None:
    """src and tests as copies; all else that tests read as links."""
    to.mkdir()
    for each in ROOT.iterdir():
        if each.name in ("src", "tests"):
            shutil.copytree(each, to / each.name, ignore=shutil.ignore_patterns("__pycache__"))
        elif not each.name.startswith("."):
            (to / each.name).symlink_to(each)


def run_tests(tree: Path, arguments: list[str], compiles: bool) -> tuple[int | None, str]:
    """(pytest's exit code, or None where it took too long; the first test that failed, or the last words)."""
    # A file that changes twice within a second would leave bytecode of the fault before it.
    environment = os.environ | {"PYTHONPATH": str(tree / "src"), "PYTHONDONTWRITEBYTECODE": "1", "OMP_NUM_THREADS": "1"}
    environment.pop("FUSED_SOFTMAX_INTERPRET", None)
    if not compiles:
        environment["FUSED_SOFTMAX_INTERPRET"] = "1"
    options = ["-x", "-q", "-rfE", "-p", "no:cacheprovider", "-m", COMPILED if compiles else INTERPRETED]
    command = [sys.executable, "-m", "pytest", *options, *arguments]
    try:
        done = subprocess.run(command, cwd=tree, env=environment, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return None, f"more than {SECONDS} s"
    failed = re.search(r"^(?:FAILED|ERROR) (tests/.+?)(?: - |$)", done.stdout, re.MULTILINE)
    words = (done.stdout + done.stderr).strip().splitlines()
    return done.returncode, failed[1] if failed else words[-1] if words else "no output"


def judge(fault: Fault, tree: Path, clean: bool, whole: bool) -> tuple[str, str]:
    """(what became of a fault, which test says so)."""
    file = tree / SOURCE / fault.file
    source = file.read_text()
    try:
        if not clean:
            file.write_text(faulty(fault, source))
        runs = [([f"tests/{test}" for test in fault.nearest], fault.compiles)]
        if whole:
            runs += [(["tests"], False), (["tests"], True)]
        for arguments, compiles in runs:
            code, said = run_tests(tree, arguments, compiles)
            if code in NOTHING_RAN:  # nothing ran: of the tests' names, or of a source that cannot be imported
                return "ERROR", said
            if code != PASSED:  # a crash and a hang are noticed as a failure is
                return "FAILS" if clean else "caught", said
        return ("passes", "") if clean else ("NOT CAUGHT", "")
    finally:
        file.write_text(source)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", action="append", metavar="NAME", help="a fault or a layer; may be given again")
    parser.add_argument("--list", action="store_true", help="name the faults and run nothing")
    parser.add_argument("--clean", action="store_true", help="run the nearest tests of the unchanged source")
    parser.add_argument("--whole", action="store_true", help="run the rest of the quick suite where they pass")
    parser.add_argument("--jobs", type=int, default=1, help="faults at a time, each in a copy of its own")
    given = parser.parse_args()
    names = {name for each in FAULTS for name in (each.name, each.layer)}
    if unknown := set(given.only or ()) - names:
        parser.error(f"no fault and no layer: {', '.join(sorted(unknown))}")
    chosen = [each for each in FAULTS if not given.only or {each.name, each.layer} & set(given.only)]
    for each in chosen:
        faulty(each, (ROOT / SOURCE / each.file).read_text())
    if given.list:
        for each in chosen:
            print(f"{each.layer:10}{each.name:44}{each.file}")
        return 0

    with tempfile.TemporaryDirectory() as folder:
        trees: SimpleQueue[Path] = SimpleQueue()
        for i in range(given.jobs):
            copy_tree(Path(folder, str(i)))
            trees.put(Path(folder, str(i)))

        def work(fault: Fault) -> str:
            tree, start = trees.get(), time.perf_counter()
            found, said = judge(fault, tree, given.clean, given.whole)
            trees.put(tree)
            print(f"{found:11}{fault.layer:10}{fault.name:44}{time.perf_counter() - start:6.1f} s  {said}", flush=True)
            return found

        with ThreadPoolExecutor(given.jobs) as pool:
            found = list(pool.map(work, chosen))
    good = found.count("passes" if given.clean else "caught")
    print(f"{good} of {len(found)} {'pass' if given.clean else 'caught'}")
    return int(good < len(found))


if __name__ == "__main__":
    sys.exit(main())
