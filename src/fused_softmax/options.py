"""What a call asks for beside its tensors, checked once: what is done to scores, and the terms of a loss.

z = x * scale + mask.  A bool mask keeps where it is True; causal keeps column j of query i where j - i <= n_keys -
n_queries, so that the last query sees every key (bottom-right aligned). What is not kept is -inf.
A scale of 0 is temperature 0: the row's first maximum alone is kept, and scaled by 1.
A sink is one more score of every row, which is neither scaled nor masked and has no column: it counts in the sum alone.
"""

import math
from dataclasses import dataclass, replace
from numbers import Real
from typing import Any, Literal

import torch
from torch import Tensor

from fused_softmax.described import described, typed

DTYPES = (torch.float32, torch.float16, torch.bfloat16, torch.float64)  # of results
MaskedRows = Literal["nan", "zero"]
_LEAST = 2.0**-149  # of fp32, above 0


@dataclass(frozen=True)
class Scores:
    """scale, mask, causality and sink of one call, in torch's terms.

    scale: a number, or a tensor that broadcasts against the input with its last dim 1.
    mask: bool or of a float dtype; broadcasts against the input, and is never expanded in memory.
    masked_rows: what a row gets of which nothing is kept: NaN, or probabilities of zero.
    never_zero: whether a scale tensor is known to hold no 0.
    moved: whether scale, mask or sink came from another device, and is a copy.
    sink: a number, or a tensor that broadcasts as a scale does.
    """

    scale: float | Tensor | None = None
    mask: Tensor | None = None
    is_causal: bool = False
    masked_rows: MaskedRows = "nan"
    never_zero: bool = False
    moved: bool = False
    sink: float | Tensor | None = None

    @property
    def plain(self) -> bool:
        return is_plain(self.scale, self.mask, self.is_causal, self.masked_rows, self.sink)

    @property
    def greedy(self) -> bool:
        """Whether a row may have scale 0."""
        return not self.never_zero if isinstance(self.scale, Tensor) else self.scale == 0

    @property
    def hides(self) -> bool:
        """Whether an element that is -inf may have been masked, and then has no gradient."""
        return self.mask is not None or self.is_causal or self.masked_rows == "zero"

    @property
    def added(self) -> bool:
        """Whether the kernels hold sums in fp32, and not the elements they read."""
        return self.mask is not None and self.mask.dtype != torch.bool

    @property
    def per_row(self) -> Tensor | None:
        """The scale of each row, where it is a tensor."""
        return self.scale if isinstance(self.scale, Tensor) else None

    @property
    def number(self) -> float:
        """The scale of all rows as a kernel is given it, in 32 bits; 1 where it is a tensor or there is none."""
        return 1.0 if self.scale is None or isinstance(self.scale, Tensor) else kernel_number(self.scale)

    def arguments(self) -> dict[str, Any]:
        """As the public functions take them."""
        return {
            "scale": self.scale, "mask": self.mask, "is_causal": self.is_causal, "masked_rows": self.masked_rows,
            "sink": self.sink,
        }  # fmt: skip

    @property
    def tensors(self) -> list[Tensor]:
        """Those among mask, scale and sink."""
        return list(self.by_name.values())

    @property
    def by_name(self) -> dict[str, Tensor]:
        """The same by the names of the arguments."""
        given = {"mask": self.mask, "scale": self.scale, "sink": self.sink}
        return {argument: each for argument, each in given.items() if isinstance(each, Tensor)}

    def operator_arguments(self) -> tuple:
        """The last arguments of a registered operator; left out where all are defaults."""
        scale, sink = (
            (None, each) if isinstance(each, Tensor) else (each, None) for each in (self.scale, self.sink)
        )  # fmt: skip
        return () if self.plain else (*scale, self.mask, self.is_causal, self.masked_rows, *sink)

    @staticmethod
    def of_operator(
        scale=None, row_scale=None, mask=None, is_causal=False, masked_rows="nan", sink=None, row_sink=None
    ) -> "Scores":
        scale, sink = (scale if row_scale is None else row_scale), (sink if row_sink is None else row_sink)
        return Scores(scale, mask, is_causal, masked_rows, sink=sink)

    def along(self, dim: int, shape: tuple[int, ...]) -> "Scores":
        """For the input with `dim` moved last: its mask, scale and sink moved likewise, as views."""
        if self.plain or dim % len(shape) == len(shape) - 1:
            return self
        given: dict[str, Any] = {"scale": self.scale, "mask": self.mask, "sink": self.sink}
        for name, each in given.items():
            if isinstance(each, Tensor):
                given[name] = each.expand(shape).movedim(dim, -1)
        return replace(self, **given)

    def exact(self, dtype: torch.dtype, device: torch.device) -> "Scores":
        """As kernels take it: with a sink that is a tensor, and a scale that is one where the arithmetic has 64 bits.

        A kernel's own number has 32.
        """
        scores = self
        if self.sink is not None and not isinstance(self.sink, Tensor):
            scores = replace(scores, sink=torch.full((), self.sink, dtype=arithmetic_in(dtype), device=device))
        if not isinstance(self.scale, float) or dtype != torch.float64:
            return scores
        number = torch.full((), self.scale, dtype=torch.float64, device=device)
        return replace(scores, scale=number, never_zero=self.scale != 0)


PLAIN = Scores()


def kernel_number(number: float) -> float:
    """A number as 32 bits hold it, but never 0 unless it is: 0 is another thing than its neighbours."""
    return math.copysign(_LEAST, number) if 0 < abs(number) < _LEAST else float(number)


def is_plain(scale: Any, mask: Any, is_causal: Any, masked_rows: Any, sink: Any = None) -> bool:
    return scale is None and mask is None and is_causal is False and masked_rows == "nan" and sink is None


def kind_of_scale(scale: Any) -> Any:
    """What a kept call depends on of a scale: of a number, whether it is 0 or 1; of anything else, itself."""
    if type(scale) is float or type(scale) is int:
        return "0" if scale == 0 else "1" if scale == 1 else "number"
    return scale


def kind_of_sink(sink: Any) -> Any:
    """What a kept call depends on of a sink: of a number, that it is one; of anything else, itself."""
    return "number" if type(sink) is float or type(sink) is int else sink


def scores_of(
    name: str, input: Tensor, dim: int, scale: Any, mask: Any, is_causal: Any, masked_rows: Any, sink: Any = None
) -> Scores:
    """The Scores of a call, or an error that names the argument."""
    if is_plain(scale, mask, is_causal, masked_rows, sink):
        return PLAIN
    shape, given = tuple(input.shape), (scale, mask, sink)
    if masked_rows not in ("nan", "zero"):
        raise ValueError(f'{name}: masked_rows must be "nan" or "zero", got {described(masked_rows)}')
    if not isinstance(is_causal, bool):
        raise TypeError(f"{name}: is_causal must be a bool, not {typed(is_causal)}")
    last = input.ndim > 0 and dim % input.ndim == input.ndim - 1
    if is_causal and input.ndim < 2:
        raise ValueError(f"{name}: is_causal needs at least 2 dims [..., queries, keys], got input of shape {shape}")
    if is_causal and not last:
        raise ValueError(f"{name}: is_causal is over the last dim, got dim={dim} of input of shape {shape}")
    if mask is not None:
        if not isinstance(mask, Tensor):
            raise TypeError(f"{name}: mask must be a Tensor, not {type(mask).__name__}")
        if mask.dtype != torch.bool and mask.dtype not in DTYPES:
            raise TypeError(
                f"{name}: mask must be bool (True keeps) or of 16 to 64 bit floats (added), got {mask.dtype}"
            )
        mask = _broadcast(name, "mask", mask, input, shape)
    scale, sink = (
        _of_rows(name, argument, each, input, dim) for argument, each in (("scale", scale), ("sink", sink))
    )  # fmt: skip
    if isinstance(scale, float) and scale == 1:
        scale = None
    moved = any(isinstance(a, Tensor) and a is not b for a, b in zip(given, (scale, mask, sink), strict=True))
    return Scores(scale, mask, is_causal, masked_rows, moved=moved, sink=sink)


def is_causal_bias(mask: Any) -> bool:
    """Whether a mask is torch.nn.attention.bias.CausalBias, told by its module: importing that takes seconds."""
    return isinstance(mask, Tensor) and type(mask).__module__ == "torch.nn.attention.bias"


def dense_mask(name: str, argument: str, mask: Any, device: torch.device) -> Any:
    """A mask whose elements lie in its memory: of CausalBias, whose memory holds nothing, the bool one it stands for.

    Other tensors that are made when they are asked for are refused.
    """
    if mask is None or type(mask) is Tensor:
        return mask
    if is_causal_bias(mask):
        diagonal = mask.seq_len_kv - mask.seq_len_q if mask.variant.name == "LOWER_RIGHT" else 0
        return torch.ones(mask.seq_len_q, mask.seq_len_kv, dtype=torch.bool, device=device).tril(diagonal)
    if isinstance(mask, Tensor) and (hasattr(mask, "materialize") or hasattr(mask, "_materialize")):
        raise TypeError(
            f"{name}: {argument} is a {type(mask).__name__}, whose elements are not in memory before it is "
            f"materialized; give the dense tensor that it stands for"
        )
    return mask


def _of_rows(name: str, argument: str, given: Any, input: Tensor, dim: int) -> float | Tensor | None:
    """A number for all rows, or a tensor of one a row on the input's device, or an error that names the argument."""
    if given is None:
        return None
    if not isinstance(given, Tensor):
        if isinstance(given, bool) or not isinstance(given, Real):
            raise TypeError(f"{name}: {argument} must be a number or a Tensor, not {typed(given)}")
        return float(given)
    if given.dtype not in DTYPES:
        raise TypeError(f"{name}: {argument} must be of 16 to 64 bit floats, got {given.dtype}")
    shape = tuple(input.shape)
    given = _broadcast(name, argument, given, input, shape)
    from_end = dim % max(1, input.ndim) - input.ndim
    single = given.ndim < max(1, -from_end) or given.shape[from_end] == 1 or given.stride(from_end) == 0
    if given.ndim and input.ndim and not single and shape[dim] != 1:
        along = tuple(1 if i == dim % input.ndim else size for i, size in enumerate(shape))
        got = tuple(given.shape)
        raise ValueError(
            f"{name}: a {argument} tensor holds one value a row: it broadcasts to {along}, got shape {got}"
        )
    return given


def arithmetic_of(x: Tensor) -> torch.dtype:
    return arithmetic_in(x.dtype)


def arithmetic_in(dtype: torch.dtype) -> torch.dtype:
    """In which results of a dtype are computed."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _broadcast(name: str, argument: str, tensor: Tensor, input: Tensor, shape: tuple[int, ...]) -> Tensor:
    """tensor, on the input's device: as for torch's operators, one without dims may come from the CPU."""
    if tensor.is_nested or tensor.layout != torch.strided:
        kind = "nested" if tensor.is_nested else str(tensor.layout)
        raise RuntimeError(f"{name}: {argument} must be a dense strided tensor, got a {kind} one")
    if tensor.device != input.device and (tensor.ndim or tensor.device.type != "cpu"):
        raise RuntimeError(f"{name}: {argument} must be on the input's device {input.device}, got {tensor.device}")
    aligned = tuple(tensor.shape)
    fits = len(aligned) <= len(shape) and all(
        size in (1, whole) for size, whole in zip(reversed(aligned), reversed(shape), strict=False)
    )
    if not fits:
        raise ValueError(f"{name}: {argument} must broadcast to the input's shape {shape}, got shape {aligned}")
    return tensor.to(input.device)
