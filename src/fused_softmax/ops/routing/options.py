"""What a call of `route` asks for beside its logits, checked once, before anything runs."""

import math
from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from numbers import Integral, Real
from typing import Any, Literal

import torch
from torch import Tensor

from fused_softmax.core.described import described, typed
from fused_softmax.core.options import Options, is_bool, option
from fused_softmax.core.route import needs_grad

Score = Literal["softmax", "sigmoid", "sqrtsoftplus"]
GroupScore = Literal["top2", "max"]
LOGITS = (torch.float32, torch.float16, torch.bfloat16)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_INTEGERS = (torch.int32, torch.int64)


def _is_count(name: str, argument: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: {argument} must be an int, not {typed(value)}")
    if value < 1:
        raise ValueError(f"{name}: {argument} must be at least 1, got {value}")


def _is_count_or_none(name: str, argument: str, value: Any) -> None:
    if value is not None:
        _is_count(name, argument, value)


def _is_score(name: str, argument: str, value: Any) -> None:
    if value not in ("softmax", "sigmoid", "sqrtsoftplus"):
        raise ValueError(f'{name}: {argument} must be "softmax", "sigmoid" or "sqrtsoftplus", got {described(value)}')


def _is_group_score(name: str, argument: str, value: Any) -> None:
    if value not in ("top2", "max"):
        raise ValueError(f'{name}: {argument} must be "top2" or "max", got {described(value)}')


def _is_number(name: str, argument: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: {argument} must be a number, not {typed(value)}")


def _is_finite(name: str, argument: str, value: Any) -> None:
    _is_number(name, argument, value)
    if not -math.inf < value < math.inf:
        raise ValueError(f"{name}: {argument} must be finite, got {value}")


@dataclass(frozen=True)
class Routing(Options):
    """What a call asks for. Tensors of rows have the leading dims of the logits, or are flat where those are.

    bias: [n_experts]. noise: as the logits. indices: [..., k]. row_mask: [...].
    examples: of vmap, how many have as many rows each, one behind another: their sums and losses are [examples, ...].
    """

    k: int = option(MISSING, "int", _is_count)
    score: Score = option("softmax", "str", _is_score)
    score_first: bool = option(True, "bool", is_bool)
    bias: Tensor | None = option(None, "Tensor?")
    n_groups: int = option(1, "int", _is_count)
    groups_kept: int | None = option(None, "int?", _is_count_or_none)
    group_score: GroupScore = option("top2", "str", _is_group_score)
    renormalize: bool = option(True, "bool", is_bool)
    scale: float = option(1.0, "float", _is_finite)
    noise: Tensor | None = option(None, "Tensor?")
    indices: Tensor | None = option(None, "Tensor?")
    row_mask: Tensor | None = option(None, "Tensor?")
    dense: bool = option(False, "bool", is_bool)
    return_aux_loss: bool = option(False, "bool", is_bool)
    return_z_loss: bool = option(False, "bool", is_bool)
    sequence_length: int | None = option(None, "int?", _is_count_or_none)
    return_counts: bool = option(True, "bool", is_bool)
    examples: int | None = option(None, "SymInt?")

    @property
    def key(self) -> tuple:
        """All but tensors."""
        return tuple(getattr(self, name) for name in _PLAIN)

    @property
    def sums(self) -> bool:
        """Whether rows are added up."""
        return self.return_counts or self.return_aux_loss or self.return_z_loss

    @property
    def in_sequences(self) -> bool:
        """Whether rows are added up in sequences: those that are asked for, else examples."""
        return self.sums and (self.examples is not None or (self.return_aux_loss and self.sequence_length is not None))

    def length(self, n_rows: int) -> int:
        """Rows of a sequence; all rows where there are none."""
        of_loss = self.sequence_length if self.return_aux_loss else None
        return (n_rows // (self.examples or 1) or 1) if of_loss is None else of_loss

    @property
    def totals(self) -> bool:
        """Whether results need the sum of exp(x - m) over all experts of a row."""
        if self.sums:
            return True
        of_best = self.renormalize and self.bias is None and self.indices is None and not self.grouped
        return self.score == "softmax" and self.score_first and not of_best

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: each for name, each in self.options().items() if isinstance(each, Tensor)}

    @property
    def grouped(self) -> bool:
        """Whether groups leave out any expert."""
        return self.groups_kept is not None and self.groups_kept < self.n_groups


_PLAIN = tuple(name for name, each in Routing.OPTIONS.items() if each.type != "Tensor?")


def check_logits(name: str, logits: Any, dtypes: Sequence[torch.dtype] = LOGITS) -> None:
    """An error that names the argument unless it is a dense float tensor [..., n_experts] of at least one expert."""
    if not isinstance(logits, Tensor):
        raise TypeError(f"{name}: logits must be a Tensor, not {typed(logits)}")
    if logits.is_nested or logits.layout != torch.strided:
        kind = "nested" if logits.is_nested else str(logits.layout)
        raise RuntimeError(f"{name}: logits must be a dense strided tensor, got a {kind} one")
    if logits.dtype not in dtypes:
        raise TypeError(f"{name}: logits must be of float32, float16 or bfloat16, got {logits.dtype}")
    if not logits.ndim or not logits.shape[-1]:
        raise ValueError(
            f"{name}: logits must have shape [..., n_experts] with at least one expert, got {tuple(logits.shape)}"
        )


def routing_of(name: str, logits: Tensor, given: dict[str, Any]) -> Routing:
    """The Routing of a call on logits that were checked, or an error that names the argument."""
    for argument, each in Routing.OPTIONS.items():
        if each.check is not None:
            each.check(name, argument, given[argument])
    options = Routing(**given)
    _check_counts(name, logits, options)
    *leading, n_experts = logits.shape
    of_rows = f"one for each row of logits of shape {tuple(logits.shape)}"
    asked: tuple[tuple[str, tuple[torch.dtype, ...], str, tuple[int, ...], str], ...] = (
        ("bias", _FLOATS, "16 to 64 bit floats", (n_experts,), "one for each expert"),
        ("noise", _FLOATS, "16 to 64 bit floats", tuple(logits.shape), "that of the logits"),
        ("indices", _INTEGERS, "int32 or int64", (*leading, options.k), f"{options.k} {of_rows}"),
        ("row_mask", (torch.bool,), "bool", tuple(leading), of_rows),
    )
    for argument, dtypes, words, shape, what in asked:
        if given[argument] is not None:
            _check_tensor(name, argument, given[argument], logits, dtypes, words, shape, what)
    return options


def _check_counts(name: str, logits: Tensor, options: Routing) -> None:
    n_experts, n_rows = logits.shape[-1], logits.shape[:-1].numel()
    if options.k > n_experts:
        raise ValueError(f"{name}: k must be at most the {n_experts} experts of the logits, got {options.k}")
    if n_experts % options.n_groups:
        raise ValueError(f"{name}: n_groups must divide the {n_experts} experts of the logits, got {options.n_groups}")
    kept = options.n_groups if options.groups_kept is None else options.groups_kept
    if kept > options.n_groups:
        raise ValueError(f"{name}: groups_kept must be at most the {options.n_groups} of n_groups, got {kept}")
    most = kept * (n_experts // options.n_groups)
    if options.k > most:
        raise ValueError(
            f"{name}: k must be at most the {most} experts of groups_kept={kept} groups of "
            f"{n_experts // options.n_groups}, got {options.k}"
        )
    if options.sequence_length is not None and n_rows % options.sequence_length:
        raise ValueError(
            f"{name}: sequence_length must divide the {n_rows} rows of logits of shape {tuple(logits.shape)}, got "
            f"{options.sequence_length}"
        )


def _check_tensor(
    name: str, argument: str, tensor: Any, logits: Tensor, dtypes: tuple[torch.dtype, ...], words: str,
    shape: tuple[int, ...], what: str,
) -> None:  # fmt: skip
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: {argument} must be a Tensor, not {typed(tensor)}")
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise RuntimeError(f"{name}: {argument} must be a dense strided tensor, got a {kind} one")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: {argument} must be of {words}, got {tensor.dtype}")
    if tensor.device != logits.device:
        raise RuntimeError(f"{name}: {argument} must be on the logits' device {logits.device}, got {tensor.device}")
    if tuple(tensor.shape) != shape:
        raise ValueError(f"{name}: {argument} must have shape {shape}, {what}, got {tuple(tensor.shape)}")
    if needs_grad(tensor):
        raise RuntimeError(
            f"{name}: {argument} requires grad, and is a constant that gets none; give {argument}.detach()"
        )


def check_ids(name: str, indices: Tensor, row_mask: Tensor | None, n_experts: int) -> None:
    """IndexError if an id to replay is neither an expert nor -1, or stands twice in a row that counts."""
    ids = indices if row_mask is None else indices[row_mask]
    foreign = (ids < -1) | (ids >= n_experts)
    if foreign.any():
        raise IndexError(f"{name}: indices has {int(ids[foreign][0])}, which is out of range [-1, {n_experts - 1}]")
    ordered = ids.sort(-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0)
    if twice.any():
        raise IndexError(f"{name}: indices has {int(ordered[..., 1:][twice][0])} more than once in a row")
