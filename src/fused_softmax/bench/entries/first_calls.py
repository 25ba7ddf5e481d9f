"""The first calls that `fused-softmax bench cold` measures: of every operator, of a server's batches, and of decoding.

Their inputs are those of the bench's operations. PyTorch is imported by the calls alone.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import fused_softmax as ours
from fused_softmax.bench.cases import Case
from fused_softmax.bench.catalog import OPERATIONS
from fused_softmax.bench.entries.attention_kinds import KINDS
from fused_softmax.bench.entries.filters import FILTERS
from fused_softmax.bench.entries.segment_kinds import KINDS as SEGMENTS

VOCABULARY = 128256
ROWS, TOKENS = (4096, VOCABULARY), (64, VOCABULARY)  # of training, and of a server's step
BATCHES = (1, 2, 3, 4, 5, 7, 8, 16, 17, 32, 33, 64, 65, 100, 128, 200, 256, 384, 512)
CONTEXTS = (
    16, 50, 64, 100, 128, 200, 256, 384, 512, 777, 1024, 1500, 2048, 3000, 4096, 5000, 6144, 8192, 10000, 12288, 16384,
    20000, 24576, 32768,
)  # fmt: skip

Call = Callable[..., Any]


@dataclass(frozen=True)
class FirstCalls:
    """Calls that one process makes in turn.

    cases: one for each call; its operation makes the inputs. call: the function that takes the inputs. None: this
        package's call of that operation.
    """

    about: str
    cases: Sequence[Case]
    call: Call | None = None


def both_passes(function: Call) -> Call:
    """The function on an input that requires a gradient, and then the backward pass."""

    def call(x: Any, *more: Any) -> None:
        y = function(x.detach().requires_grad_(), *more)
        y.backward(y.detach())

    return call


def _speculative(x: Any) -> Any:
    """Each sequence has three drafts, and a row of logits for each of them and for the token after them."""
    logits = x.view(-1, 4, x.shape[-1])
    return ours.speculative_sample(logits, logits[:, :3, 0].long(), top_k=50, seed=0)


def _filters(x: Any) -> None:
    probs = x.softmax(-1)
    ours.penalize(x, x[:, :256].long(), repetition=1.1)
    ours.top_k_mask_logits(x, 50)
    ours.top_p_mask_logits(x, 0.9)
    ours.min_p_mask_logits(x, 0.05)
    ours.top_k_renorm_probs(probs, 50)
    ours.top_p_renorm_probs(probs, 0.9)


# The shape at which our call of each of the bench's operations is made.
_SHAPES: dict[str, tuple[int, ...]] = {
    **dict.fromkeys(OPERATIONS, ROWS),
    **dict.fromkeys(FILTERS, TOKENS),
    **dict.fromkeys(KINDS, (1, 32, 4096, 128)),
    **dict.fromkeys(("softmax_causal", "softmax_masked", "softmax_biased"), (2, 32, 2048, 2048)),
    "softmax_dim": (64, 4096, 512),
    **dict.fromkeys(("linear_cross_entropy", "linear_log_prob", "linear_divergence"), (4096, 4096, VOCABULARY)),
    **dict.fromkeys(("route", "route_losses", "route_groups", "route_gradient"), (16384, 256)),
    **dict.fromkeys(SEGMENTS, (2**20, 8)),
    "attention_decode": (8, 8, 4096, 128),
}
_IN_DATA_ALONE = {  # they differ from another one
    "sample_top_p_peaked",
    *(name for name, kind in SEGMENTS.items() if not kind.unsorted and "products" not in name),
}
# Calls that are no operation of the bench. By name: the operation whose inputs they take, a title, and the function.
_OTHERS: dict[str, tuple[str, str, Call]] = {
    "softmax_trained": ("softmax", "softmax, both passes", both_passes(lambda x: ours.softmax(x, -1))),
    "log_softmax": ("softmax", "log_softmax", lambda x: ours.log_softmax(x, -1)),
    "log_softmax_trained": ("softmax", "log_softmax, both passes", both_passes(lambda x: ours.log_softmax(x, -1))),
    "logsumexp_trained": ("logsumexp", "logsumexp, both passes", both_passes(lambda x: ours.logsumexp(x, -1))),
    "cross_entropy_none_trained": (
        "cross_entropy", "cross_entropy of each row, both passes",
        both_passes(lambda x, target: ours.cross_entropy(x, target, reduction="none")),
    ),
    "cross_entropy_smoothed_trained": (
        "cross_entropy", "cross_entropy with label smoothing, both passes",
        both_passes(lambda x, target: ours.cross_entropy(x, target, label_smoothing=0.1)),
    ),
    "cross_entropy_statistics": (
        "cross_entropy", "cross_entropy with token statistics, both passes",
        both_passes(lambda x, target: ours.cross_entropy(x, target, return_token_stats=True)[0]),
    ),
    "sample_temperature": (
        "sample", "sample, temperature 0.7",
        lambda x, seed, position: ours.sample(x, 0.7, seed=seed, position=position),
    ),
    "sample_by_tensors": (
        "sample", "sample, top-k and top-p of each row",
        lambda x, seed, position: ours.sample(
            x, 0.7, top_k=position + 1, top_p=(position + 1) / 65, seed=seed, position=position
        ),
    ),
    "speculative_sample": ("sample", "speculative_sample, three drafts", lambda x, *_: _speculative(x)),
    "filters": ("sample", "penalize, masks and renormalization by filters", lambda x, *_: _filters(x)),
}  # fmt: skip
_BATCHES = [(n, VOCABULARY) for n in BATCHES]
_DTYPES = {"bf16": "bfloat16", "fp32": "float32"}
# Rows of many calls, as a server makes them. By operation: what changes from call to call, the shapes, the dtypes.
_IN_TURN: dict[str, tuple[str, Sequence[tuple[int, ...]], Sequence[str]]] = {
    "softmax": ("batches", _BATCHES, ("bf16", "fp32")),
    **dict.fromkeys(("sample", "sample_top_k", "sample_top_p", "sample_min_p"), ("batches", _BATCHES, ("bf16",))),
    "attention_decode": ("contexts", [(8, 8, n, 128) for n in CONTEXTS], ("bf16", "fp32")),
}


def _case(operation: str) -> Case:
    return Case(_SHAPES[operation], "bfloat16", operation, 1 if operation == "softmax_dim" else -1)


CALLS = {
    **{name: FirstCalls(title, [_case(name)]) for name, title in OPERATIONS.items() if name not in _IN_DATA_ALONE},
    **{name: FirstCalls(about, [_case(operation)], call) for name, (operation, about, call) in _OTHERS.items()},
    **{
        f"{name}_{what}_{short}": FirstCalls(
            f"{OPERATIONS[name]}, {len(shapes)} {what}, {short}",
            [Case(shape, _DTYPES[short], name) for shape in shapes],
        )
        for name, (what, shapes, dtypes) in _IN_TURN.items()
        for short in dtypes
    },
}
