"""Steps of training as tables and in words, which the terminal and pages show. Standard library only."""

from collections.abc import Sequence

from fused_softmax.bench.catalog import OWN, STEPS
from fused_softmax.bench.results.record import Point, Run

HEADS = ["step", "provider", "ms a step", "GiB at most", "error of the loss", "allowed"]
ABOUT = (
    "Steps of training: a forward and a backward pass, without an optimizer. The time is wall time, until the GPU is "
    "idle. GiB are the most that a step allocated beside the weights, the gradients included"
)
OF_ERRORS = "Errors are shares of the loss in float32"
OF_TEXT = {
    OWN: "this package", "trl": "TRL", "liger": "Liger", "own compiled": "this package under torch.compile",
    "32 in place": "this package in chunks of 32 tokens, summed in place",
    "beside Liger": "this package with Liger's norms, rotary embeddings and MLPs",
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


def sentence(points: Sequence[Point]) -> str:
    """Times and memory of a case's steps, in words."""
    batch, length, classes = points[0].case.shape
    said = [
        f"{OF_TEXT.get(point.provider, point.provider)} {_figures(point)}" for point in points if point.call is not None
    ]
    return f"{STEPS[points[0].operation].title} on {batch} x {length} tokens and {classes} classes takes: " + (
        "; ".join(said)
    )


def _figures(point: Point) -> str:
    assert point.call
    memory = "" if point.memory_bytes is None else f" and {point.memory_bytes / 2**30:.1f} GiB"
    return f"{point.call.p50_us * 1e-3:.0f} ms{memory}"
