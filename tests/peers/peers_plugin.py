"""What run.py adds to pytest: one case in so many, a line of JSON for each result, and no process whose CUDA is lost.

PEERS_SHARE is that number; PEERS_LINES is the file that the lines are appended to.
"""

import gc
import json
import os
import random
import re
import sys
import zlib

import pytest

WORKER = os.environ.get("PYTEST_XDIST_WORKER")
LOST = re.compile("CUDA.*(device-side assert|illegal memory access|launch failure|misaligned address)", re.DOTALL)
lost = False

# Where a suite seeds its parameters by the clock, all workers must still collect the same cases.
_seed = random.seed
random.seed = lambda *_: _seed(0)


def write(**line):
    with open(os.environ["PEERS_LINES"], "a") as file:
        file.write(json.dumps(line) + "\n")


@pytest.hookimpl(trylast=True)  # after -k has taken out what it does not ask for
def pytest_collection_modifyitems(config, items):
    collected, share = len(items), int(os.environ["PEERS_SHARE"])
    chosen = [item for item in items if zlib.crc32(item.nodeid.encode()) % share == 0]
    config.hook.pytest_deselected(items=list(set(items).difference(chosen)))
    items[:] = chosen
    if WORKER == "gw0":
        write(collected=collected, chosen=len(chosen))


@pytest.hookimpl(trylast=True)
def pytest_runtest_teardown():
    torch = sys.modules.get("torch")
    if torch and torch.cuda.is_available() and not lost:  # several workers share the GPU's memory
        gc.collect()
        torch.cuda.empty_cache()


def pytest_runtest_logreport(report):
    global lost
    text = report.longreprtext if report.failed else ""
    lost = lost or bool(LOST.search(text))
    if WORKER is None and (report.when == "call" or not report.passed):
        write(id=report.nodeid, outcome=report.outcome, last=last_line(text))


def pytest_collectreport(report):
    if WORKER is None and report.failed:
        write(id=report.nodeid, outcome="failed", last=last_line(report.longreprtext))


@pytest.hookimpl(trylast=True)  # when the result has been sent
def pytest_runtest_logfinish():
    if lost and WORKER:
        os._exit(3)  # no CUDA call of this process will work: pytest-xdist starts another worker


def last_line(text):
    """The last line of an error's message, which pytest marks by E, or of the text."""
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    errors = [line[2:].strip() for line in lines if line.startswith("E ")]
    return (errors or lines or [""])[-1][:300]
