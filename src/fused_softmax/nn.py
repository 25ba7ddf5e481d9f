"""Modules that mirror torch.nn's on these kernels, with the same constructor, repr and state."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

import fused_softmax.register.library  # noqa: F401  # for whoever imports or unpickles a module by this file's name
from fused_softmax.ops.cross_entropy import CrossEntropyOutput, cross_entropy
from fused_softmax.ops.linear_cross_entropy import linear_cross_entropy
from fused_softmax.ops.softmax import log_softmax, softmax
from fused_softmax.options import MaskedRows


class _Scored(torch.nn.Module):
    """The base of Softmax and LogSoftmax: the arguments that torch's modules lack, and the call."""

    _function = staticmethod(softmax)
    dim: int | None

    def __init__(
        self,
        dim: int | None = None,
        *,
        scale: float | None = None,
        is_causal: bool = False,
        masked_rows: MaskedRows = "nan",
        sink: float | None = None,
    ) -> None:
        super().__init__(dim)
        self.scale, self.is_causal, self.masked_rows, self.sink = scale, is_causal, masked_rows, sink

    def forward(self, input: Tensor, *, mask: Tensor | None = None, sink: float | Tensor | None = None) -> Tensor:
        dim = self.dim
        if dim is None:  # the warning names the line that calls the module, past two frames of Module
            dim = torch.nn.functional._get_softmax_dim(self._function.__name__, input.dim(), 5)  # type: ignore[attr-defined]
        return self._function(
            input, dim, scale=self.scale, mask=mask, is_causal=self.is_causal, masked_rows=self.masked_rows,
            sink=self.sink if sink is None else sink,
        )  # fmt: skip

    def extra_repr(self) -> str:
        plain = {"scale": None, "is_causal": False, "masked_rows": "nan", "sink": None}
        given = {name: getattr(self, name) for name, value in plain.items() if getattr(self, name) != value}
        return f"dim={self.dim}" + "".join(f", {name}={value!r}" for name, value in given.items())


class Softmax(_Scored, torch.nn.Softmax):
    """`fused_softmax.softmax` as a module: an instance of torch.nn.Softmax, but not supported by torch.jit.script.

    dim: the dimension that sums to 1. None picks 0 or 1 by the input's rank and warns, as torch.nn.Softmax does.
    scale and sink (numbers), is_causal, masked_rows: arguments of `fused_softmax.softmax`, passed in every call.

    Call it with the input, which may have any shape and a float dtype. It returns the input's shape. By keyword, a call
    takes a mask, and a sink, which may be a tensor and replaces the module's. It raises the function's errors.

    >>> Softmax(dim=-1, scale=0.125, is_causal=True)
    Softmax(dim=-1, scale=0.125, is_causal=True)
    """


class LogSoftmax(_Scored, torch.nn.LogSoftmax):
    """`fused_softmax.log_softmax` as a module, with Softmax's arguments and errors.

    >>> LogSoftmax(dim=-1)
    LogSoftmax(dim=-1)
    """

    _function = staticmethod(log_softmax)


class CrossEntropyLoss(torch.nn.CrossEntropyLoss):
    """`fused_softmax.cross_entropy` as a module: an instance of torch.nn.CrossEntropyLoss.

    weight, ignore_index, reduction, label_smoothing: torch's arguments.
    softcap, scale, lse_square_scale, return_lse, return_z_loss, return_token_stats, inplace_backward, dtype: arguments
        of the function, passed in every call.

    Call it with the logits [n_classes], [n, n_classes] or [n, n_classes, d1, ...], the target and, by keyword, the
    function's lse. It returns what the function returns, and raises its errors; an unknown option raises TypeError.

    >>> CrossEntropyLoss(label_smoothing=0.1)(logits, target)
    """

    def __init__(
        self,
        weight: Tensor | None = None,
        ignore_index: int = -100,
        reduction: str = "mean",
        label_smoothing: float = 0.0,
        **options: Any,
    ) -> None:
        super().__init__(weight, ignore_index=ignore_index, reduction=reduction, label_smoothing=label_smoothing)
        self.options = _known(options, cross_entropy)

    def forward(  # type: ignore[override]
        self, input: Tensor, target: Tensor, *, lse: Tensor | None = None
    ) -> Tensor | CrossEntropyOutput:
        return cross_entropy(
            input, target, self.weight, self.ignore_index, self.reduction, self.label_smoothing, lse=lse,
            **self.options,
        )  # fmt: skip

    def extra_repr(self) -> str:
        return ", ".join(f"{name}={value!r}" for name, value in self.options.items())


class LinearCrossEntropyLoss(torch.nn.Module):
    """A linear layer and its loss, by `fused_softmax.linear_cross_entropy`: the logits never exist all at once.

    in_features, num_classes, bias: the layer's. Its parameters are linear_weight [num_classes, in_features] and
        linear_bias [num_classes] or None, initialised like torch.nn.Linear's.
    weight, reduction, ignore_index, label_smoothing, options: arguments of the function, passed in every call.
    device, dtype: of the parameters.

    Call it with the input [..., in_features] and the target [...]. It returns what the function returns, and raises its
    errors; an unknown option raises TypeError.

    >>> LinearCrossEntropyLoss(4096, 128256)(hidden, target)  # [n, 4096], [n]
    """

    linear_weight: torch.nn.Parameter
    linear_bias: torch.nn.Parameter | None
    weight: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        weight: Tensor | None = None,
        reduction: str = "mean",
        ignore_index: int = -100,
        label_smoothing: float = 0.0,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        linear = torch.nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.linear_weight, self.linear_bias = linear.weight, linear.bias  # type: ignore[assignment]
        self.register_buffer("weight", weight)
        self.reduction, self.ignore_index, self.label_smoothing = reduction, ignore_index, label_smoothing
        self.options = _known(options, linear_cross_entropy)

    def forward(self, input: Tensor, target: Tensor) -> Tensor | CrossEntropyOutput:
        return linear_cross_entropy(
            input, self.linear_weight, target, linear_bias=self.linear_bias, weight=self.weight,
            reduction=self.reduction, ignore_index=self.ignore_index, label_smoothing=self.label_smoothing,
            **self.options,
        )  # fmt: skip

    def extra_repr(self) -> str:
        n_classes, in_features = self.linear_weight.shape
        said = [f"in_features={in_features}", f"num_classes={n_classes}", f"bias={self.linear_bias is not None}"]
        return ", ".join(said + [f"{name}={value!r}" for name, value in self.options.items()])


def _known(options: dict[str, Any], function: Callable) -> dict[str, Any]:
    """options, if all of them are keyword-only arguments of function; but its lse, which belongs to one call.

    Raises TypeError otherwise.
    """
    kinds = inspect.signature(function).parameters.values()
    known = {each.name for each in kinds if each.kind is inspect.Parameter.KEYWORD_ONLY and each.name != "lse"}
    unknown = options.keys() - known
    if unknown:
        raise TypeError(f"{function.__name__} has no argument {sorted(unknown)[0]!r}")
    return options
