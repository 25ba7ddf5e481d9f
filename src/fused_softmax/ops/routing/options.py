"""What a call of `route` asks for beside its logits, checked once, before anything runs."""

from collections.abc import Sequence
from dataclasses import MISSING, dataclass
from numbers import Integral, Real
from typing import Any, Literal

import torch
from torch import Tensor

from fused_softmax.core.described import described, shape_said, typed
from fused_softmax.core.options import Options, is_bool, is_finite, option, plain_number
from fused_softmax.core.route import needs_grad

Score = Literal["softmax", "sigmoid", "sqrtsoftplus"]
GroupScore = Literal["top2", "max"]
LOGITS = (torch.float32, torch.float16, torch.bfloat16)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_INTEGERS = (torch.int32, torch.int64)


def _is_int(name: str, argument: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: {argument} must be an int, not {typed(value)}")


def _is_int_or_none(name: str, argument: str, value: Any) -> None:
    if value is not None:
        _is_int(name, argument, value)


def _is_score(name: str, argument: str, value: Any) -> None:
    if not isinstance(value, str) or value not in ("softmax", "sigmoid", "sqrtsoftplus"):
        raise ValueError(f'{name}: {argument} must be "softmax", "sigmoid" or "sqrtsoftplus", got {described(value)}')


def _is_group_score(name: str, argument: str, value: Any) -> None:
    if not isinstance(value, str) or value not in ("top2", "max"):
        raise ValueError(f'{name}: {argument} must be "top2" or "max", got {described(value)}')


def _is_finite(name: str, argument: str, value: Any) -> None:
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: {argument} must be a number, not {typed(value)}")
    if not is_finite(value):
        raise ValueError(f"{name}: {argument} must be finite, got {described(value)}")


@dataclass(frozen=True)
class Routing(Options):
    """What a call asks for. Tensors of rows have the leading dims of the logits, or are flat where those are.

    bias: [n_experts]. noise: as the logits. indices: [..., k]. row_mask: [...].
    examples: of vmap, how many have as many rows each, one behind another: their sums and losses are [examples, ...].
    """

    k: int = option(MISSING, "int", _is_int)
    score: Score = option("softmax", "str", _is_score)
    score_first: bool = option(True, "bool", is_bool)
    bias: Tensor | None = option(None, "Tensor?")
    n_groups: int = option(1, "int", _is_int)
    groups_kept: int | None = option(None, "int?", _is_int_or_none)
    group_score: GroupScore = option("top2", "str", _is_group_score)
    renormalize: bool = option(True, "bool", is_bool)
    scale: float = option(1.0, "float", _is_finite)
    noise: Tensor | None = option(None, "Tensor?")
    indices: Tensor | None = option(None, "Tensor?")
    row_mask: Tensor | None = option(None, "Tensor?")
    dense: bool = option(False, "bool", is_bool)
    return_aux_loss: bool = option(False, "bool", is_bool)
    return_z_loss: bool = option(False, "bool", is_bool)
    sequence_length: int | None = option(None, "int?", _is_int_or_none)
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
        raise RuntimeError(
            f"{name}: logits must be a dense strided tensor, got a {kind} one of shape {shape_said(logits)}"
        )
    if logits.dtype not in dtypes:
        raise TypeError(f"{name}: logits must be of float32, float16 or bfloat16, got {described(logits)}")
    if not logits.ndim or not logits.shape[-1]:
        raise ValueError(
            f"{name}: logits must have shape [..., n_experts] with at least one expert, got {tuple(logits.shape)}"
        )


def routing_of(name: str, logits: Tensor, given: dict[str, Any]) -> Routing:
    """The Routing of a call on logits that were checked, or an error that names the argument."""
    for argument, each in Routing.OPTIONS.items():
        if each.check is not None:
            each.check(name, argument, given[argument])
    given = {argument: plain_number(value) for argument, value in given.items()}
    options = Routing(**given)
    _check_counts(name, logits, options)
    *leading, n_experts = logits.shape
    asked: tuple[tuple[str, tuple[torch.dtype, ...], str, tuple[int, ...], str], ...] = (
        ("bias", _FLOATS, "16 to 64 bit floats", (n_experts,), "one for each expert"),
        ("noise", _FLOATS, "16 to 64 bit floats", tuple(logits.shape), "that"),
        ("indices", _INTEGERS, "int32 or int64", (*leading, options.k), "k for each row"),
        ("row_mask", (torch.bool,), "bool", tuple(leading), "one for each row"),
    )
    for argument, dtypes, words, shape, what in asked:
        if given[argument] is not None:
            _check_tensor(name, argument, given[argument], logits, dtypes, words, shape, what)
    return options


def _check_counts(name: str, logits: Tensor, options: Routing) -> None:
    n_experts, n_rows = logits.shape[-1], logits.shape[:-1].numel()
    k, n_groups, kept, length = options.k, options.n_groups, options.groups_kept, options.sequence_length
    if not 1 <= k <= n_experts:
        raise ValueError(f"{name}: k must be from 1 to {n_experts}, the experts of {_of(logits)}, got {described(k)}")
    if n_groups < 1 or n_experts % n_groups:
        raise ValueError(
            f"{name}: n_groups must be at least 1 and divide the {n_experts} experts of {_of(logits)}, got "
            f"{described(n_groups)}"
        )
    if kept is None:
        kept = n_groups
    if not 1 <= kept <= n_groups:
        raise ValueError(
            f"{name}: groups_kept must be from 1 to n_groups={n_groups} for {_of(logits)}, got {described(kept)}"
        )
    size = n_experts // n_groups
    if k > kept * size:
        raise ValueError(
            f"{name}: k must be at most {kept * size}, the experts in groups_kept={kept} groups of {size}, for "
            f"{_of(logits)} with n_groups={n_groups}, got {k}"
        )
    if length is not None and (length < 1 or n_rows % length):
        raise ValueError(
            f"{name}: sequence_length must be at least 1 and divide the {n_rows} rows of {_of(logits)}, got "
            f"{described(length)}"
        )


def _of(logits: Tensor) -> str:
    return f"logits of shape {tuple(logits.shape)}"


def _check_tensor(
    name: str, argument: str, tensor: Any, logits: Tensor, dtypes: tuple[torch.dtype, ...], words: str,
    shape: tuple[int, ...], what: str,
) -> None:  # fmt: skip
    if not isinstance(tensor, Tensor):
        raise TypeError(
            f"{name}: {argument} must be a Tensor of shape {shape}, {what} of {_of(logits)}, not {typed(tensor)}"
        )
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise RuntimeError(
            f"{name}: {argument} must be a dense strided tensor, got a {kind} one of shape {shape_said(tensor)}"
        )
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: {argument} must be of {words}, got {described(tensor)}")
    if tensor.device != logits.device:
        raise RuntimeError(
            f"{name}: {argument} must be on the device of the logits, {logits.device}, got {described(tensor)}"
        )
    if tuple(tensor.shape) != shape:
        raise ValueError(
            f"{name}: {argument} must have shape {shape}, {what} of {_of(logits)}, got {tuple(tensor.shape)}"
        )
    if needs_grad(tensor):
        raise RuntimeError(
            f"{name}: {argument} of shape {shape} requires grad, and is a constant that gets none; give "
            f"{argument}.detach()"
        )


def check_ids(name: str, indices: Tensor, row_mask: Tensor | None, n_experts: int) -> None:
    """IndexError if an id to replay is neither an expert nor -1, or stands twice in a row that counts."""
    counts = True if row_mask is None else row_mask.unsqueeze(-1)
    foreign = ((indices < -1) | (indices >= n_experts)) & counts
    if foreign.any():
        at = foreign.nonzero()[0].tolist()
        raise IndexError(
            f"{name}: indices of shape {tuple(indices.shape)} must be from -1 to {n_experts - 1}, for {n_experts} "
            f"experts, got {int(indices[tuple(at)])} at {at}"
        )
    ordered = indices.sort(-1).values
    twice = (ordered[..., 1:] == ordered[..., :-1]) & (ordered[..., 1:] >= 0) & counts
    if twice.any():
        *row, _ = at = twice.nonzero()[0].tolist()
        raise IndexError(
            f"{name}: indices of shape {tuple(indices.shape)} must have an expert at most once in each row, got "
            f"{int(ordered[..., 1:][tuple(at)])} twice{f' in row {row}' if row else ''}"
        )
