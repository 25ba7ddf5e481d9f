"""What a call of sampling asks for beside its logits, checked once: filters, their order, masks and what it returns.

A number is checked for its value. The values of a tensor stay on the device; a row with a wrong one cannot be drawn
from.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass
from numbers import Integral, Real
from typing import Any, Literal

import torch
from torch import Tensor

from fused_softmax.core.described import described, typed
from fused_softmax.core.options import Options, is_bool, option

Order = Literal["sequential", "joint"]
Logprobs = Literal["raw", "processed"]
Leading = tuple[int, ...]  # the dims of rows of logits, of which a parameter may have the first alone, or none
LOGITS = (torch.float32, torch.float16, torch.bfloat16)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
_INTEGERS = (torch.int64, torch.int32)
_LEAST, _GREATEST = 2.0**-149, float(torch.finfo(torch.float32).max)


@dataclass(frozen=True)
class Sampling(Options):
    """The filters of one call, what is done to its logits before, and what it returns.

    temperature, top_k, top_p, min_p: a number for all rows, or a tensor [n_rows] or [].
    top_k, top_p, min_p: None where they are off for every row.
    """

    temperature: float | Tensor = option(1.0, "float", by_row=True)
    top_k: int | Tensor | None = option(None, "int?", by_row=True)
    top_p: float | Tensor | None = option(None, "float?", by_row=True)
    min_p: float | Tensor | None = option(None, "float?", by_row=True)
    order: Order = option("sequential", "str")
    logit_bias: Tensor | None = option(None, "Tensor?")
    bitmask: Tensor | None = option(None, "Tensor?")
    row_indices: Tensor | None = option(None, "Tensor?")
    return_logprobs: Logprobs | None = option(None, "str?")
    top_logprobs: int = option(0, "int")
    return_kept: bool = option(False, "bool")
    token_ids: Tensor | None = option(None, "Tensor?")
    repetition: float | Tensor = option(1.0, "float", by_row=True)
    presence: float | Tensor = option(0.0, "float", by_row=True)
    frequency: float | Tensor = option(0.0, "float", by_row=True)
    return_rank: bool = option(False, "bool")

    @property
    def tensors(self) -> list[Tensor]:
        return [each for each in self.options().values() if isinstance(each, Tensor)]

    def filters(self) -> dict[str, Any]:
        """As the public functions take them."""
        return {name: getattr(self, name) for name in FILTERS}

    def penalties(self) -> dict[str, Any]:
        """As the public functions take them."""
        return {name: getattr(self, name) for name in PENALTIES}

    def asked(
        self, tokens: Any, valid: Any, logprobs: Any, top_logprobs: Any, top_tokens: Any, kept: Any, rank: Any
    ) -> tuple:
        """The results of a call, None for those that it did not ask for."""
        n_top = self.top_logprobs
        return (
            tokens, valid, None if self.return_logprobs is None else logprobs, top_logprobs if n_top else None,
            top_tokens if n_top else None, kept if self.return_kept else None, rank if self.return_rank else None,
        )  # fmt: skip


OPTIONS = Sampling.OPTIONS
FILTERS = "temperature", "top_k", "top_p", "min_p", "order"
PENALTIES = "repetition", "presence", "frequency"


def sampling_of(
    name: str, logits: Tensor, temperature: Any, top_k: Any, top_p: Any, min_p: Any, order: Any, logit_bias: Any = None,
    bitmask: Any = None, row_indices: Any = None, return_logprobs: Any = None, top_logprobs: Any = 0,
    return_kept: Any = False, token_ids: Any = None, repetition: Any = 1.0, presence: Any = 0.0, frequency: Any = 0.0,
    return_rank: Any = False,
) -> Sampling:  # fmt: skip
    """The Sampling of a call on logits [n_rows, ..., vocab], or an error that names the argument.

    A tensor that is given of rows may have all of their leading dims, the first alone, or none.
    """
    n_cols, leading = logits.shape[-1], tuple(logits.shape[:-1])
    if row_indices is not None:
        check_tensor(name, "row_indices", row_indices, logits, _INTEGERS, "int64 or int32")
        if row_indices.ndim != 1:
            raise ValueError(f"{name}: row_indices must have shape [n_draws], got {tuple(row_indices.shape)}")
        leading = (row_indices.shape[0],)
    if order not in ("sequential", "joint"):
        raise ValueError(f'{name}: order must be "sequential" or "joint", got {described(order)}')
    if logit_bias is not None:
        check_tensor(name, "logit_bias", logit_bias, logits, _FLOATS, "16 to 64 bit floats")
        check_shape(name, "logit_bias", logit_bias, *((*each, n_cols) for each in _first_of(leading)))
    if bitmask is not None:
        check_tensor(name, "bitmask", bitmask, logits, (torch.int32,), "int32")
        words, rows = -(-n_cols // 32), _first_of(leading)[1:]
        if not _is_of(bitmask.shape[:-1], rows) or bitmask.shape[-1] < words:
            wanted = " or ".join(str((*each, words)) for each in rows)
            raise ValueError(
                f"{name}: bitmask must have shape {wanted}, a bit for each of {n_cols} columns, "
                f"got {tuple(bitmask.shape)}"
            )
    if return_logprobs not in (None, "raw", "processed"):
        raise ValueError(
            f'{name}: return_logprobs must be None, "raw" or "processed", got {described(return_logprobs)}'
        )
    if isinstance(top_logprobs, bool) or not isinstance(top_logprobs, Integral):
        raise TypeError(f"{name}: top_logprobs must be an int, not {typed(top_logprobs)}")
    top_logprobs = int(top_logprobs)
    if not 0 <= top_logprobs <= n_cols:
        raise ValueError(f"{name}: top_logprobs must be in [0, {n_cols}], got {top_logprobs}")
    if top_logprobs and return_logprobs is None:
        raise ValueError(f'{name}: top_logprobs={top_logprobs} needs return_logprobs="raw" or "processed", got None')
    is_bool(name, "return_kept", return_kept)
    is_bool(name, "return_rank", return_rank)
    if return_rank and return_logprobs is None:
        raise ValueError(f'{name}: return_rank needs return_logprobs="raw" or "processed", got None')
    given = {"repetition": repetition, "presence": presence, "frequency": frequency}
    penalties = {argument: penalty_of(name, argument, value, logits, leading) for argument, value in given.items()}
    if token_ids is not None:
        check_ids(name, token_ids, logits, leading[0])
    check_penalties(name, token_ids, penalties)
    return Sampling(
        temperature=temperature_of(name, temperature, logits, leading),
        top_k=None if top_k is None else top_k_of(name, top_k, logits, leading),
        top_p=None if top_p is None else top_p_of(name, top_p, logits, leading),
        min_p=None if min_p is None else min_p_of(name, min_p, logits, leading),
        order=order,
        logit_bias=logit_bias,
        bitmask=bitmask,
        row_indices=row_indices,
        return_logprobs=return_logprobs,
        top_logprobs=top_logprobs,
        return_kept=return_kept,
        return_rank=return_rank,
        token_ids=token_ids,
        **penalties,
    )


def _first_of(leading: Leading) -> list[tuple[int, ...]]:
    """The shapes of what is given of rows: (), (n_rows,), and so on to all dims."""
    return [leading[:i] for i in range(len(leading) + 1)]


def temperature_of(name: str, value: Any, logits: Tensor, leading: Leading) -> float | Tensor:
    number = _number(name, "temperature", value, logits, leading)
    if not isinstance(number, Tensor) and not 0 <= number < math.inf:
        raise ValueError(f"{name}: temperature must be at least 0 and finite, got {value}")
    return number


def top_k_of(name: str, value: Any, logits: Tensor, leading: Leading) -> int | Tensor | None:
    if isinstance(value, Tensor):
        check_tensor(name, "top_k", value, logits, _INTEGERS, "int64 or int32")
        check_shape(name, "top_k", value, *_first_of(leading))
        return value
    if isinstance(value, bool) or not isinstance(value, Integral):
        raise TypeError(f"{name}: top_k must be an int or a Tensor, not {typed(value)}")
    k = int(value)
    return k if 0 < k < logits.shape[-1] else None


def top_p_of(name: str, value: Any, logits: Tensor, leading: Leading) -> float | Tensor | None:
    number = _number(name, "top_p", value, logits, leading)
    if isinstance(number, Tensor):
        return number
    if not number > 0:
        raise ValueError(f"{name}: top_p must be more than 0, got {value}")
    return number if number < 1 else None


def min_p_of(name: str, value: Any, logits: Tensor, leading: Leading) -> float | Tensor | None:
    number = _number(name, "min_p", value, logits, leading)
    if isinstance(number, Tensor):
        return number
    if not number <= 1:
        raise ValueError(f"{name}: min_p must be at most 1, got {value}")
    return number if number > 0 else None


def penalty_of(name: str, argument: str, value: Any, logits: Tensor, leading: Leading) -> float | Tensor:
    """A penalty; the one of repetition is a factor and more than 0."""
    number = _number(name, argument, value, logits, leading)
    if isinstance(number, Tensor):
        return number
    if not -math.inf < number < math.inf or (argument == "repetition" and number <= 0):
        least = "more than 0 and finite" if argument == "repetition" else "finite"
        raise ValueError(f"{name}: {argument} must be {least}, got {value}")
    return number


def check_ids(name: str, token_ids: Any, logits: Tensor, n_rows: int) -> None:
    """Raise an error that names `token_ids` unless it is one row of integers for each of n_rows."""
    check_tensor(name, "token_ids", token_ids, logits, _INTEGERS, "int64 or int32")
    if token_ids.ndim != 2 or token_ids.shape[0] != n_rows:
        raise ValueError(f"{name}: token_ids must have shape ({n_rows}, length), got {tuple(token_ids.shape)}")


def check_penalties(name: str, token_ids: Any, penalties: dict[str, Any]) -> None:
    """Raise an error that names a penalty which is given without token_ids."""
    for argument, value in penalties.items():
        if token_ids is None and (isinstance(value, Tensor) or value != Sampling.DEFAULTS[argument]):
            raise ValueError(f"{name}: {argument} needs token_ids, got token_ids=None")


def check_logits(name: str, argument: str, logits: Any, dims: str) -> None:
    """Raise an error that names the argument unless it is a dense float tensor of the dims, a row longer than 0."""
    if not isinstance(logits, Tensor):
        raise TypeError(f"{name}: {argument} must be a Tensor, not {type(logits).__name__}")
    if logits.is_nested or logits.layout != torch.strided:
        raise RuntimeError(f"{name}: {argument} must be a dense strided tensor, got {logits.layout}")
    if logits.dtype not in LOGITS:
        raise TypeError(f"{name}: {argument} must be of float32, float16 or bfloat16, got {logits.dtype}")
    if logits.ndim != dims.count(",") + 1 or logits.shape[-1] == 0:
        raise ValueError(f"{name}: {argument} must have shape {dims}, got {tuple(logits.shape)}")


def check_tensor(name: str, argument: str, tensor: Any, logits: Tensor, dtypes: tuple, words: str) -> None:
    """Raise an error that names the argument unless it is a dense tensor of one of the dtypes beside the logits."""
    if not isinstance(tensor, Tensor):
        raise TypeError(f"{name}: {argument} must be a Tensor, not {typed(tensor)}")
    if tensor.is_nested or tensor.layout != torch.strided:
        raise RuntimeError(f"{name}: {argument} must be a dense strided tensor, got {tensor.layout}")
    if tensor.dtype not in dtypes:
        raise TypeError(f"{name}: {argument} must be of {words}, got {tensor.dtype}")
    if tensor.device != logits.device:
        raise RuntimeError(f"{name}: {argument} must be on the logits' device {logits.device}, got {tensor.device}")


def check_shape(name: str, argument: str, tensor: Tensor, *shapes: tuple[int, ...]) -> None:
    if not _is_of(tensor.shape, shapes):
        wanted = " or ".join(str(shape) for shape in shapes)
        raise ValueError(f"{name}: {argument} must have shape {wanted}, got {tuple(tensor.shape)}")


def _is_of(shape: Leading, shapes: Iterable[Leading]) -> bool:
    # For torch.compile, `in` may be False where a size that was dynamic has become a number since.
    return any(tuple(shape) == each for each in shapes)


def check_out(name: str, out: Any, logits: Tensor, dtype: torch.dtype, words: str, shape: tuple[int, ...]) -> None:
    """Raise an error that names `out` unless it can be written: each of its elements has a place of its own."""
    check_tensor(name, "out", out, logits, (dtype,), words)
    check_shape(name, "out", out, shape)
    if _overlaps_itself(out):
        raise RuntimeError(
            f"{name}: out must have a place for each element, got {tuple(out.shape)} elements of strides "
            f"{out.stride()}; give out.contiguous() or a new tensor"
        )


def _overlaps_itself(out: Tensor) -> bool:
    """Whether two elements of a tensor of one or two dims share a place."""
    dims = [(size, stride) for size, stride in zip(out.shape, out.stride(), strict=True) if size > 1]
    if any(stride == 0 for _, stride in dims):
        return True
    if len(dims) < 2:
        return False
    (n, a), (m, b) = dims
    common = math.gcd(a, b)  # the steps that meet first: b // common of a, and a // common of b
    return b // common < n and a // common < m


def check_random(name: str, seed: Any, position: Any, generator: Any, logits: Tensor, n_draws: int) -> None:
    """Raise an error that names the argument where a seed, its position or a generator does not fit."""
    for argument, value in (("seed", seed), ("position", position)):
        if isinstance(value, Tensor):
            check_tensor(name, argument, value, logits, _INTEGERS, "int64 or int32")
            check_shape(name, argument, value, (), (n_draws,))
        elif value is not None:
            if isinstance(value, bool) or not isinstance(value, Integral):
                raise TypeError(f"{name}: {argument} must be an int or a Tensor, not {typed(value)}")
            if not -(2**63) <= int(value) < 2**64:
                raise ValueError(f"{name}: {argument} must fit in 64 bits, got {value}")
    if position is not None and seed is None:
        raise ValueError(f"{name}: position needs a seed, got seed=None")
    if generator is None:
        return
    if not isinstance(generator, torch.Generator):
        raise TypeError(f"{name}: generator must be a torch.Generator, not {type(generator).__name__}")
    if seed is not None:
        raise ValueError(f"{name}: give seed={described(seed)} or a generator, not both")
    if generator.device.type != logits.device.type:
        raise RuntimeError(
            f"{name}: generator must be of the logits' device {logits.device}, got one of {generator.device}"
        )


def _number(name: str, argument: str, value: Any, logits: Tensor, leading: Leading) -> float | Tensor:
    """A number, moved into the range of 32 bits unless it is 0 or infinite; a tensor as it is."""
    if isinstance(value, Tensor):
        check_tensor(name, argument, value, logits, _FLOATS, "16 to 64 bit floats")
        check_shape(name, argument, value, *_first_of(leading))
        return value
    if isinstance(value, bool) or not isinstance(value, Real):
        raise TypeError(f"{name}: {argument} must be a number or a Tensor, not {typed(value)}")
    number = float(value)
    # Only comparisons: a number that a compiler makes dynamic is a symbol.
    if 0 < number < _LEAST:
        return _LEAST
    if -_LEAST < number < 0:
        return -_LEAST
    if _GREATEST < number < math.inf:
        return _GREATEST
    if -math.inf < number < -_GREATEST:
        return -_GREATEST
    return number
