"""Without a GPU: every strategy and every classic kernel under Triton's interpreter, compared with float64.

A process either interprets kernels or compiles them, so this runs as its own, one JSON line for each kernel.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import asdict, replace
from pathlib import Path

import torch

from fused_softmax.bench.record import Check, one_line
from fused_softmax.plan import Strategy

SWITCH = "FUSED_SOFTMAX_INTERPRET"
# The tutorial's irregular 1823 x 781, with as many of its rows as the interpreter does in seconds.
SHAPE = (61, 781)
STRATEGIES: tuple[Strategy, ...] = ("tile", "row", "split", "stream")
CLASSIC = ("naive", "persistent", "hybrid", "online")


def interpreting() -> bool:
    return os.environ.get(SWITCH) == "1"


def verify(seconds: float = 60) -> Iterator[Check]:
    """The checks as they come; those not reached in time are "not run"."""
    here = str(Path(__file__).parents[2])
    paths = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "fused_softmax.bench.verify"]
    environment = os.environ | {SWITCH: "1", "PYTHONPATH": paths}
    left = dict.fromkeys(kernels())
    with (
        tempfile.TemporaryFile("w+") as said,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=said, text=True) as child,
    ):
        timer = threading.Timer(seconds, child.kill)
        timer.start()
        try:
            assert child.stdout
            for line in filter(complete, child.stdout):
                check = Check(**json.loads(line))
                left.pop(check.kernel, None)
                yield check
        finally:
            timer.cancel()
            child.kill()
        said.seek(0)
        last = (said.read().strip().splitlines() or [""])[-1]
    why = f"not reached in {seconds:.0f} s" if child.returncode < 0 else last
    for kernel in left:
        yield Check(kernel, *SHAPE, "float32", "not run" if child.returncode < 0 else "failed", message=one_line(why))


def complete(line: str) -> bool:
    """A killed process can leave half a line."""
    return line.endswith("\n")


def kernels() -> list[str]:
    return [*STRATEGIES, *CLASSIC]


def check_kernel(kernel: str) -> Check:
    """One kernel in this process, which must be interpreting."""
    from fused_softmax.bench import check
    from fused_softmax.bench.cases import Case
    from fused_softmax.bench.providers import PROVIDERS, forced

    result = Check(kernel, *SHAPE, "float32", "ok")
    x = check.inputs(Case(*SHAPE), 1, "cpu", seed=0)[0]
    try:
        softmax: Callable = forced(kernel, x) if kernel in STRATEGIES else PROVIDERS[kernel]()
        limits = check.allowed(check.errors(torch.softmax(x, dim=-1), x), x.dtype, kernel in STRATEGIES)
        wrong, found = check.complaint(check.poisoned(softmax, x), x, limits)
    except Exception as error:
        return replace(result, status="failed", message=one_line(error))
    return replace(result, status="wrong" if wrong else "ok", error=found.largest if found else None, message=wrong)


if __name__ == "__main__":
    for kernel in kernels():
        print(json.dumps(asdict(check_kernel(kernel))), flush=True)
