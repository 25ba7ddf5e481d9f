"""Plans as they were committed, so that a change of any shape's plan shows, and is meant.

`python tests/test_plan_kept.py` writes tests/data/plans.json anew.
"""

import hashlib
import json
from pathlib import Path

from fused_softmax.core.plan import H200, Device, plan_loss, plan_reduction, plan_rows, row_rung_ends
from fused_softmax.ops.softmax.column_plan import plan_columns

FILE = Path(__file__).parent / "data" / "plans.json"
ITEMSIZES = {"float32": 4, "float16": 2, "bfloat16": 2, "float64": 8}
UNMEASURED = Device("NVIDIA B200", "cuda", (10, 0), 148, l2_bytes=126 * 2**20)


def shapes() -> list[tuple[int, int]]:
    """200 shapes: the neighbours of the planner's edges, odd widths and long rows, from one row to a million."""
    ends = sorted({end for inputs in (1, 2) for size in (2, 4, 8) for end in row_rung_ends(size, H200, inputs)})
    ends = [end for end in ends if (end <= 1024 and end % 128 == 0) or end > 1024]
    widths = sorted({end + step for end in ends for step in (0, 1, 8)} | {1, 7, 33, 99, 781, 50257, 100003, 128256})
    rows = (4096, 1, 133, 2**20, 64, 1056, 3)
    return [(rows[(3 * i + turn) % 7], n_cols) for turn in range(3) for i, n_cols in enumerate(widths)][:200]


def plans(n_rows: int, n_cols: int, itemsize: int) -> dict[str, list[object]]:
    """Forward: softmax, causal, logsumexp, over a strided dim. Backward: their gradients, and losses with theirs."""
    found: dict[str, list[object]] = {"forward": [], "backward": []}
    for device in (H200, UNMEASURED):
        columns = n_rows % 64 + 1, n_cols, n_rows % 1000 + 1, itemsize, device
        for alignment in ("even", "shifted", "scalar"):
            asked = {"n_rows": n_rows, "n_cols": n_cols, "itemsize": itemsize, "device": device, "alignment": alignment}
            found["forward"] += [plan_rows(**asked), plan_rows(**asked, causal=True), plan_reduction(**asked)]
            found["backward"] += [plan_rows(**asked, inputs=2), plan_loss(**asked)]
            found["backward"] += [
                plan_reduction(**asked, writes=True),
                plan_reduction(**asked, writes=True, capped=True),
            ]
        found["forward"] += [plan_columns(*columns), plan_columns(*columns, holds=False)]
        found["backward"].append(plan_columns(*columns, inputs=2))
    return found


def digests(of: list[tuple[int, int]]) -> dict[str, dict[str, str]]:
    """By dtype and direction, then by shape, eight characters of a hash of the plans as text."""
    found: dict[str, dict[str, str]] = {}
    for dtype, itemsize in ITEMSIZES.items():
        for n_rows, n_cols in of:
            for direction, decided in plans(n_rows, n_cols, itemsize).items():
                digest = hashlib.sha256("\n".join(map(repr, decided)).encode()).hexdigest()[:8]
                found.setdefault(f"{dtype} {direction}", {})[f"{n_rows} x {n_cols}"] = digest
    return found


def test_plans_are_those_that_were_committed():
    kept = json.loads(FILE.read_text())
    asked = [tuple(map(int, shape.split(" x "))) for shape in kept["float32 forward"]]
    assert len(asked) == 200
    found = digests(asked)
    assert found.keys() == kept.keys()
    changed = {kind: [shape for shape in kept[kind] if found[kind][shape] != kept[kind][shape]] for kind in kept}
    assert not any(changed.values()), {kind: shapes for kind, shapes in changed.items() if shapes}


if __name__ == "__main__":
    FILE.parent.mkdir(exist_ok=True)
    FILE.write_text(json.dumps(digests(shapes()), indent=0) + "\n")
