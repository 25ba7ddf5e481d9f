"""Which cases are measured: the named sweeps, the tutorial's among them, and the cases that options ask for."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace

from fused_softmax.bench.cases import ITEMSIZE, Case, parse_shapes, unique
from fused_softmax.bench.catalog import DIVERGENCES
from fused_softmax.bench.entries.attention_kinds import KINDS
from fused_softmax.bench.entries.filters import FILTERS
from fused_softmax.bench.entries.segment_kinds import KINDS as SEGMENTS
from fused_softmax.core.plan import H200, VECTOR_BYTES, reduction_rung_ends, row_rung_ends

TUTORIAL, CUSTOM = "tutorial", "custom"
TUTORIAL_COLS = tuple(128 * i for i in range(2, 100))
ELEMENTS = 128 * 2**20
WIDTHS = (
    128, 256, 781, 1024, 1152, 4096, 8192, 12672, 16384, 20000, 32000, 32768, 50257, 65536, 100003, 128256, 131072,
    151936, 262144, 524288, 1048576,
)  # fmt: skip
VOCABULARIES = (32000, 50257, 128256, 151936, 262144)  # Llama 2, GPT-2, Llama 3, Qwen, Gemma 3
STRIDED = "64x4096x512:1,4096x32768:0,32x1024x32x64:1"
LONG_ROWS = "32768x4096,4096x32768,2670x50257,1024x131072,128x1048576,1x1048576"
FEW_ROWS = "1x32768,1x131072,8x32000,32x128256,132x32768"
FEWEST_ROWS = f"64x1024,{FEW_ROWS},1x1048576,16x8388608,1x8388608,1x67108864"
BOTH = ("float32", "bfloat16")
EDGES = 114615892  # of Reddit's graph
# Skipped for inputs as wide as the result: nothing is widened.
WIDENING = "softmax_float32"


@dataclass(frozen=True)
class Sweep:
    """For every operation: every pair of rows and cols, then `shapes`. Without rows, as many rows as hold `ELEMENTS`.

    dtypes: for each operation. cols: the same for all, or a function of operation and dtype. shapes: the same for all,
        or of each operation, and of its gradient.
    ndim: how many dims its operations take, along the last one. None: any number, along any dim.
    """

    about: str
    dtypes: Mapping[str, tuple[str, ...]]
    rows: tuple[int, ...] = ()
    cols: tuple[int, ...] | Callable[[str, str], tuple[int, ...]] = ()
    shapes: str | Mapping[str, str] = ""
    ndim: int | None = 2

    def shapes_of(self, operation: str) -> str:
        return self.shapes if isinstance(self.shapes, str) else self.shapes[operation.removesuffix("_gradient")]

    def columns(self, operation: str, dtype: str) -> tuple[int, ...]:
        return self.cols(operation, dtype) if callable(self.cols) else self.cols


def rung_neighbours(operation: str, dtype: str) -> tuple[int, ...]:
    """The columns around the end of each of the planner's rungs: its even neighbours and the odd ones next to it."""
    itemsize = ITEMSIZE[dtype]
    if operation == "logsumexp":
        ends = reduction_rung_ends(itemsize)
    else:
        ends = row_rung_ends(itemsize, H200, inputs=2 if operation.endswith("backward") else 1)
    vector = VECTOR_BYTES // itemsize
    return tuple(sorted({end + step for end in ends for step in (-vector, -1, 0, 1, vector) if end + step > 0}))


SWEEPS = {
    TUTORIAL: Sweep(
        "softmax of 4096 rows by 256, 384, ... 12672 columns, float32; the default sweep",
        {"softmax": ("float32",)},
        rows=(4096,),
        cols=TUTORIAL_COLS,
    ),
    "backward": Sweep(
        "only the gradients of softmax and log_softmax, from y and dy",
        {"softmax_backward": BOTH, "log_softmax_backward": BOTH},
        cols=WIDTHS,
    ),
    "dims": Sweep("softmax along strided dims", {"softmax_dim": BOTH}, shapes=STRIDED, ndim=None),
    "masked": Sweep(
        "softmax of attention scores: causal and scaled, with a bool mask, with an added mask",
        dict.fromkeys(("softmax_causal", "softmax_masked", "softmax_biased"), ("bfloat16",)),
        shapes="8x16x2048x2048",
        ndim=4,
    ),
    "logsumexp": Sweep(
        "logsumexp along the last dim and along strided ones",
        {"logsumexp": BOTH},
        shapes=f"{LONG_ROWS},{STRIDED}",
        ndim=None,
    ),
    "vocab": Sweep(
        "softmax of 4096 rows of real vocabularies, also from bfloat16 to float32",
        {"softmax": BOTH, WIDENING: ("bfloat16",)},
        rows=(4096,),
        cols=VOCABULARIES,
    ),
    "batch": Sweep(
        "softmax of 1, 2, 4, ... 65536 rows of 4096 columns",
        {"softmax": BOTH},
        rows=tuple(2**i for i in range(17)),
        cols=(4096,),
    ),
    "small": Sweep(
        "softmax of short rows and of few rows: kernel and call",
        {"softmax": BOTH},
        shapes=f"65536x128,1000000x32,4096x64,64x1024,{FEW_ROWS}",
    ),
    "few-rows": Sweep(
        "softmax of 1 to 132 rows of up to 64 Mi columns",
        {"softmax": BOTH},
        shapes=FEWEST_ROWS,
    ),
    "peaks": Sweep(
        "columns where the planner's choice changes, and even and odd neighbours: softmax, gradient, logsumexp",
        dict.fromkeys(("softmax", "softmax_backward", "logsumexp"), BOTH),
        cols=rung_neighbours,
    ),
    "cross-entropy": Sweep(
        "the losses of rows of logits, and the gradient of their mean with its forward pass",
        dict.fromkeys(("cross_entropy", "cross_entropy_gradient"), BOTH),
        shapes="32768x1024,16384x8192,8192x32000,4096x50257,4096x128256,2048x262144,8x32000",
    ),
    "log-prob": Sweep(
        "log-probabilities of one class a row and the entropy, and the gradient of both with its forward pass",
        dict.fromkeys(("log_prob", "log_prob_gradient"), BOTH),
        shapes="64x1024,8192x32000,4096x50257,64x128256,8192x151936",
    ),
    "divergence": Sweep(
        "KL(teacher || student) of rows of logits, its reverse, JSD and TVD, and the gradient of the mean of each with "
        "its forward pass",
        {f"{name}{end}": BOTH for name in DIVERGENCES for end in ("", "_gradient")},
        shapes="8192x151936,8192x32000,4096x50257",
    ),
    "linear-divergence": Sweep(
        "gradients of the mean JSD of two linear layers, tokens x hidden x vocabulary, beside its four matrix products",
        {"linear_divergence": ("bfloat16",)},
        shapes="8192x4096x151936,8192x2048x32000",
        ndim=3,
    ),
    "linear-cross-entropy": Sweep(
        "gradients of a linear layer's mean loss, tokens x hidden x vocabulary, beside its three matrix products",
        {"linear_cross_entropy": ("bfloat16",)},
        shapes="4096x2048x32000,8192x4096x32000,4096x4096x128256,8192x4096x128256,4096x4096x151936,2048x3584x262144",
        ndim=3,
    ),
    "linear-log-prob": Sweep(
        "gradients of a linear layer's log-probabilities and entropies, tokens x hidden x vocabulary, beside its three "
        "matrix products",
        {"linear_log_prob": ("bfloat16",)},
        shapes="8192x4096x151936,8192x2048x151936",
        ndim=3,
    ),
    "sampling": Sweep(
        "a token of each row of logits: no filter, the greatest, top-k, top-p of flat and of peaked rows, both, min-p",
        dict.fromkeys(FILTERS, BOTH),
        shapes="8x128256,256x128256,512x128256,512x262144",
    ),
    "router": Sweep(
        "the weights of a router's best experts, and the gradient of these and of both losses with its forward pass",
        dict.fromkeys(("route", "route_gradient"), BOTH),
        shapes="1x256,64x256,16384x64,16384x128,16384x256,16384x384,16384x512,8192x2304,131072x256",
    ),
    "router-losses": Sweep(
        "a router's forward pass with counts and both losses; and DeepSeek-V3's, 8 groups of experts with a bias",
        dict.fromkeys(("route_losses", "route_groups"), BOTH),
        shapes={
            "route_losses": "2048x256,16384x64,16384x256,16384x512,131072x256",
            "route_groups": "1x256,64x256,16384x256",
        },
    ),
    "segments": Sweep(
        "softmax of segments of elements x columns, and its gradient: degrees of graphs, sorted or not; texts; short "
        "segments; one of half of all beside others of one; one of all",
        {name: ("bfloat16",) if "arxiv" in name else ("float32",) for name in SEGMENTS},
        shapes={
            "segment_softmax_arxiv": "1166243x4",
            "segment_softmax_products": f"{EDGES}x1,{EDGES // 8}x8",
            "segment_softmax_reddit": f"{EDGES}x1,{EDGES // 8}x8",
            "segment_softmax_texts": f"{4096 * 1010}x1,{4096 * 1010}x16",
            "segment_softmax_short": "4500000x1",
            "segment_softmax_hub": "20000000x1",
            "segment_softmax_one": "100000000x1",
            "segment_softmax_unsorted": f"30000000x1,{EDGES // 8}x8",
        },
    ),
    "attention": Sweep(
        "attention, plain, causal, with a bias, a softcap, sinks and a window, and one query; forward and gradient",
        dict.fromkeys(KINDS, ("bfloat16",)),
        shapes={
            "attention": "4x32x4096x128,8x16x4096x64,64x12x197x64",
            "attention_causal": "4x32x4096x128,8x16x4096x64,8x16x1001x96,8x16x1024x64,2x16x16384x64",
            "attention_biased": "4x32x2048x128,16x12x1024x64,384x4x384x32,4096x4x49x32",
            "attention_softcap": "2x16x4096x256",
            "attention_sinks": "2x64x8192x64",
            "attention_decode": "16x8x32768x128,1x8x1024x128,1x8x8192x128,1x8x65536x128",
        },
        ndim=4,
    ),
    CUSTOM: Sweep(
        "the shapes of --shape, --rows and --cols, for softmax or the operations of --op",
        {"softmax": ("float32",)},
    ),
}
QUICK = (
    Case((65536, 256), "float32"),
    Case((4096, 12672), "float32"),
    Case((128, 1048576), "float32"),
    Case((8, 32000), "bfloat16"),
    Case((2670, 50257), "bfloat16"),
    Case((1024, 131072), "bfloat16"),
)


def build(
    name: str = TUTORIAL,
    shapes: Sequence[Case] = (),
    rows: Sequence[int] = (),
    cols: Sequence[int] = (),
    dtypes: Sequence[str] = (),
    elements: int | None = None,
    quick: bool = False,
    operations: Sequence[str] = (),
) -> list[Case]:
    """The cases of a sweep in order, without repeats. Given shapes, dtypes and operations replace the sweep's own.

    With columns but no rows, a tensor has as many rows as hold `elements` elements, or the sweep's own number of rows.
    quick: QUICK in place of the tutorial; the first, middle and last shape of any other sweep.
    operations: a selection of the sweep's own, or any operations for custom.
    Raises ValueError for a shape or an operation that the sweep does not take.
    """
    sweep = SWEEPS[name]
    if name == CUSTOM and not cols and (rows or elements or not shapes):
        raise ValueError("custom has no shapes of its own: give --shape, or --cols with or without --rows")
    if quick and name == TUTORIAL and not (shapes or rows or cols or operations):
        return unique(replace(case, dtype=dtype) for case in QUICK for dtype in dtypes or (case.dtype,))
    found = []
    for operation in operations or sweep.dtypes:
        if name != CUSTOM and operation not in sweep.dtypes:
            raise ValueError(f"{name} has no operation {operation!r}; it has {', '.join(sweep.dtypes)}")
        ndim = sweep.ndim if operation in sweep.dtypes else ndim_of(operation)
        for dtype in dtypes or sweep.dtypes.get(operation, ("float32",)):
            if operation == WIDENING and ITEMSIZE[dtype] >= ITEMSIZE["float32"]:
                continue
            own_cols = sweep.columns(operation, dtype)
            chosen = list(shapes)
            if rows or cols or elements:
                own_rows = () if elements or name == TUTORIAL else sweep.rows
                chosen += _pairs(rows or own_rows, cols or own_cols or TUTORIAL_COLS, elements or ELEMENTS)
            elif not shapes:
                own_shapes = sweep.shapes_of(operation)
                chosen += _pairs(sweep.rows, own_cols, ELEMENTS) + (parse_shapes(own_shapes) if own_shapes else [])
                if quick:
                    chosen = [chosen[0], chosen[len(chosen) // 2], chosen[-1]]
            for case in chosen:
                require_dims(case, name, ndim)
            found += [replace(case, dtype=dtype, operation=operation) for case in chosen]
    return unique(found)


def ndim_of(operation: str) -> int | None:
    """How many dims an operation takes, according to the first sweep that names it."""
    return next((sweep.ndim for sweep in SWEEPS.values() if operation in sweep.dtypes), None)


def require_dims(case: Case, what: str, ndim: int | None) -> None:
    if ndim is not None and (len(case.shape), case.dim) != (ndim, -1):
        raise ValueError(f"{what} takes shapes of {ndim} dims, along the last one, not {case.size}")


def _pairs(rows: Sequence[int], cols: Sequence[int], elements: int) -> list[Case]:
    if rows:
        return [Case((n_rows, n_cols)) for n_rows in rows for n_cols in cols]
    return [Case((-(-elements // n_cols), n_cols)) for n_cols in cols]


def cut(cases: Iterable[Case], elements: int) -> list[Case]:
    """The same cases with fewer rows: at most `elements` elements a tensor, but at least one row."""
    return unique(_cut(case, elements) for case in cases)


def _cut(case: Case, elements: int) -> Case:
    sizes = list(case.shape)
    for axis, size in enumerate(sizes):
        if axis != case.dim % len(sizes):
            sizes[axis] = max(1, min(size, elements * size // math.prod(sizes)))
    return replace(case, shape=tuple(sizes))
