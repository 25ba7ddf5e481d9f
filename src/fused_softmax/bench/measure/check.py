"""Inputs that can make a kernel fail, and the comparison with float64 that precedes every figure."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from fused_softmax.bench.cases import Case
from fused_softmax.bench.entries import filters as entries_filters
from fused_softmax.bench.entries import sampling
from fused_softmax.bench.entries.makers import Call
from fused_softmax.bench.entries.operation import Inputs
from fused_softmax.bench.entries.operations import operation_of

# Elements compared at once. float64 copies of a whole tensor would not fit beside large inputs.
CHUNK = 2**24
# Other providers may round their intermediates to the dtype, as naive does: a few roundings, no more.
OTHERS_ROUNDINGS = 8
# The state is fp32, so the exponential's argument and the sum are rounded too. 2-byte outputs round far more.
STATE_ERROR = 2 * 2.0**-23


@dataclass(frozen=True)
class Errors:
    """How far a result is from float64, and how large the float64 result is.

    largest: the largest distance of an element. row_sum: of a row's sum (0 if a row has one result).
    peak: the largest magnitude in float64. mass: a row's largest sum of magnitudes in float64.
    """

    largest: float
    row_sum: float
    peak: float
    mass: float


def inputs(case: Case, count: int, device: str, seed: int) -> list[Inputs]:
    """The tensors of `count` calls; each call has its own."""
    generator = torch.Generator(device).manual_seed(seed)
    return [operation_of(case).inputs(case, generator) for _ in range(count)]


def cut_axis(case: Case) -> int:
    """The axis along which a comparison is cut into chunks: the first axis that is not reduced."""
    return 1 if case.dim == 0 else 0


def comparison_bytes(case: Case) -> int:
    """Bytes that the float64 tensors of a comparison take at once."""
    return 8 * 8 * min(CHUNK + case.elements // case.shape[cut_axis(case)], case.elements)


def judge_of(case: Case, inputs: Inputs) -> "Judge | JudgeOfDraws":
    return Judge(case, inputs) if operation_of(case).draws is None else JudgeOfDraws(case, inputs)


class Judge:
    """Judges a result for these inputs. It may be as far from float64 as torch's, plus a few roundings."""

    def __init__(self, case: Case, inputs: Inputs):
        self.case, self.inputs = case, inputs
        self.dim = case.dim % len(case.shape)
        self.axis = cut_axis(case)
        y = self._joined(operation_of(case).baseline(case)(*inputs))
        self.shape, self.dtype = y.shape, y.dtype
        self.reduced = y.ndim < len(case.shape)
        self.torch_errors = self.errors(y)

    def poisoned(self, call: Call) -> object:
        """The call's result, allocated where NaN has just been, so that elements it does not write show."""
        poison = torch.full(self.shape, float("nan"), dtype=self.dtype, device=self.inputs[0].device)
        del poison
        return call(*self.inputs)

    def habit(self, call: Call, own: bool) -> str:
        """What is wrong with the call that one result does not show ("" if nothing is)."""
        return ""

    def allowed(self, own: bool) -> tuple[float, float]:
        """The largest accepted error and row-sum error: torch's in the same dtype, plus one rounding of the output."""
        rounding = torch.finfo(self.dtype).eps / 2 * (1 if own else OTHERS_ROUNDINGS)
        if self.dtype == torch.float64:  # the reference is rounded too
            rounding *= OTHERS_ROUNDINGS
        else:
            rounding += STATE_ERROR
        torchs, operation = self.torch_errors, operation_of(self.case)
        largest, row_sum = operation.of_torchs * torchs.largest, operation.of_torchs * torchs.row_sum
        if own and operation.own_error is not None:
            largest, row_sum = operation.own_error * torchs.peak, operation.own_error * torchs.mass
        return largest + rounding * torchs.peak, row_sum + 4 * rounding * torchs.mass

    def complaint(self, y: object, limits: tuple[float, float]) -> tuple[str, Errors | None]:
        """What is wrong with y ("" if nothing is), and its errors."""
        y = self._joined(y)
        if not isinstance(y, Tensor) or y.shape != self.shape or y.dtype != self.dtype:
            got = f"{tuple(y.shape)} {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
            return f"returned {got} where {tuple(self.shape)} {self.dtype} is expected", None
        found = self.errors(y)
        if found.largest != found.largest:
            rows = int((y.isnan() if self.reduced else y.isnan().any(self.dim)).sum())
            return f"NaN in {rows} of {self.case.n_rows} rows of a finite input", None
        if not found.largest <= limits[0]:
            return f"largest error {found.largest:.2e}, allowed {limits[0]:.2e}", found
        if not found.row_sum <= limits[1]:
            return f"a row's sum is off by {found.row_sum:.2e}, allowed {limits[1]:.2e}", found
        return "", found

    def errors(self, y: Tensor) -> Errors:
        found = torch.zeros(4, device=y.device, dtype=torch.float64)
        for got, want in self.chunks(y):
            got = got.double()
            sums = torch.zeros(2, device=y.device, dtype=torch.float64)
            if not self.reduced:
                off = (got.sum(self.dim) - want.sum(self.dim)).abs().amax()
                sums = torch.stack((off, want.abs().sum(self.dim).amax()))
            parts = ((got - want).abs().amax(), sums[0], want.abs().amax(), sums[1])
            found = torch.maximum(found, torch.stack(parts))  # NaN wins
        return Errors(*found.tolist())

    def truth(self, inputs: Inputs) -> Tensor:
        """What y has to be, of inputs in float64."""
        return self._joined(operation_of(self.case).formula(self.case)(*inputs))

    def _joined(self, y: Any) -> Any:
        join = operation_of(self.case).joined
        return join(self.case, y) if join and isinstance(y, tuple) else y

    @cached_property
    def whole_truth(self) -> Tensor:
        """What a result has to be that is compared at once: computed once for all providers, for it takes seconds."""
        return self.truth(_in_float64(self.inputs))

    def chunks(self, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
        """y and what it has to be, cut along one axis other than `dim`. Inputs that broadcast along it stay whole."""
        operation = operation_of(self.case)
        if operation.compared:
            yield from operation.compared(self.case, self.inputs, y)
            return
        if operation.whole:
            yield y, self.whole_truth
            return
        size = self.case.shape[self.axis]
        step = max(1, CHUNK * size // self.case.elements)
        # The result lacks `dim`, so the axes after it have moved forward by one.
        y_axis = self.axis - (self.reduced and self.dim < self.axis)
        for start in range(0, size, step):
            here = min(step, size - start)
            parts = (x if x.shape[self.axis] == 1 else x.narrow(self.axis, start, here) for x in self.inputs)
            yield y.narrow(y_axis, start, here), self.truth(_in_float64(parts))


class JudgeOfDraws:
    """Judges the tokens of a sampler: whether its filters keep each of them, and how often it draws which."""

    def __init__(self, case: Case, inputs: Inputs):
        self.case, self.inputs = case, inputs
        self.filters = operation_of(case).draws or entries_filters.Filters()
        self.shape = torch.Size((case.n_rows,))
        self._kept: dict[float, Tensor] = {}

    def poisoned(self, call: Call) -> object:
        """The call's result, allocated where tokens that no vocabulary has have just been."""
        poison = torch.full(self.shape, -1, dtype=torch.int64, device=self.inputs[0].device)
        del poison
        return call(*self.inputs)

    def allowed(self, own: bool) -> tuple[float, float]:
        """(the accepted share of tokens that are not kept, by how much a sum may miss a boundary)."""
        return 0.0, sampling.OWN_SLACK if own else sampling.OTHERS_SLACK

    def complaint(self, y: object, limits: tuple[float, float]) -> tuple[str, Errors | None]:
        """What is wrong with y ("" if nothing is), and the share of its tokens that are not kept as the largest error.

        Tokens may be of 32 bits, as some have them.
        """
        if not isinstance(y, Tensor) or y.shape != self.shape or y.dtype not in (torch.int64, torch.int32):
            got = f"{tuple(y.shape)} {y.dtype}" if isinstance(y, Tensor) else type(y).__name__
            return f"returned {got} where {tuple(self.shape)} torch.int64 is expected", None
        bad = int(sampling.strays(self.kept(limits[1]), y).sum())
        found = Errors(bad / self.case.n_rows, 0.0, 1.0, 1.0)
        return (f"{bad} of {self.case.n_rows} tokens are none that the filters keep" if bad else ""), found

    def kept(self, slack: float) -> Tensor:
        """Which columns the filters may keep: sorted once for all providers with the same slack."""
        if slack not in self._kept:
            parts = self.inputs[0].split(max(1, CHUNK // 4 // self.case.n_cols))
            self._kept[slack] = torch.cat([sampling.kept(self.filters, x, slack) for x in parts])
        return self._kept[slack]

    def habit(self, call: Call, own: bool) -> str:
        x = self.inputs[0]
        return sampling.misspread(self.filters, call, x.dtype, x.device, own)


def verdict(judge: Judge | JudgeOfDraws, call: Call, own: bool) -> tuple[str, Errors | None]:
    """What is wrong with a call ("" if nothing is), and the errors of its result."""
    wrong, found = judge.complaint(judge.poisoned(call), judge.allowed(own))
    return wrong or judge.habit(call, own), found


def _in_float64(inputs: Iterable[Tensor]) -> Inputs:
    return tuple(x.double() if x.is_floating_point() else x for x in inputs)


def fingerprint(inputs: Inputs) -> list[int]:
    """A number for each input that changes when the input is written: providers share the inputs."""
    integer = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
    return [int(x.view(integer[x.element_size()]).sum(dtype=torch.int64)) for x in inputs]
