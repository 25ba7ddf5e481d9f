"""The page's built-in recordings. `python -m fused_softmax.trace.presets` writes presets.json anew.

They tell the story of the post that the project grew from, with the true numbers: its 3 x 8 example by every kernel,
its 2 x 8 demonstration with blocks of 2, and rows at which kernels go wrong.
"""

import json
import math
import sys
from pathlib import Path
from typing import Any

from fused_softmax.core import files
from fused_softmax.trace import asked, run
from fused_softmax.trace.entries.kernel import kernels
from fused_softmax.trace.recorder.hooks import interpreting

FILE = Path(__file__).with_name("presets.json")

Rows = tuple[tuple[float | str, ...], ...]

EXAMPLE: Rows = (
    (2.0, -1.0, 3.0, 0.5, -0.5, 1.5, -2.0, 1.0),
    (4.0, -3.0, 2.5, 1.0, -1.5, 0.0, -0.5, 2.0),
    (-1.0, 3.5, -2.5, 1.5, 0.0, -3.0, 2.5, -0.5),
)
# The post prints numbers that the kernels do not hold. In row 0 two last digits differ, because it rounds twice. In
# rows 1 and 2 the sums are two and three times the truth (1.443, 1.567), and the outputs match neither.
PRINTED_SUMS = (1.863, 3.717, 4.982)
PRINTED_OUTPUTS = (
    (0.197, 0.010, 0.537, 0.044, 0.016, 0.120, 0.004, 0.072),
    (0.546, 0.001, 0.184, 0.041, 0.003, 0.015, 0.009, 0.110),
    (0.012, 0.665, 0.003, 0.083, 0.030, 0.001, 0.203, 0.018),
)
ERRATUM = (
    " The post that this example comes from prints 3.717 and 4.982 as the sums of rows 1 and 2, with outputs that "
    "match neither those sums nor the input. The true sums are 1.443 and 1.567."
)
DEMONSTRATION = EXAMPLE[:2]  # the post gives no numbers for its 2 x 8
# A tile of -inf at the start, in the middle and at the end, as in causal or padded rows.
HIDDEN: Rows = (
    ("-inf", "-inf", 1.0, 2.0, 0.5, -1.0),
    (1.0, 2.0, "-inf", "-inf", 0.5, -1.0),
    (1.0, 2.0, 0.5, -1.0, "-inf", "-inf"),
)
EMPTY: Rows = (("-inf", "-inf", "-inf", "-inf"), (0.0, "nan", 1.0, 2.0))
# Logits like a trained model's: a few are far above the rest. Row 0's largest comes last.
PEAKED: Rows = ((-2.0, 9.5, 0.5, -1.0, 1.0, 12.0, -0.5, 14.0), (88.0, 90.0, 1.0, 0.0, -90.0, 89.0, 3.0, 2.0))
# Logits that a token is drawn from: three groups of eight columns.
LOGITS: Rows = tuple(
    tuple(round(3 * math.sin(1.7 * col + row) + (4 if col == likely else 0), 1) for col in range(24))
    for row, likely in enumerate((13, 6))
)
# Query, key and value of 12 tokens, side by side, for tiles of 4. Of query 8 and most others, each block of keys raises
# the maximum; of query 10 the last does not. A value's last number is 1, so the output's is what the weights add up to.
TOKENS: Rows = (
    (0.0, 1.0, -1.0, 1.0, 0.0, -1.0, -1.0, 1.0, 2.0, 0.0, 1.0, 1.0),
    (1.0, 2.0, 0.0, 1.0, -1.0, 1.0, -1.0, 2.0, 0.0, 3.0, 1.0, 1.0),
    (1.0, -1.0, -1.0, 1.0, 0.0, -1.0, -1.0, 1.0, 1.0, 1.0, 0.0, 1.0),
    (2.0, 2.0, 0.0, 2.0, 2.0, -1.0, -1.0, -1.0, 4.0, 0.0, 2.0, 1.0),
    (1.0, -1.0, 1.0, 2.0, 1.0, 0.0, -1.0, 2.0, 0.0, 2.0, 2.0, 1.0),
    (1.0, 0.0, -1.0, 2.0, 2.0, 1.0, 0.0, 2.0, 3.0, 1.0, 0.0, 1.0),
    (0.0, 2.0, -1.0, -1.0, 0.0, 1.0, 0.0, 0.0, 1.0, 0.0, 4.0, 1.0),
    (1.0, -1.0, 1.0, 2.0, -1.0, 1.0, 0.0, 2.0, 2.0, 2.0, 1.0, 1.0),
    (1.0, 2.0, -1.0, 0.0, 2.0, 2.0, 1.0, 0.0, 0.0, 4.0, 3.0, 1.0),
    (1.0, 0.0, 1.0, 0.0, -1.0, 1.0, 1.0, 0.0, 5.0, 1.0, 0.0, 1.0),
    (1.0, 1.0, -1.0, 1.0, 2.0, -1.0, 2.0, 0.0, 1.0, 3.0, 2.0, 1.0),
    (0.0, 1.0, 1.0, 0.0, 0.0, 2.0, -1.0, -1.0, 2.0, 0.0, 5.0, 1.0),
)
# A row that is cut into 3, 1, 0, 2, 9 and 17 numbers, for tiles of 8 and blocks of 16. Of the last, the second block
# has the maximum.
CUT: Rows = (
    (
        2.0, -1.0, 1.0, 5.0, 0.5, 1.5, 0.0, 1.0, -2.0, 3.0, 0.5, -1.0, 2.5, 1.0, -0.5, 1.0, 2.0, 0.0, -1.5, 3.0, 0.5,
        -2.0, 1.0, 4.0, -1.0, 2.5, 0.0, 1.5, -0.5, 2.0, -3.0, 1.0,
    ),
)  # fmt: skip
LATE, LATE_TITLE = frozenset({1}), "A part that comes late: split"  # its program starts when the other has ended
LATE_SUMMARY = (
    "One part of the row comes late: its program starts when the other has ended, as on a chip that has no room for "
    "it. The other looks for its message in vain, reads that part itself and its own again, and writes its results. "
    "The late one then writes its own."
)
RISING: Rows = ((0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0),)


def example_of(kernel: str) -> Rows:
    """What a kernel is recorded on if nothing else is given."""
    return {"attention": TOKENS, "segments": CUT}.get(kernel, EXAMPLE)


def asked_for() -> list[tuple[str, Rows, int, str, str]]:
    """(kernel, matrix, block, dtype, title) of each preset."""
    # Blocks of 2 where the point is a row's parts.
    blocks = dict.fromkeys(kernels(), 4) | {"stream": 2}
    worked = [
        (name, EXAMPLE, blocks[name], "float32", f"3 x 8 worked example: {name}")
        for name in kernels()
        if example_of(name) is EXAMPLE
    ]
    return [
        ("online", RISING, 2, "float32", "Every tile raises the maximum: online"),  # the page opens on it
        *worked,
        ("hybrid-tiled", DEMONSTRATION, 2, "float32", "2 x 8, blocks of 2: hybrid-tiled"),
        ("draw", LOGITS, 4, "float32", "Three groups of columns, one token: draw"),
        ("online", HIDDEN, 2, "float32", "Tiles of -inf: online"),
        ("split", EXAMPLE[:1], 4, "float32", LATE_TITLE),
        ("split", HIDDEN[:1], 2, "float32", "A part of -inf: split"),
        ("online", EMPTY, 2, "float32", "A row of only -inf, and a row with a NaN: online"),
        ("online", PEAKED, 4, "float32", "Peaked logits: online"),
        ("naive", PEAKED, 4, "bfloat16", "Peaked logits in bfloat16, rounded five times: naive"),
        ("hybrid-tiled", PEAKED, 4, "bfloat16", "Peaked logits in bfloat16, rounded once: hybrid-tiled"),
        ("segments", CUT, 4, "float32", "32 numbers in six segments: segments"),
        ("attention", TOKENS, 4, "float32", "12 tokens, causal: attention"),
    ]


def presets() -> list[dict[str, Any]]:
    """The recordings, made anew. This process must interpret."""
    recordings = [
        run.kernel(asked.asked(*call), title, LATE if title == LATE_TITLE else frozenset())
        for *call, title in asked_for()
    ]
    posted = next(each for each in recordings if each["kernel"] == "hybrid-tiled")
    posted["summary"] += ERRATUM
    next(each for each in recordings if each["title"] == LATE_TITLE)["summary"] = LATE_SUMMARY
    return recordings


def text(recordings: list[dict[str, Any]]) -> str:
    """The text of presets.json: one recording a line."""
    lines = [json.dumps(recording, separators=(",", ":"), allow_nan=False) for recording in recordings]
    return "[\n" + ",\n".join(lines) + "\n]\n"


def load() -> list[dict[str, Any]]:
    """The recordings of presets.json."""
    return json.loads(FILE.read_text(encoding="utf-8"))


if __name__ == "__main__":
    if not interpreting():
        sys.exit("set TRITON_INTERPRET=1: this process records the presets itself")
    files.write_whole(FILE, text(presets()))
    print(f"{FILE.name}: {FILE.stat().st_size} bytes")
