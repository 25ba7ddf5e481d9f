"""Rows whose kept sets are hard, what is kept of a row by a stable sort, and what a chi-square asks."""

import math
import os

import pytest
import torch

INTERPRETED = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"
# Of tests that draw thousands of times: the interpreter takes 30 ms and more for a draw by the kernels, which
# test_sample_kernels.py holds to torch's.
BY_BOTH = pytest.mark.parametrize(
    "way", ["torch", pytest.param("kernels", marks=pytest.mark.exhaustive)], indirect=True
)
BY_TORCH = pytest.mark.parametrize("way", ["torch"], indirect=True)
BY_KERNELS = pytest.mark.parametrize("way", ["kernels"], indirect=True)


def few(n: int, way: str, fewer: int) -> int:
    """How many draws a test makes: fewer by kernels that are interpreted."""
    return fewer if way == "kernels" and INTERPRETED else n


def hard_rows(n_cols: int) -> torch.Tensor:
    """Rows [n, n_cols] of random logits, peaked ones, plateaus, signed zeros, -inf, equals, and one finite logit."""
    generator = torch.Generator().manual_seed(n_cols)
    random = torch.randn(4, n_cols, generator=generator) * 2
    plateaus = torch.randint(-2, 3, (3, n_cols), generator=generator).float()
    zeros = torch.where(torch.rand(1, n_cols, generator=generator) < 0.5, 0.0, -0.0)
    holes = random[:2].masked_fill(torch.rand(2, n_cols, generator=generator) < 0.7, -math.inf)
    holes[:, n_cols // 2] = 1.0
    one = torch.full((1, n_cols), -math.inf)
    one[0, n_cols // 3] = -3.0
    return torch.cat([random, 3 * random, plateaus, zeros, holes, torch.full((1, n_cols), 1.25), one])


def kept_by_sort(row, temperature=1.0, top_k=None, top_p=None, min_p=None, order="sequential"):
    """(columns that are kept of one row, how near a sum comes to top_p of the whole), by a stable sort, in float64."""
    x = row.tolist()
    by_value = sorted((c for c in range(len(x)) if x[c] > -math.inf), key=lambda c: (-x[c], c))
    if temperature == 0:
        return set(by_value[:1]), math.inf
    p = {c: math.exp((x[c] - x[by_value[0]]) / temperature) for c in by_value}
    of_k = by_value[:top_k] if top_k is not None and top_k > 0 else by_value
    kept, nearest = list(of_k), math.inf
    if top_p is not None and top_p < 1:
        asked = (1 - 2**-22) * top_p * math.fsum(p[c] for c in (of_k if order == "sequential" else by_value))
        kept, total = [], 0.0
        for c in by_value:
            nearest = min(nearest, abs(total / asked - 1))
            if total < asked and c in of_k:
                kept.append(c)
            total += p[c]
    if min_p is not None:
        kept = [c for c in kept if p[c] >= (1 - 2**-22) * min_p]
    return set(kept), nearest


def columns(bits: torch.Tensor) -> set[int]:
    """The columns that a row of an int32 bitmask keeps."""
    return {32 * i + j for i, word in enumerate(bits.tolist()) for j in range(32) if word >> j & 1}


def assert_distributed(tokens: torch.Tensor, probs: torch.Tensor) -> None:
    """That tokens [n] are drawn from probs [n_cols], float64: chi-square within 5 of its deviations."""
    count = tokens.bincount(minlength=len(probs)).double()
    assert len(count) == len(probs)
    chi, freedom = chi_square(count, probs, 5)
    assert chi < freedom + 5 * math.sqrt(2 * freedom), (chi, freedom)


def assert_counted(count: torch.Tensor, probs: torch.Tensor) -> None:
    """That columns were drawn from probs [n_cols], float64, count [n_cols] times: of right draws one in 10^6 fails."""
    chi, freedom = chi_square(count.cpu().double(), probs, 100)
    chance = torch.special.gammaincc(*torch.tensor([freedom / 2, chi / 2], dtype=torch.float64))
    assert chance > 1e-6, (chi, freedom)


def chi_square(count: torch.Tensor, probs: torch.Tensor, least: int) -> tuple[float, int]:
    """(chi-square, its degrees of freedom) of counts. Columns that are expected less than `least` times are one class.

    That class joins the least of the others if all of it is expected less often still.
    """
    assert not count[probs == 0].any()
    expected = probs * count.sum()
    rare = expected < least
    if 0 < expected[rare].sum() < least:
        rare |= expected == expected[~rare].min()
    count = torch.cat([count[~rare], count[rare].sum()[None]])
    expected = torch.cat([expected[~rare], expected[rare].sum()[None]])
    chi = ((count - expected).square() / expected.clamp(min=1e-9))[expected > 0].sum().item()
    return chi, max(int((expected > 0).sum()) - 1, 1)
