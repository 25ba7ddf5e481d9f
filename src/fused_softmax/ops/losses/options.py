"""The options of a loss and their checks, and what kernels are given for its numbers."""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from numbers import Real
from operator import attrgetter
from typing import Any, NamedTuple, Self

import torch
from torch import Tensor

from fused_softmax.core.checks import DTYPES, arithmetic_of
from fused_softmax.core.described import described, typed
from fused_softmax.core.options import Options, option

_LEAST_NORMAL, _GREATEST = 2.0**-126, float(torch.finfo(torch.float32).max)


class LossNumbers(NamedTuple):
    """The numbers that each launch is given, by the names of kernels' parameters."""

    factor: float
    hidden: float
    cap: float
    smoothing: float
    lse_square_scale: float


def _is_int(name: str, argument: str, value: Any) -> None:
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name}: {argument} must be an int, not {typed(value)}")
    if not -(2**63) <= value < 2**63:
        raise ValueError(f"{name}: {argument} must fit in 64 bits, got {value}")


def _is_reduction(name: str, argument: str, value: Any) -> None:
    if value not in ("mean", "sum", "none"):
        raise ValueError(f'{name}: {argument} must be "mean", "sum" or "none", got {described(value)}')


def _is_number(name: str, argument: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: {argument} must be a number, not {typed(value)}")


def _is_share(name: str, argument: str, value: Any) -> None:
    _is_number(name, argument, value)
    if not 0.0 <= value <= 1.0:
        raise RuntimeError(f"{name}: {argument} must be in [0, 1], got {value}")


def _is_finite(name: str, argument: str, value: Any) -> None:
    if value is None:
        return
    _is_number(name, argument, value)
    if not -math.inf < value < math.inf:  # isfinite takes no number that a compiler traces
        raise ValueError(f"{name}: {argument} must be finite, got {value}")


def _is_cap(name: str, argument: str, value: Any) -> None:
    _is_finite(name, argument, value)
    if value is not None and value <= 0:
        raise ValueError(f"{name}: {argument} must be more than 0, got {value}")


@dataclass(frozen=True)
class Loss(Options):
    """What a call asks of its losses, beside logits and targets. An option's type, default and check stand here alone.

    weight: [n_classes], in the dtype of the arithmetic, or None. scale, softcap: the logits are x * scale, and then
    softcap * tanh(of that / softcap). stats: whether the entropy and the likeliest class are wanted too.

    Operators' schemas, their arguments, and those of the reference have the options in this order.
    """

    weight: Tensor | None = option(None, "Tensor?")
    ignore_index: int = option(-100, "int", _is_int)
    reduction: str = option("mean", "str", _is_reduction)
    label_smoothing: float = option(0.0, "float", _is_share, whole_rows=True)
    softcap: float | None = option(None, "float?", _is_cap)
    scale: float = option(1.0, "float", _is_finite)
    lse_square_scale: float = option(0.0, "float", _is_number, whole_rows=True)
    stats: bool = False

    @property
    def mean(self) -> bool:
        return self.reduction == "mean"

    @property
    def smooth(self) -> bool:
        return self.label_smoothing > 0

    @property
    def plain(self) -> bool:
        """Whether torch's own cross_entropy has all that is asked."""
        return self.scale == 1 and self.softcap is None and not self.lse_square_scale and not self.stats

    def kind(self) -> dict[str, Any]:
        """The fields of a LossSpec that this decides."""
        return {
            "weighted": self.weight is not None, "smooth": self.smooth, "mean": self.mean, "stats": self.stats,
            "finds": self.stats,
            "scaled": self.scale != 1.0 or self.softcap is not None, "capped": self.softcap is not None,
            "z_loss": self.lse_square_scale != 0,
        }  # fmt: skip

    def key(self) -> tuple:
        """What kept calls depend on of this, beside the values of its numbers and the weight."""
        return *self.kind().values(), self.ignore_index

    def values(self) -> dict[str, Any]:
        """A kernel's arguments by name. ignore_index stays with a launch; LossNumbers are given with each."""
        return {"ignore_index": self.ignore_index, **self.numbers()._asdict()}

    def numbers(self) -> LossNumbers:
        """The numbers as 32 bits hold them, where another is 0 or infinite: -inf times 0 would be NaN."""
        scale, softcap = self.scale, self.softcap
        return LossNumbers(
            math.copysign(min(max(abs(scale), _LEAST_NORMAL), _GREATEST), scale),
            float("-inf") if scale >= 0 else float("inf"),
            min(max(softcap or 1.0, _LEAST_NORMAL), _GREATEST),
            float(self.label_smoothing),
            float(self.lse_square_scale),
        )

    def exact_numbers(self, x: Tensor) -> Tensor | None:
        """The numbers in fp64, where the logits have it: a kernel's own have 32 bits."""
        if x.dtype != torch.float64:
            return None
        numbers = (self.scale, self.softcap or 1.0, self.label_smoothing, self.lse_square_scale)
        return torch.stack([torch.full((), number, dtype=x.dtype, device=x.device) for number in numbers])

    def weight_total(self) -> Tensor | None:
        """W = sum_c w_c, where smoothing asks for it."""
        return self.weight.sum(dtype=self.weight.dtype) if self.weight is not None and self.smooth else None

    def asked(self) -> dict[str, Any]:
        """What every rank of a group has to ask alike."""
        return self.options() | {"weight": self.weight is not None}

    def without_rows(self) -> Self:
        """Less the options that need more of a row than its lse and its target's logit."""
        return replace(self, **{name: self.DEFAULTS[name] for name in WITH_ROWS})

    def reference_arguments(self) -> dict[str, Any]:
        """As `reference.cross_entropy` takes them, but for the reduction."""
        return {name: value for name, value in self.options().items() if name != "reduction"}

    @classmethod
    def of_operator(cls, x: Tensor, given: Sequence[Any], stats: bool = False) -> Self:
        """From a registered operator's arguments; x: the logits, or what they are made of."""
        return cls.of_traced(given, stats=stats).for_kernels(x)

    def for_kernels(self, x: Tensor) -> Self:
        """With class weights as kernels take them."""
        return self if self.weight is None else replace(self, weight=weight_for_kernels(self.weight, x))


OPTIONS, LOSS_NUMBERS = Loss.OPTIONS, LossNumbers._fields
READ_NUMBERS = tuple(name for name in LOSS_NUMBERS if name != "hidden")  # of kernels that mask columns past a row's end
read_numbers = attrgetter(*READ_NUMBERS)
NUMBERS = tuple(name for name, option in OPTIONS.items() if option.type.startswith("float"))  # given with each call
WITH_ROWS = tuple(name for name, option in OPTIONS.items() if option.whole_rows)
WITHOUT_ROWS = tuple(name for name in OPTIONS if name not in WITH_ROWS)  # where lse is given


def weight_for_kernels(weight: Tensor | None, x: Tensor) -> Tensor | None:
    """Class weights in the dtype of the arithmetic, contiguous, as constants. x: the logits, or what they are of."""
    return None if weight is None else weight.detach().to(arithmetic_of(x)).contiguous()


def _is_temperature(name: str, argument: str, value: Any) -> None:
    if value is None or isinstance(value, Tensor):
        return
    _is_finite(name, argument, value)
    if not value > 0:
        raise ValueError(f"{name}: {argument} must be more than 0, got {value}")


@dataclass(frozen=True)
class LogProb(Options):
    """What a call asks of log-probabilities, beside logits and targets: of logits softcap(x * scale) / temperature.

    temperature: a number, or a constant of each row.
    """

    ignore_index: int = option(-100, "int", _is_int)
    scale: float = option(1.0, "float", _is_finite)
    softcap: float | None = option(None, "float?", _is_cap)
    temperature: float | Tensor = option(1.0, "float", _is_temperature, by_row=True)

    @cached_property
    def loss(self) -> Loss:
        """The logits as a loss has them: divided by a number t, softcap(x * scale) is a softcap of both over t."""
        t = 1.0 if isinstance(self.temperature, Tensor) else self.temperature
        softcap = None if self.softcap is None else self.softcap / t
        return Loss(ignore_index=self.ignore_index, reduction="none", softcap=softcap, scale=self.scale / t)

    @cached_property
    def key(self) -> tuple:
        """What kept calls depend on of this, beside the values of its numbers and the temperatures."""
        return self.loss.key()

    @cached_property
    def numbers(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(all that each launch is given, what a launch is given that masks columns past a row's end)."""
        numbers = self.loss.numbers()
        return numbers[:3], (numbers.factor, numbers.cap)

    def asked(self) -> dict[str, Any]:
        """What every rank of a group has to ask alike."""
        return self.options() | ({"temperature": "of rows"} if isinstance(self.temperature, Tensor) else {})

    def with_number(self) -> Self:
        """Less temperatures of rows, which are given beside it: what is kept holds no tensor."""
        return replace(self, temperature=1.0) if isinstance(self.temperature, Tensor) else self


_INDICES = (torch.int64, torch.int32, torch.uint8)


def check_logits(name: str, argument: str, dtype: torch.dtype, shape: tuple[int, ...], target: Any) -> None:
    """Logits of a dtype and shape [n_classes] or [n, n_classes, ...], and a target that fits them, or torch's error."""
    if not isinstance(target, Tensor):
        raise TypeError(f"{name}: target must be a Tensor, not {type(target).__name__}")
    if target.is_nested or target.layout != torch.strided:
        raise RuntimeError(f"{name}: target must be a dense strided tensor, got {target.layout}")
    if not dtype.is_floating_point:
        raise NotImplementedError(f"{name}: {argument} must be of a float dtype, got {dtype}")
    if not shape:
        error = RuntimeError if target.ndim == 0 else ValueError
        raise error(f"{name}: {argument} must have a class dim, got shape ()")
    of_targets = () if len(shape) == 1 else (shape[0], *shape[2:])
    if target.is_floating_point():
        if tuple(target.shape) != shape:
            raise RuntimeError(
                f"{name}: target of probabilities must have shape {shape}, as {argument} has, got {tuple(target.shape)}"
            )
    elif target.dtype not in _INDICES:
        raise (NotImplementedError if target.is_cuda else RuntimeError)(  # as torch
            f"{name}: target must be of int64, int32 or uint8, or of probabilities, got {target.dtype}"
        )
    elif tuple(target.shape) != of_targets:
        # torch's types of error: of the batch, and of what follows it.
        batches = len(shape) < 3 or target.ndim == 0 or target.shape[0] != shape[0]
        raise (ValueError if batches else RuntimeError)(
            f"{name}: target must have shape {of_targets} for {argument} of shape {shape}, got {tuple(target.shape)}"
        )


def loss_of(
    name: str, input: Tensor, target: Tensor, n_classes: int, dtype: Any, stats: bool = False, **options: Any
) -> Loss:
    """The Loss of a call, its weight as given, or an error that names the argument."""
    if target.device != input.device:
        raise RuntimeError(f"{name}: target must be on the input's device {input.device}, got {target.device}")
    for argument, value in options.items():
        check = OPTIONS[argument].check
        if check is not None:
            check(name, argument, value)
    weight = options["weight"]
    if weight is not None:
        if not isinstance(weight, Tensor):
            raise TypeError(f"{name}: weight must be a Tensor, not {type(weight).__name__}")
        if tuple(weight.shape) != (n_classes,):
            raise RuntimeError(
                f"{name}: weight must have shape ({n_classes},), one of every class, got {tuple(weight.shape)}"
            )
        if weight.device != input.device:
            raise RuntimeError(f"{name}: weight must be on the input's device {input.device}, got {weight.device}")
        if not weight.is_floating_point():
            raise RuntimeError(f"{name}: weight must be of a float dtype, got {weight.dtype}")
        if not target.is_floating_point():
            check_constant(name, weight)
    if dtype is not None and (not isinstance(dtype, torch.dtype) or not dtype.is_floating_point):
        raise TypeError(f"{name}: dtype must be a float torch.dtype, got {described(dtype)}")
    scale = options.pop("scale")
    return Loss(**options, scale=1.0 if scale is None else float(scale), stats=stats)


def refused_loss(input: Tensor, result_dtype: torch.dtype, target: Tensor, loss: Loss) -> str:
    """Why the kernels do not take a loss; "" if they do."""
    for dtype in (input.dtype, result_dtype):
        if dtype not in DTYPES:
            return f"no kernel has {dtype}"
    if target.is_floating_point():
        return "targets are probabilities"
    if loss.scale == 0:
        return "scale is 0"
    return ""


def check_constant(name: str, weight: Tensor | None) -> None:
    """RuntimeError, as torch's, where class weights beside class indices want a gradient: there is none by them."""
    if weight is not None and weight.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(
            f"{name}: weight requires grad, and a loss of class indices has no gradient by its class weights; give "
            "weight.detach(), or probabilities as targets"
        )


def check_lse(name: str, lse: Any, target: Tensor, loss: Loss) -> None:
    """Raise an error that names the argument where an lse does not fit targets of class indices, or the loss."""
    if not isinstance(lse, Tensor):
        raise TypeError(f"{name}: lse must be a Tensor, not {type(lse).__name__}")
    if lse.is_nested or lse.layout != torch.strided:
        raise RuntimeError(f"{name}: lse must be a dense strided tensor, got {lse.layout}")
    if not lse.is_floating_point():
        raise TypeError(f"{name}: lse must be of a float dtype, got {lse.dtype}")
    if target.is_floating_point():
        raise ValueError(f"{name}: lse takes targets of class indices, got probabilities")
    if lse.shape != target.shape:
        raise ValueError(f"{name}: lse must have the targets' shape {tuple(target.shape)}, got {tuple(lse.shape)}")
    if lse.device != target.device:
        raise RuntimeError(f"{name}: lse must be on the input's device {target.device}, got {lse.device}")
    whole = {name: getattr(loss, name) for name in WITH_ROWS}
    whole["return_token_stats"] = loss.stats
    for argument, asked in whole.items():
        if asked:
            raise ValueError(f"{name}: {argument} takes whole rows, and lse= is of longer ones")
