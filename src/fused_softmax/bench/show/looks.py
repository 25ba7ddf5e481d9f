"""How each provider looks, in plots by matplotlib and in charts by Vega: a colour, a mark and a line of its own.

The order and the looks belong to providers, so that two plots read alike.
"""

from collections.abc import Collection
from dataclasses import dataclass


@dataclass(frozen=True)
class Look:
    """marker: matplotlib's. shape: the same mark in Vega, by name or as a path. dash: of a line, in pixels."""

    colour: str
    marker: str
    shape: str
    dash: tuple[int, ...]


# Okabe and Ito's colours can be told apart without colour vision.
LOOKS = {
    "fused_softmax": Look("#D55E00", "o", "circle", (1, 0)),
    "torch": Look("#0072B2", "s", "square", (6, 2)),
    "torch.compile": Look("#56B4E9", "D", "diamond", (2, 2)),
    "naive": Look(
        "#999999", "x",
        "M-1,-.7L-.7,-1L0,-.3L.7,-1L1,-.7L.3,0L1,.7L.7,1L0,.3L-.7,1L-1,.7L-.3,0Z", (8, 2, 2, 2),
    ),
    "persistent": Look("#009E73", "^", "triangle-up", (4, 4)),
    "hybrid": Look("#CC79A7", "v", "triangle-down", (10, 3)),
    "online": Look("#E69F00", "P", "cross", (1, 3)),
    "liger": Look(
        "#8B6D05", "*",
        "M0,-1L.25,-.35L.95,-.3L.4,.15L.6,.8L0,.45L-.6,.8L-.4,.15L-.95,-.3L-.25,-.35Z", (5, 1, 1, 1),
    ),
    "quack": Look("#5D3A9B", "<", "triangle-left", (12, 2, 2, 2, 2, 2)),
    "torch chunked": Look("#1B3A57", ">", "triangle-right", (3, 3, 1, 3)),
    "cce": Look("#6A6A00", "8", "M-.4,-.95L.4,-.95L.95,-.4L.95,.4L.4,.95L-.4,.95L-.95,.4L-.95,-.4Z", (14, 4)),
    "transformers": Look(
        "#FFB000", "+",
        "M-.15,-1L.15,-1L.15,-.15L1,-.15L1,.15L.15,.15L.15,1L-.15,1L-.15,.15L-1,.15L-1,-.15L-.15,-.15Z", (7, 5),
    ),
    "vllm": Look("#648FFF", "1", "M-.15,1L-.15,.1L-.9,-.6L-.7,-.85L0,-.2L.7,-.85L.9,-.6L.15,.1L.15,1Z", (2, 5)),
    "flashinfer": Look(
        "#76B900", "2",
        "M-.15,-1L-.15,-.1L-.9,.6L-.7,.85L0,.2L.7,.85L.9,.6L.15,-.1L.15,-1Z", (9, 1, 3, 1),
    ),
    "sdpa cudnn": Look(
        "#3B7A00", "3",
        "M1,-.15L.1,-.15L-.6,-.9L-.85,-.7L-.2,0L-.85,.7L-.6,.9L.1,.15L1,.15Z", (16, 2, 2, 2),
    ),
    "sdpa flash": Look("#0B559F", "4", "M-1,-.15L-.1,-.15L.6,-.9L.85,-.7L.2,0L.85,.7L.6,.9L-.1,.15L-1,.15Z", (1, 1)),
    "sdpa efficient": Look("#6BAED6", "|", "M-.15,-1L.15,-1L.15,1L-.15,1Z", (5, 5, 1, 5)),
    "sdpa math": Look("#525252", "_", "M-1,-.3L1,-.3L1,.3L-1,.3Z", (11, 2, 5, 2)),
    "flex": Look(
        "#AA4499", "$F$",
        "M-.6,-1L.6,-1L.6,-.7L-.3,-.7L-.3,-.1L.4,-.1L.4,.2L-.3,.2L-.3,1L-.6,1Z", (2, 2, 6, 2),
    ),
    "xformers": Look(
        "#DDCC77", "$x$",
        "M-.8,-.6L-.6,-.8L0,-.2L.6,-.8L.8,-.6L.2,0L.8,.6L.6,.8L0,.2L-.6,.8L-.8,.6L-.2,0Z", (8, 5),
    ),
    "flash-attn 3": Look(
        "#117733", "$3$",
        "M-.6,-1L.6,-1L.6,1L-.6,1L-.6,.7L.3,.7L.3,.15L-.4,.15L-.4,-.15L.3,-.15L.3,-.7L-.6,-.7Z", (4, 1, 4, 5),
    ),
    "cuequivariance": Look("#882255", "$c$", "M.6,-.8L-.6,-.8L-.6,.8L.6,.8L.6,.5L-.3,.5L-.3,-.5L.6,-.5Z", (6, 6)),
    # fused_softmax with other options than the default
    "in one chunk": Look("#7F2704", "p", "M0,-1L.95,-.31L.59,.81L-.59,.81L-.95,-.31Z", (13, 2)),
    "chunks of 1024": Look("#F4A582", "d", "M0,-1L.55,0L0,1L-.55,0Z", (3, 1, 1, 1)),
    "chunks of 256": Look(
        "#C51B7D", "X",
        "M-1,-.5L-.5,-1L0,-.5L.5,-1L1,-.5L.5,0L1,.5L.5,1L0,.5L-.5,1L-1,.5L-.5,0Z", (7, 1),
    ),
    "summed in place": Look("#4D9221", "h", "M0,-1L.87,-.5L.87,.5L0,1L-.87,.5L-.87,-.5Z", (1, 5)),
    "32 in place": Look("#00441B", "H", "M-1,0L-.5,-.87L.5,-.87L1,0L.5,.87L-.5,.87Z", (9, 3, 3, 3)),
    "own kernels": Look("#FB6A4A", ".", "M-.4,-.4L.4,-.4L.4,.4L-.4,.4Z", (4, 2, 1, 2)),
}  # fmt: skip
UNKNOWN = Look("#777777", "$?$", "wedge", (15, 6))  # of a provider that a results file names and nobody knows


def in_order(names: Collection[str]) -> list[str]:
    """The names of providers in the order of their looks, then those that nobody knows."""
    return [*(name for name in LOOKS if name in names), *sorted(set(names) - LOOKS.keys())]
