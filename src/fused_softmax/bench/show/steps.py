"""Steps of training as tables and in words, which the terminal and pages show. Standard library only."""

from collections.abc import Sequence

from fused_softmax.bench.cases import Case
from fused_softmax.bench.catalog import COMPILED, OWN, STEPS, TORCH
from fused_softmax.bench.results.record import Point, Run

HEADS = ["step", "provider", "ms a step", "GiB at most", "error of the loss", "allowed"]
ABOUT = (
    "Steps of training: a forward and a backward pass, without an optimizer. The time is wall time, until the GPU is "
    "idle. GiB are the most that a step allocated beside the weights, the gradients included"
)
OF_ERRORS = "Errors are shares of the loss in float32"
# Providers as the columns of a table, this package's first.
TITLES = {
    OWN: "this package", "beside Liger": "with Liger's norms, rotary embeddings and MLPs",
    "own compiled": "under torch.compile", "32 in place": "in chunks of 32 tokens, summed in place", TORCH: "torch",
    COMPILED: "torch.compile", "liger": "Liger", "trl": "TRL",
}  # fmt: skip


def steps_of(run: Run) -> list[Point]:
    return [point for point in run.points if point.operation in STEPS]


def rows(points: Sequence[Point]) -> list[list[str]]:
    """Of `HEADS`."""
    return [
        [
            str(point.case),
            point.provider,
            point.status if point.call is None else f"{point.call.p50_us * 1e-3:.1f}",
            "" if point.memory_bytes is None else f"{point.memory_bytes / 2**30:.2f}",
            *("" if each is None else f"{each:.1e}" for each in (point.error, point.error_allowed)),
        ]
        for point in points
    ]


def compared(points: Sequence[Point]) -> list[list[str]]:
    """Heads, and a row for each step: each provider's time and memory."""
    by_case: dict[Case, dict[str, Point]] = {}
    for point in points:
        if point.call is not None:
            by_case.setdefault(point.case, {})[point.provider] = point
    there = {name for found in by_case.values() for name in found}
    names = [*(name for name in TITLES if name in there), *sorted(there - TITLES.keys())]
    found = [["step, batch x length x classes", *(TITLES.get(name, name) for name in names)]]
    for case, of in by_case.items():
        found.append([f"{STEPS[case.operation].title}, {case.size}", *(_figures(of.get(name)) for name in names)])
    return found


def _figures(point: Point | None) -> str:
    if point is None or point.call is None:
        return ""
    memory = "" if point.memory_bytes is None else f", {point.memory_bytes / 2**30:.1f} GiB"
    return f"{point.call.p50_us * 1e-3:.0f} ms{memory}"
