"""Inputs that can fail, and the comparison with float64 that comes before every figure."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from fused_softmax.bench.cases import Case

# Elements compared at once: float64 copies of a whole tensor would not fit beside large inputs.
CHUNK = 2**24
# Others may round their intermediates to the dtype, as naive does: a few roundings, no more.
OTHERS_ROUNDINGS = 8
# The state is fp32: the exponential's argument and the sum are rounded too. Little beside a rounding of 2-byte outputs.
STATE_ERROR = 2 * 2.0**-23


@dataclass(frozen=True)
class Errors:
    """Largest distance from float64, largest distance of a row's sum from 1, and the largest value to expect."""

    largest: float
    row_sum: float
    peak: float


def inputs(case: Case, count: int, device: str, seed: int) -> list[Tensor]:
    """Peaked logits, a different tensor each: twice a normal, and in every row one value far above the rest."""
    generator = torch.Generator(device).manual_seed(seed)
    dtype = getattr(torch, case.dtype)
    tensors = []
    for _ in range(count):
        x = torch.randn(case.n_rows, case.n_cols, device=device, dtype=dtype, generator=generator).mul_(2)
        column = torch.randint(case.n_cols, (case.n_rows, 1), device=device, generator=generator)
        height = torch.rand(case.n_rows, 1, device=device, generator=generator) * 12 + 4
        tensors.append(x.scatter_(1, column, height.to(dtype)))
    return tensors


def poisoned(softmax: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
    """softmax(x), its output allocated where NaN has just been, so that what it does not write shows."""
    poison = torch.full_like(x, float("nan"))
    del poison
    return softmax(x)


def errors(y: Tensor, x: Tensor) -> Errors:
    from fused_softmax.reference import softmax_fp64

    n_rows, n_cols = x.shape
    step = max(1, CHUNK // n_cols)
    found = torch.zeros(3, device=x.device, dtype=torch.float64)
    for start in range(0, n_rows, step):
        want = softmax_fp64(x[start : start + step])
        got = y[start : start + step].double()
        parts = ((got - want).abs().amax(), (got.sum(-1) - 1).abs().amax(), want.amax())
        found = torch.maximum(found, torch.stack(parts))  # NaN wins
    return Errors(*found.tolist())


def allowed(torch_errors: Errors, dtype: torch.dtype, own: bool) -> tuple[float, float]:
    """The largest error and row-sum error to accept: torch's own in the same dtype plus one rounding of the output."""
    rounding = torch.finfo(dtype).eps / 2 * (1 if own else OTHERS_ROUNDINGS)
    if dtype == torch.float64:  # the reference is rounded too
        rounding *= OTHERS_ROUNDINGS
    else:
        rounding += STATE_ERROR
    return torch_errors.largest + rounding * torch_errors.peak, torch_errors.row_sum + 4 * rounding


def complaint(y: object, x: Tensor, limits: tuple[float, float]) -> tuple[str, Errors | None]:
    """What is wrong with y as the softmax of x ("" if nothing), and its errors."""
    if not isinstance(y, Tensor) or y.shape != x.shape or y.dtype != x.dtype:
        got = f"{tuple(y.shape)} {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
        return f"returned {got} for {tuple(x.shape)} {x.dtype}", None
    found = errors(y, x)
    if found.largest != found.largest:
        rows = int(y.isnan().any(-1).sum())
        return f"NaN in {rows} of {x.shape[0]} rows of a finite input", None
    if not found.largest <= limits[0]:
        return f"largest error {found.largest:.2e}, allowed {limits[0]:.2e}", found
    if not found.row_sum <= limits[1]:
        return f"a row sums to 1 within {found.row_sum:.2e}, allowed {limits[1]:.2e}", found
    return "", found


def fingerprint(x: Tensor) -> int:
    """Changes when x is written: no provider may spoil the inputs that all share."""
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16}[x.element_size()]
    return int(x.view(integer).sum(dtype=torch.int64))
