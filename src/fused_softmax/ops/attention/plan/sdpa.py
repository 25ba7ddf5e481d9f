"""Which plain attention goes to cuDNN, and which of torch's the kernels take over: data, each with its measurement.

On a GPU that is not in ENTRIES, this package's kernels compute. Nothing was measured there, and what the kernels
promise (the same bits at every run) is not given up for nothing. When the kernels become faster, an entry is removed.
"""

from dataclasses import dataclass
from typing import Literal

from fused_softmax.core.plan.device import Device

Pass = Literal["forward", "backward"]
LEAST_LENGTH = 128  # of queries and keys; the shortest that was timed is 197, and one query is another kernel's work


@dataclass(frozen=True)
class Entry:
    """A pass that cuDNN takes on GPUs of a compute capability, of 16-bit heads with more than `above` dims.

    most_dim: of such a head. below: queries that are too many for it; None for any number. least: queries that it takes
    at least. scores: it takes calls with more than this, queries times keys of all heads. note: what was measured.
    Forward and backward are chosen each by itself, because output and lse are all that goes from one to the other.
    """

    which: Pass
    capability: tuple[int, int]
    above: int
    most_dim: int
    below: int | None
    note: str
    least: int = 0
    scores: int = 0


# One H200, bf16, torch 2.11; us of ours and of cuDNN's (docs/attention.md).
ENTRIES = (
    Entry("forward", (9, 0), 48, 64, 4096, "causal 16 x 16 x 1024 x 64: 118 us, cuDNN 107; 64 x 12 x 197 x 64: 52, 47; "
                                           "8 x 16 x 4096 x 64: 650, 637, full 1078, 1151; of 48 dims 16 x 8 x 1000: "
                                           "61 and 61, of 32 dims 64 x 12 x 197: 43 and 46; one H100, causal "
                                           "4 x 16 x 512 x 64: 13.5, 15.6, 2 x 8 x 1024: 14.1, 14.4, and the host "
                                           "14 where cuDNN takes it 23, 16 x 16 x 512: 45.7, 39.5", scores=2**24),
    Entry("backward", (9, 0), 64, 96, None, "causal 8 x 16 x 1001 x 96: 319 us, cuDNN 336, so shorter ones stay; "
                                            "longer ones as at 128 dims, not timed", least=2048),
    Entry("backward", (9, 0), 96, 128, None, "causal 4 x 32 x 4096 x 128: 3479 us, cuDNN 3179; full: 6037 and 5530; in "
                                             "another run 2945 and 2808, 5620 and 5556"),
)  # fmt: skip


@dataclass(frozen=True)
class Biased:
    """A float mask with its gradient. torch leaves it to its memory-efficient way, and the kernels are faster.

    least_length: of queries and keys. most_dim: of a 16-bit head.
    """

    capability: tuple[int, int]
    least_length: int
    most_dim: int
    note: str


# The same; forward and backward together. Shorter ones stay with torch: not measured.
BIASED = (
    Biased((9, 0), 384, 128, "4 x 32 x 2048 x 128: 2678 us, torch 9020; 16 x 12 x 1024 x 64: 721 and 2236; "
                             "384 x 4 x 384 x 32: 743 and 2346"),
)  # fmt: skip


def biased_of(
    head_dim: int, value_dim: int, itemsize: int, n_queries: int, n_keys: int, device: Device
) -> Biased | None:
    """The entry by which attention with a bias that has a gradient is taken over from torch, or None."""
    if itemsize != 2 or device.backend != "cuda":
        return None
    for entry in BIASED:
        fits = max(head_dim, value_dim) <= entry.most_dim and min(n_queries, n_keys) >= entry.least_length
        if fits and entry.capability == device.capability:
            return entry
    return None


def entry_of(
    which: Pass, head_dim: int, value_dim: int, itemsize: int, n_heads: int, n_queries: int, n_keys: int, device: Device
) -> Entry | str:
    """The entry by which this pass of plain attention goes to cuDNN; or why the kernels of this package compute it.

    n_heads: of all batches.

    >>> from fused_softmax.core.plan import H200
    >>> entry_of("backward", 128, 128, 2, 128, 4096, 4096, H200).most_dim
    128
    >>> entry_of("backward", 96, 96, 2, 128, 1001, 1001, H200)
    'cuDNN was not measured to be faster at heads of 96 dims and 1001 queries'
    """
    if itemsize != 2:
        return f"elements have {itemsize} bytes, not 2"
    if head_dim != value_dim:
        return f"heads of {head_dim} dims have values of {value_dim}"
    if min(n_queries, n_keys) < LEAST_LENGTH:
        return f"{n_queries} queries and {n_keys} keys are not {LEAST_LENGTH} each"
    entries = [entry for entry in ENTRIES if (entry.which, entry.capability) == (which, device.capability)]
    if device.backend != "cuda" or not entries:
        return f"nothing was measured on {device.name}"
    for entry in entries:
        fits = n_queries >= entry.least and (entry.below is None or n_queries < entry.below)
        if fits and entry.above < head_dim <= entry.most_dim:
            if n_heads * n_queries * n_keys <= entry.scores:
                return f"with at most {entry.scores} scores cuDNN is not faster, and takes the host longer"
            return entry
    return f"cuDNN was not measured to be faster at heads of {head_dim} dims and {n_queries} queries"
