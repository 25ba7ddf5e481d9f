"""Lists of calls take so many kernels, and no more: what a server or a first cell waits for."""

import json
import os
import subprocess
import sys
from pathlib import Path

EXPECTED = {
    "softmax, batches": 5,  # plans, from few rows to many
    "softmax, vocabularies": 2,  # by their number of pieces
    "softmax, both passes": 2,
    "softmax over dim 1": 1,
    "loss": 4,
    "loss, numbers of rows": 7,  # up to 4096 each program counts the targets; three kernels are small
    "loss, smoothed": 4,
    "loss, vocabularies": 5,
    "log_prob, numbers of rows": 2,  # parts, and what merges them
    "log_prob, both passes": 3,
    "log_prob, lists": 3,
    "divergence, numbers of rows": 2,
    "divergence, both passes": 2,  # the divergences with their gradient, and what multiplies it
    "divergence, of two passes": 2,
    "T, batches": 1,
    "top-k, batches": 2,
    "route, batches": 1,
    "route, both passes": 2,
    "segments, numbers of elements": 4,  # three numbers of segments of a program, and the second launch
    "segments, both passes": 4,
    "attention, lengths": 2,
    "attention, both passes": 5,
    "decode, contexts": 6,
}


def test_lists_of_calls_take_so_many_kernels():
    script = Path(__file__).with_name("kernel_counts.py")
    environment = {name: value for name, value in os.environ.items() if "INTERPRET" not in name}
    done = subprocess.run([sys.executable, str(script)], env=environment, capture_output=True, text=True, check=True)
    assert json.loads(done.stdout) == EXPECTED
