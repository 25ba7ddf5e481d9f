"""Scales, masks and sinks, and inputs that show what they hide."""

import math

import torch
from shapes import DTYPES

from fused_softmax.ops.softmax import reference

FP32, FP16, BF16, FP64 = DTYPES


def on(device, scored):
    return {name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in scored.items()}


def hide(x, scored):
    """x with NaN and +inf where a bool mask or causality hides, neither of which may be seen."""
    mask = scored.get("mask")
    keeps = mask if mask is not None and mask.dtype == torch.bool else None
    hidden = reference.scores(torch.zeros_like(x), -1, None, keeps, scored.get("is_causal", False)) == -math.inf
    poison = torch.full_like(x, math.nan)
    poison[..., 1::2] = math.inf
    return torch.where(hidden, poison, x)


def kept(*shape, of=0.6, seed=1):
    return torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < of


def added(*shape, dtype=FP32, seed=2):
    """A bias with -inf in it."""
    generator = torch.Generator().manual_seed(seed)
    bias = torch.randn(shape, generator=generator) * 3
    return bias.masked_fill(torch.rand(shape, generator=generator) < 0.2, -math.inf).to(dtype)


def sinks(*shape, dtype=FP32, seed=7):
    return (torch.randn(shape, generator=torch.Generator().manual_seed(seed)) * 6 + 4).to(dtype)


def weights(*shape, dtype=FP32, seed=7):
    """Of both signs and nothing else: a gradient of a result, or a mask or scale that has one."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=FP64).to(dtype)


def _tiles(n):
    """Whole tiles hidden in front, in the middle, at the end; and the fourth row is empty."""
    mask = kept(2, 2, n, of=0.9)
    mask[0, 0, :260] = mask[0, 1, 128:520] = mask[1, 0, 250:] = mask[1, 1] = False
    return mask


def _empty(n):
    """A row of which nothing is kept, beside others."""
    mask = kept(2, 2, n)
    mask[1, 0] = False
    return mask


# Of rows [2, 2, n]: two of each sort of broadcasting.
SCORES = {
    "scale": lambda n: {"scale": 0.37},
    "negative scale": lambda n: {"scale": -1.5},
    "scale 0": lambda n: {"scale": 0.0},
    "scale a row": lambda n: {"scale": torch.tensor([[0.5, 2.0], [-1.25, 0.0]]).unsqueeze(-1)},
    "scale a query": lambda n: {"scale": torch.tensor([[0.0], [-2.0]])},
    "scale a batch, masked": lambda n: {"scale": torch.tensor([-0.7, 0.0]).view(2, 1, 1), "mask": _tiles(n)},
    "mask": lambda n: {"mask": _tiles(n)},
    "mask, empty rows zero": lambda n: {"mask": _tiles(n), "masked_rows": "zero"},
    "mask of keys, scaled": lambda n: {"mask": kept(n), "scale": -3.0},
    "mask a batch, scale 0, empty rows zero": lambda n: {
        "mask": kept(2, 1, n) & torch.tensor([True, False]).view(2, 1, 1), "scale": 0.0, "masked_rows": "zero",
    },
    "mask a query": lambda n: {"mask": torch.tensor([[True], [False]]), "masked_rows": "zero"},
    "added": lambda n: {"mask": added(2, n)},
    "added, scaled": lambda n: {"mask": added(2, 1, n, dtype=BF16), "scale": -2.0},
    "added, scale a row": lambda n: {
        "mask": added(n).masked_fill(torch.arange(n) < 300, -math.inf),
        "scale": torch.tensor([[0.5, 0.0], [-1.25, 3.0]]).unsqueeze(-1),
    },
    "added, empty rows zero": lambda n: {
        "mask": added(2, 2, n).masked_fill(torch.tensor([[1, 0], [0, 0]]).bool().unsqueeze(-1), -math.inf),
        "masked_rows": "zero",
    },
    "empty rows zero": lambda n: {"masked_rows": "zero"},
    "sink": lambda n: {"sink": 9.5},
    "sink of no dims": lambda n: {"sink": torch.tensor(-3.0, dtype=FP64)},
    "sink a head, scaled": lambda n: {"sink": sinks(2, 1, 1, dtype=BF16), "scale": -1.5},
    "sink and scale a row": lambda n: {"sink": sinks(2, 1), "scale": torch.tensor([[0.5], [-2.0]]).unsqueeze(-1)},
    "sink, scale 0": lambda n: {"sink": sinks(2, 2, 1), "scale": 0.0},
    "sink, scale 0 of some": lambda n: {
        "sink": 13.0, "scale": torch.tensor([[0.0, 2.0], [-1.25, 0.0]]).unsqueeze(-1),
    },
    "sink, masked": lambda n: {"sink": sinks(2, 1, 1), "mask": _empty(n)},
    "sink, masked, empty rows zero": lambda n: {
        "sink": torch.tensor([[3.0, 12.0], [-math.inf, 8.0]]).unsqueeze(-1), "mask": _empty(n), "masked_rows": "zero",
    },
    "sink, masked, scale 0": lambda n: {"sink": sinks(2, 1), "mask": _empty(n), "scale": 0.0},
    "sink, added": lambda n: {"sink": sinks(2, 2, 1, dtype=FP16), "mask": added(2, n), "scale": 0.7},
    "sink of -inf, inf and NaN": lambda n: {
        "sink": torch.tensor([[-math.inf, math.inf], [math.nan, 3.0]]).unsqueeze(-1), "mask": _empty(n),
    },
    "sink of -inf and inf, scale 0": lambda n: {
        "sink": torch.tensor([[-math.inf, math.inf], [math.nan, 3.0]]).unsqueeze(-1), "scale": 0.0,
    },
}  # fmt: skip


def any_scores(shape, dim, device):
    """Each option alone and with others, for an input of any shape and dim."""
    along = [1 if i == dim % len(shape) else size for i, size in enumerate(shape)]
    scale = (torch.arange(math.prod(along)) % 4 - 1.0).view(along)
    # Every second dim from the last, and the others.
    keys, queries = ([size if (len(shape) - i) % 2 == odd else 1 for i, size in enumerate(shape)] for odd in (1, 0))
    scores = {
        "plain": {},
        "number": {"scale": -0.3},
        "scale 0": {"scale": 0.0},
        "scale of no dims": {"scale": torch.tensor(-0.5)},
        "scale a row": {"scale": scale},
        "scale a row, all 0": {"scale": torch.zeros(along)},
        "mask": {"mask": kept(*keys)},
        "mask, scale 0, zero": {"mask": kept(*shape, of=0.3), "scale": 0.0, "masked_rows": "zero"},
        "added, scale a row": {"mask": added(*queries).clamp(-9), "scale": scale},
        "added -inf": {"mask": torch.full(shape, -math.inf)},
        "nothing kept": {"mask": torch.tensor(False)},
        "nothing kept, zero": {"mask": torch.tensor(False), "masked_rows": "zero"},
        "all kept": {"mask": torch.ones([1] * len(shape), dtype=torch.bool), "scale": 2.0},
        "sink": {"sink": 2},
        "sink a row": {"sink": sinks(*along)},
        "sink of all rows": {"sink": sinks(*[1] * len(shape)), "scale": 0.5, "masked_rows": "zero"},
        "sink and scale a row": {"sink": sinks(*along), "scale": torch.full(along, 2.0)},
    }
    if len(shape) > 1 and dim % len(shape) == len(shape) - 1:
        scores["causal"] = {"is_causal": True}
    return {name: on(device, scored) for name, scored in scores.items()}
