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
from fused_softmax.core.layout import as_bytes
from fused_softmax.core.options import Options, is_bool, option

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


def is_reduction(name: str, argument: str, value: Any) -> None:
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
    """What a call asks of its losses, beside logits and targets. It alone declares an option's type, default and check.

    weight: [n_classes], in the dtype of the arithmetic, or None. scale, softcap: the logits are x * scale, and then
    softcap * tanh(of that / softcap). batch_invariant: whether the bits of a row's loss and of its gradient are to
    follow from the row alone. stats: whether the entropy and the likeliest class are wanted too.

    Operators' schemas, their arguments, and those of the reference have the formula's options in this order.
    """

    weight: Tensor | None = option(None, "Tensor?")
    ignore_index: int = option(-100, "int", _is_int)
    reduction: str = option("mean", "str", is_reduction)
    label_smoothing: float = option(0.0, "float", _is_share, whole_rows=True)
    softcap: float | None = option(None, "float?", _is_cap)
    scale: float = option(1.0, "float", _is_finite)
    lse_square_scale: float = option(0.0, "float", _is_number, whole_rows=True)
    batch_invariant: bool = option(False, "bool", is_bool, of_kernels=True)
    stats: bool = False

    @property
    def mean(self) -> bool:
        return self.reduction == "mean"

    @property
    def smooth(self) -> bool:
        return self.label_smoothing > 0

    @property
    def plain(self) -> bool:
        """Whether torch's own cross_entropy has all these options."""
        return self.scale == 1 and self.softcap is None and not self.lse_square_scale

    @cached_property
    def constant(self) -> bool:
        """Whether a kept call has the same numbers each time."""
        return self.plain and not self.smooth

    def kind(self) -> dict[str, Any]:
        """The fields of a LossSpec that these options decide."""
        return {
            "weighted": self.weight is not None, "smooth": self.smooth, "mean": self.mean, "stats": self.stats,
            "finds": self.stats,
            "scaled": self.scale != 1.0 or self.softcap is not None, "capped": self.softcap is not None,
            "z_loss": self.lse_square_scale != 0,
        }  # fmt: skip

    @cached_property
    def key(self) -> tuple:
        """What kept calls depend on of these options, besides the values of numbers and the weight."""
        return *self.kind().values(), self.ignore_index, self.batch_invariant

    def values(self) -> dict[str, Any]:
        """A kernel's arguments by name. ignore_index stays with a launch; each launch gets LossNumbers anew."""
        return {"ignore_index": self.ignore_index, **self.numbers._asdict()}

    @cached_property
    def numbers(self) -> LossNumbers:
        """The numbers as 32 bits hold them.

        None becomes 0 or infinite by rounding, because -inf times 0 would be NaN.
        """
        scale, softcap = self.scale, self.softcap
        return LossNumbers(
            math.copysign(min(max(abs(scale), _LEAST_NORMAL), _GREATEST), scale),
            float("-inf") if scale >= 0 else float("inf"),
            min(max(softcap or 1.0, _LEAST_NORMAL), _GREATEST),
            float(self.label_smoothing),
            float(self.lse_square_scale),
        )

    def exact_numbers(self, x: Tensor) -> Tensor | None:
        """The numbers in fp64, if the logits have it: those of a kernel's arguments have 32 bits."""
        if x.dtype != torch.float64:
            return None
        numbers = (self.scale, self.softcap or 1.0, self.label_smoothing, self.lse_square_scale)
        return torch.stack([torch.full((), number, dtype=x.dtype, device=x.device) for number in numbers])

    def weight_total(self) -> Tensor | None:
        """W = sum_c w_c, if smoothing needs it."""
        return self.weight.sum(dtype=self.weight.dtype) if self.weight is not None and self.smooth else None

    def asked(self) -> dict[str, Any]:
        """What every rank of a group has to give alike."""
        return self.options() | {"weight": self.weight is not None}

    def without_rows(self) -> Self:
        """The options without those that need more of a row than its lse and its target's logit."""
        return replace(self, **{name: self.DEFAULTS[name] for name in WITH_ROWS})

    def reference_arguments(self) -> dict[str, Any]:
        """The arguments of `reference.cross_entropy`, without the reduction."""
        return {name: value for name, value in self.formula().items() if name != "reduction"}

    @classmethod
    def of_operator(cls, x: Tensor, given: Sequence[Any], stats: bool = False) -> Self:
        """From a registered operator's arguments; x: the logits, or what they are made of."""
        return cls.of_traced(given, stats=stats).for_kernels(x)

    def for_kernels(self, x: Tensor) -> Self:
        """With class weights as kernels take them."""
        return self if self.weight is None else replace(self, weight=weight_for_kernels(self.weight, x))


OPTIONS, LOSS_NUMBERS = Loss.OPTIONS, LossNumbers._fields
READ_NUMBERS = tuple(name for name in LOSS_NUMBERS if name != "hidden")  # for kernels that mask columns past the end
read_numbers = attrgetter(*READ_NUMBERS)
NUMBERS = tuple(name for name, option in OPTIONS.items() if option.type.startswith("float"))  # given with each call
WITH_ROWS = tuple(name for name, option in OPTIONS.items() if option.whole_rows)
WITHOUT_ROWS = tuple(name for name in Loss.FORMULA if name not in WITH_ROWS)  # if lse is given


def weight_for_kernels(weight: Tensor | None, x: Tensor) -> Tensor | None:
    """Class weights in the dtype of the arithmetic, contiguous, as constants. x: the logits, or what they are of."""
    return None if weight is None else weight.detach().to(arithmetic_of(x)).contiguous()


def _is_temperature(name: str, argument: str, value: Any) -> None:
    if value is None or isinstance(value, Tensor):
        return
    _is_finite(name, argument, value)
    if not value > 0:
        raise ValueError(f"{name}: {argument} must be more than 0, got {value}")


class Kept(NamedTuple):
    """The columns over which rows [n] are normalised: row r over ids[offsets[r]:offsets[r + 1]], or over those whose
    bits [n, words] are 1; over all where none is given.

    first_row: of the offsets, that of row 0.
    """

    ids: Tensor | None = None
    offsets: Tensor | None = None
    bits: Tensor | None = None
    first_row: int = 0

    @classmethod
    def of(cls, kept: Any) -> "Kept":
        """From what the public functions take."""
        if kept is None:
            return EVERY
        return cls(None, None, kept.reshape(-1, kept.shape[-1])) if isinstance(kept, Tensor) else cls(*kept)

    def for_kernels(self) -> "Kept":
        """With bits as bytes."""
        ids, offsets, bits, first_row = self
        if ids is not None and offsets is not None:
            return Kept(ids.contiguous(), offsets.contiguous(), None, first_row)
        return self if bits is None else Kept(None, None, as_bytes(bits.contiguous()))

    def rows(self, here: slice) -> "Kept":
        """Of some of the rows."""
        if self is EVERY:
            return EVERY
        bits = None if self.bits is None else self.bits[here]
        return Kept(self.ids, self.offsets, bits, self.first_row + here.start)

    def of_rows(self, rows: Tensor) -> "Kept":
        """The Kept of the rows with these indices.

        A list that cannot be read becomes a list of one id that is no class.
        """
        if self.ids is None or self.offsets is None:
            return self if self.bits is None else Kept(None, None, self.bits[rows])
        n_ids, offsets, spoilt = self.ids.shape[0], self.offsets.long(), unreadable(self.offsets, self.ids.shape[0])
        sizes = torch.where(spoilt, 1, offsets[1:] - offsets[:-1])[rows]
        until = sizes.cumsum(0)
        row = torch.repeat_interleave(torch.arange(len(rows), device=rows.device), sizes)
        at = offsets[rows[row]] + torch.arange(len(row), device=rows.device) - (until - sizes)[row]
        ids = torch.cat((self.ids, self.ids.new_full((1,), -1)))[torch.where(spoilt[rows[row]], n_ids, at)]
        return Kept(ids, torch.cat((until.new_zeros(1), until)).to(self.offsets.dtype))

    @property
    def kind(self) -> tuple:
        """What kept calls depend on of a list. Its length differs from call to call."""
        if self.ids is None or self.offsets is None:
            return ()
        return self.ids.dtype, self.offsets.dtype, self.ids.shape[0] < 2**31

    @property
    def given(self) -> Any:
        """As the public functions take it, of rows."""
        return self.bits if self.ids is None else (self.ids, self.offsets)

    @property
    def numbers(self) -> tuple[int, ...]:
        """The numbers of a list that each launch gets."""
        return () if self.ids is None else (self.ids.shape[0], self.first_row)


EVERY = Kept()


def unreadable(offsets: Tensor, n_ids: int) -> Tensor:
    """Which rows' lists cannot be read.

    They are those up to where offsets reach again what they fell from, and those that go past the ids.
    """
    offsets = offsets.long()
    begin, end, upto = offsets[:-1], offsets[1:], offsets.cummax(0).values
    spoilt = (begin < 0) | (begin != upto[:-1]) | (end < begin) | (end > n_ids)
    return spoilt | ((begin != 0) & (torch.arange(len(begin), device=offsets.device) == 0))


_LIST_DTYPES = (torch.int32, torch.int64)


def check_kept(name: str, kept: Any, input: Tensor, shape: tuple[int, ...]) -> None:
    """Raise an error that names `kept` unless it fits logits of a shape. input: what they are, or are made of."""
    words, n_rows = -(-shape[-1] // 32), math.prod(shape[:-1])
    pair = isinstance(kept, tuple) and len(kept) == 2
    if not pair and not isinstance(kept, Tensor):
        raise TypeError(
            f"{name}: kept must be a tuple (ids, offsets) or a Tensor that is a bitmask, not {described(kept)}"
        )
    tensors = {"kept ids": kept[0], "kept offsets": kept[1]} if pair else {"kept": kept}
    dtypes, words_of_dtypes = (_LIST_DTYPES, "int32 or int64") if pair else ((torch.int32,), "int32 as a bitmask")
    for argument, tensor in tensors.items():
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name}: {argument} must be a Tensor, not {described(tensor)}")
        if tensor.is_nested or tensor.layout != torch.strided:
            raise RuntimeError(f"{name}: {argument} must be a dense strided tensor, got {tensor.layout}")
        if tensor.dtype not in dtypes:
            raise TypeError(f"{name}: {argument} must be of {words_of_dtypes}, got {tensor.dtype}")
        if tensor.device != input.device:
            raise RuntimeError(f"{name}: {argument} must be on the input's device {input.device}, got {tensor.device}")
    if not pair:
        if tuple(kept.shape[:-1]) != shape[:-1] or kept.ndim != len(shape) or kept.shape[-1] < words:
            raise ValueError(
                f"{name}: kept must have shape {(*shape[:-1], words)}, a bit for each of {shape[-1]} classes, "
                f"got {tuple(kept.shape)}"
            )
        return
    if kept[0].ndim != 1:
        raise ValueError(f"{name}: kept ids must have shape (n_kept,), got {tuple(kept[0].shape)}")
    if tuple(kept[1].shape) != (n_rows + 1,):
        raise ValueError(
            f"{name}: kept offsets must have shape ({n_rows + 1},) for {n_rows} rows of logits, "
            f"got {tuple(kept[1].shape)}"
        )


def check_lists(name: str, kept: Kept, n_classes: int) -> None:
    """IndexError for offsets and ids that cannot be right, by their values."""
    if kept.ids is None or kept.offsets is None:
        return
    ids, offsets = kept.ids.long(), kept.offsets.long()
    begin, end, n_kept = offsets[:-1], offsets[1:], ids.shape[0]
    if begin.numel() and begin[0] != 0:
        raise IndexError(f"{name}: kept offsets must start at 0, got {int(begin[0])}")
    wrong = (begin > end) | (end > n_kept)
    if wrong.any():
        row = int(wrong.nonzero()[0])
        raise IndexError(
            f"{name}: kept offsets must rise, up to the number of ids {n_kept}, got {int(begin[row])} and "
            f"{int(end[row])} of row {row}"
        )
    ids = ids[: int(offsets[-1])]
    outside = (ids < 0) | (ids >= n_classes)
    if outside.any():
        at = int(outside.nonzero()[0])
        raise IndexError(f"{name}: kept id {int(ids[at])} at {at} is out of range [0, {n_classes - 1}]")


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
        """The logits as a loss has them. softcap(x * scale) over a number t is a softcap with scale and cap over t."""
        t = 1.0 if isinstance(self.temperature, Tensor) else self.temperature
        softcap = None if self.softcap is None else self.softcap / t
        return Loss(ignore_index=self.ignore_index, reduction="none", softcap=softcap, scale=self.scale / t)

    @cached_property
    def key(self) -> tuple:
        """What kept calls depend on of these options, besides the values of numbers and the temperatures."""
        return self.loss.key

    @cached_property
    def numbers(self) -> tuple[tuple[float, ...], tuple[float, ...]]:
        """(what each launch gets, what a launch gets whose kernel masks columns past a row's end)."""
        numbers = self.loss.numbers
        return numbers[:3], (numbers.factor, numbers.cap)

    def asked(self) -> dict[str, Any]:
        """What every rank of a group has to give alike."""
        return self.options() | ({"temperature": "of rows"} if isinstance(self.temperature, Tensor) else {})

    def with_number(self) -> Self:
        """The options without temperatures of rows, which are given beside them: what is kept holds no tensor."""
        return replace(self, temperature=1.0) if isinstance(self.temperature, Tensor) else self


def _is_one_of(*words: str) -> Any:
    def check(name: str, argument: str, value: Any) -> None:
        if value not in words:
            known = ", ".join(f'"{word}"' for word in words)
            raise ValueError(f"{name}: {argument} is one of {known}; got {described(value)}")

    return check


def _is_beta(name: str, argument: str, value: Any) -> None:
    _is_number(name, argument, value)
    if not 0.0 <= value <= 1.0:
        raise ValueError(f"{name}: {argument} must be in [0, 1], got {value}")


KINDS = ("kl", "reverse_kl", "jsd", "tvd")
GIVEN = ("logits", "log_probs", "probs")


@dataclass(frozen=True)
class Divergence(Options):
    """What a call asks of divergences, beside a student's logits and a teacher's rows.

    Logits are softcap(x * scale) / temperature; those of the teacher use the target_ options. kind: also "cross", with
    a teacher of probabilities that label_smoothing spreads. shard: whether rows are a rank's part of longer rows.
    """

    kind: str = option("kl", "str", _is_one_of(*KINDS))
    beta: float = option(0.5, "float", _is_beta)
    scale: float = option(1.0, "float", _is_finite)
    softcap: float | None = option(None, "float?", _is_cap)
    temperature: float | Tensor = option(1.0, "float", _is_temperature, by_row=True)
    target_scale: float = option(1.0, "float", _is_finite)
    target_softcap: float | None = option(None, "float?", _is_cap)
    target_temperature: float | Tensor = option(1.0, "float", _is_temperature, by_row=True)
    target_is: str = option("logits", "str", _is_one_of(*GIVEN))
    label_smoothing: float = 0.0
    shard: bool = False

    @classmethod
    def of_loss(cls, loss: Loss) -> Self:
        """The cross-entropy of targets that are probabilities; the classes' weights stand beside it."""
        return cls(
            kind="cross", target_is="probs", softcap=loss.softcap, scale=loss.scale,
            label_smoothing=loss.label_smoothing,
        )  # fmt: skip

    @cached_property
    def losses(self) -> tuple[Loss, Loss]:
        """The LogProb's loss for the student's logits, and for the teacher's."""
        student = LogProb(scale=self.scale, softcap=self.softcap, temperature=self.temperature)
        teacher = LogProb(
            scale=self.target_scale, softcap=self.target_softcap, temperature=self.target_temperature
        )  # fmt: skip
        return student.loss, teacher.loss

    @property
    def twice(self) -> bool:
        """Whether the terms of the divergence need the states of both whole rows, and so a second pass."""
        return self.kind in ("jsd", "tvd")

    def fields(self) -> dict[str, Any]:
        """The fields of a PairSpec that these options decide."""
        student, teacher = (each.kind() for each in self.losses)
        return {
            "divergence": self.kind, "given": self.target_is, "smooth": self.label_smoothing > 0,
            "scaled": student["scaled"], "capped": student["capped"],
            "target_scaled": teacher["scaled"], "target_capped": teacher["capped"], "shard": self.shard,
        }  # fmt: skip

    @cached_property
    def key(self) -> tuple:
        """What kept calls depend on of these options, besides the values of numbers and the tensors."""
        return tuple(self.fields().values())

    @cached_property
    def numbers(self) -> tuple[float, ...]:
        """The numbers that each launch gets."""
        student, teacher = (each.numbers for each in self.losses)
        return student.factor, student.cap, teacher.factor, teacher.cap, float(self.beta), float(self.label_smoothing)

    def asked(self) -> dict[str, Any]:
        """What every rank of a group has to give alike."""
        return {name: "of rows" if isinstance(each, Tensor) else each for name, each in self.options().items()}

    def with_numbers(self) -> Self:
        """The options without temperatures of rows, which are given beside them: what is kept holds no tensor."""
        plain = self
        if isinstance(plain.temperature, Tensor):
            plain = replace(plain, temperature=1.0)
        if isinstance(plain.target_temperature, Tensor):
            plain = replace(plain, target_temperature=1.0)
        return plain


def check_of_rows(name: str, input: Tensor, shape: tuple[int, ...], argument: str, value: Any) -> None:
    """Raise an error unless a tensor is one number for every row, without a gradient."""
    if not isinstance(value, Tensor):
        return
    if value.layout != torch.strided:
        raise RuntimeError(f"{name}: {argument} must be a dense strided tensor, got {value.layout}")
    if tuple(value.shape) != shape[:-1]:
        raise ValueError(f"{name}: {argument} must have shape {shape[:-1]}, got {tuple(value.shape)}")
    if not value.is_floating_point() or value.device != input.device:
        raise RuntimeError(
            f"{name}: {argument} must be of a float dtype and on the input's device {input.device}, got "
            f"{value.dtype} on {value.device}"
        )
    if value.requires_grad and torch.is_grad_enabled():
        raise RuntimeError(f"{name}: {argument} requires grad, and is a constant; give {argument}.detach()")


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


def refused_loss(
    input: Tensor, result_dtype: torch.dtype, target: Tensor, loss: Loss
) -> str:  # fmt: skip
    """Why the kernels do not take a loss; "" if they do."""
    for dtype in (input.dtype, result_dtype):
        if dtype not in DTYPES:
            return f"no kernel has {dtype}"
    if target.is_floating_point():
        if loss.stats:
            return "targets are probabilities, and token statistics are wanted"
        if loss.weight is not None and loss.weight.requires_grad:
            return "targets are probabilities, and class weights require a gradient"
        if torch.float64 in (input.dtype, target.dtype) or target.dtype not in DTYPES:
            return f"targets are probabilities of {target.dtype}, of logits of {input.dtype}"
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
