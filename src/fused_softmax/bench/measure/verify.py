"""Checks without a GPU: runs the measured operations' kernels under Triton's interpreter and compares with float64.

For softmax it runs every strategy of ours and the classics, for other operations what our call launches for the
operation's sample, each if its provider is asked for. A process either interprets kernels or compiles them, so the
checks run in a process of their own, which prints one JSON line for each kernel.
"""

import json
import os
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Literal, get_args

from fused_softmax.bench.cases import Case
from fused_softmax.bench.catalog import CLASSICS, OWN
from fused_softmax.bench.entries.makers import forced
from fused_softmax.bench.entries.operations import OPERATIONS
from fused_softmax.bench.measure import check
from fused_softmax.bench.results.record import Check, one_line
from fused_softmax.core.files import TEXT
from fused_softmax.core.plan import Strategy

SWITCH = "FUSED_SOFTMAX_INTERPRET"
STRATEGIES: tuple[Strategy, ...] = get_args(Strategy)


def interpreting() -> bool:
    return os.environ.get(SWITCH) == "1"


def verify(operations: Sequence[str] = ("softmax",), names: Sequence[str] = (), seconds: float = 60) -> Iterator[Check]:
    """The checks of `kernels` as they finish. Checks that were not reached in time are "not run"."""
    if not (left := kernels(operations, names)):
        return
    here = str(Path(__file__).parents[3])
    paths = os.pathsep.join(filter(None, (here, os.environ.get("PYTHONPATH"))))
    command = [sys.executable, "-m", "fused_softmax.bench.measure.verify", *left]
    environment = os.environ | {SWITCH: "1", "PYTHONPATH": paths}
    with (
        tempfile.TemporaryFile("w+", **TEXT) as said,
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=said, **TEXT) as child,
    ):
        timer = threading.Timer(seconds, child.kill)
        timer.start()
        try:
            assert child.stdout
            for line in filter(complete, child.stdout):
                done = Check(**json.loads(line))
                left.pop(done.kernel, None)
                yield done
        finally:
            timer.cancel()
            child.kill()
        said.seek(0)
        last = (said.read().strip().splitlines() or [""])[-1]
    why = f"not reached in {seconds:.0f} s" if child.returncode < 0 else last
    for kernel, operation in left.items():
        status: Literal["not run", "failed"] = "not run" if child.returncode < 0 else "failed"
        yield replace(unchecked(kernel, OPERATIONS[operation].sample), status=status, message=one_line(why))


def complete(line: str) -> bool:
    """Whether a line is whole: a killed process can leave half a line."""
    return line.endswith("\n")


def kernels(operations: Sequence[str] = ("softmax",), names: Sequence[str] = ()) -> dict[str, str]:
    """The kernels of the named providers that are checked, each with its operation. names: none for all providers."""
    own = OWN in names or not names
    classics = [name for name in CLASSICS if name in names or not names]
    of_softmax = dict.fromkeys((*(STRATEGIES if own else ()), *classics), "softmax")
    others = {name: name for name in operations if name != "softmax" and own}
    return (of_softmax if "softmax" in operations else {}) | others


def unchecked(kernel: str, case: Case) -> Check:
    return Check(kernel, case.n_rows, case.n_cols, case.dtype, "not run")


def check_kernel(kernel: str, case: Case | None = None) -> Check:
    """Check one kernel in this process, which must interpret. case: by default the operation's sample."""
    operation = OPERATIONS.get(kernel, OPERATIONS["softmax"])
    case = case or replace(operation.sample, operation=kernel if kernel in OPERATIONS else "softmax")
    result = unchecked(kernel, case)
    inputs = check.inputs(case, 1, "cpu", seed=0)[0]
    try:
        if kernel in STRATEGIES:
            call = forced(kernel, inputs[0])
        else:
            call = operation.providers[kernel if kernel in CLASSICS else OWN](case)
        judge = check.judge_of(case, inputs)
        wrong, found = check.verdict(judge, call, own=kernel not in CLASSICS)
    except Exception as error:
        return replace(result, status="failed", message=one_line(error))
    return replace(result, status="wrong" if wrong else "ok", error=found.largest if found else None, message=wrong)


if __name__ == "__main__":
    for kernel in sys.argv[1:]:
        print(json.dumps(asdict(check_kernel(kernel))), flush=True)
