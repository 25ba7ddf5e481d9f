"""Modules that mirror torch.nn's on these kernels, with the same constructor, repr and state."""

import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fused_softmax.ops.attention.attention import attention
from fused_softmax.ops.attention.options import MOST_DIM
from fused_softmax.ops.losses.cross_entropy import CrossEntropyOutput, cross_entropy
from fused_softmax.ops.losses.linear_cross_entropy import linear_cross_entropy
from fused_softmax.ops.losses.linear_divergence import linear_divergence
from fused_softmax.ops.losses.linear_log_prob import linear_log_prob
from fused_softmax.ops.losses.log_prob import LogProbOutput
from fused_softmax.ops.routing.route import RouteOutput, route
from fused_softmax.ops.softmax.scores import MaskedRows
from fused_softmax.ops.softmax.softmax import log_softmax, softmax
from fused_softmax.register import library  # noqa: F401  # for whoever imports or unpickles a module by this file's name


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
        batch_invariant: bool | None = None,
    ) -> None:
        super().__init__(dim)
        self.scale, self.is_causal, self.masked_rows, self.sink = scale, is_causal, masked_rows, sink
        self.batch_invariant = batch_invariant

    def forward(self, input: Tensor, *, mask: Tensor | None = None, sink: float | Tensor | None = None) -> Tensor:
        dim = self.dim
        if dim is None:  # the warning names the line that calls the module, past two frames of Module
            dim = torch.nn.functional._get_softmax_dim(self._function.__name__, input.dim(), 5)  # type: ignore[attr-defined]
        return self._function(
            input, dim, scale=self.scale, mask=mask, is_causal=self.is_causal, masked_rows=self.masked_rows,
            sink=self.sink if sink is None else sink, batch_invariant=self.batch_invariant,
        )  # fmt: skip

    def extra_repr(self) -> str:
        plain = {"scale": None, "is_causal": False, "masked_rows": "nan", "sink": None, "batch_invariant": None}
        given = {name: getattr(self, name) for name, value in plain.items() if getattr(self, name) != value}
        return f"dim={self.dim}" + "".join(f", {name}={value!r}" for name, value in given.items())


class Softmax(_Scored, torch.nn.Softmax):
    """`fused_softmax.softmax` as a module: an instance of torch.nn.Softmax, but not supported by torch.jit.script.

    dim: the dimension that sums to 1. None picks 0 or 1 by the input's rank and warns, as torch.nn.Softmax does.
    scale and sink (numbers), is_causal, masked_rows, batch_invariant: arguments of `fused_softmax.softmax`, passed in
        every call.

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
    softcap, scale, lse_square_scale, return_lse, return_z_loss, return_token_stats, inplace_backward, dtype,
        batch_invariant: arguments of the function, passed in every call.

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


class _OfLayer(torch.nn.Module):
    """The base of what a linear layer's input goes into: the layer's parameters, and its function's options."""

    linear_weight: torch.nn.Parameter
    linear_bias: torch.nn.Parameter | None

    def __init__(self, in_features: int, num_classes: int, bias: bool, device: Any, dtype: torch.dtype | None) -> None:
        super().__init__()
        linear = torch.nn.Linear(in_features, num_classes, bias=bias, device=device, dtype=dtype)
        self.linear_weight, self.linear_bias = linear.weight, linear.bias  # type: ignore[assignment]
        self.options: dict[str, Any] = {}

    def extra_repr(self) -> str:
        n_classes, in_features = self.linear_weight.shape
        said = [f"in_features={in_features}", f"num_classes={n_classes}", f"bias={self.linear_bias is not None}"]
        return ", ".join(said + [f"{name}={value!r}" for name, value in self.options.items()])


class LinearCrossEntropyLoss(_OfLayer):
    """A linear layer and its loss, by `fused_softmax.linear_cross_entropy`: the logits never exist all at once.

    in_features, num_classes, bias: the layer's. Its parameters are linear_weight [num_classes, in_features] and
        linear_bias [num_classes] or None, initialised like torch.nn.Linear's.
    weight, reduction, ignore_index, label_smoothing, options: arguments of the function, passed in every call.
    device, dtype: of the parameters.

    Call it with the input [..., in_features] and the target [...]. It returns what the function returns, and raises its
    errors; an unknown option raises TypeError.

    >>> LinearCrossEntropyLoss(4096, 128256)(hidden, target)  # [n, 4096], [n]
    """

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
        super().__init__(in_features, num_classes, bias, device, dtype)
        self.register_buffer("weight", weight)
        self.reduction, self.ignore_index, self.label_smoothing = reduction, ignore_index, label_smoothing
        self.options = _known(options, linear_cross_entropy)

    def forward(self, input: Tensor, target: Tensor) -> Tensor | CrossEntropyOutput:
        return linear_cross_entropy(
            input, self.linear_weight, target, linear_bias=self.linear_bias, weight=self.weight,
            reduction=self.reduction, ignore_index=self.ignore_index, label_smoothing=self.label_smoothing,
            **self.options,
        )  # fmt: skip


class _OfFunction(_OfLayer):
    """The same where all but the layer's sizes are options of its function."""

    function: Callable

    def __init__(
        self,
        in_features: int,
        num_classes: int,
        *,
        bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(in_features, num_classes, bias, device, dtype)
        self.options = _known(options, self.function)


class LinearLogProb(_OfFunction):
    """A linear layer and the log-probabilities of its classes, by `fused_softmax.linear_log_prob`.

    in_features, num_classes, bias: the layer's. Its parameters are linear_weight [num_classes, in_features] and
        linear_bias [num_classes] or None, initialised like torch.nn.Linear's.
    options: arguments of the function, passed in every call; with group among them, num_classes are this rank's.
    device, dtype: of the parameters.

    Call it with the input [..., in_features] and the target, [...] or [..., k]; a temperature of the call, a number or
    a tensor [...], goes before that of the options, and so does kept. It returns what the function returns, and raises
    its errors; an unknown option raises TypeError.

    >>> LinearLogProb(4096, 151936, return_entropy=True)(hidden, tokens).entropy  # [n, 4096], [n]
    """

    function = staticmethod(linear_log_prob)

    def forward(
        self,
        input: Tensor,
        target: Tensor,
        temperature: float | Tensor | None = None,
        *,
        kept: tuple[Tensor, Tensor] | Tensor | None = None,
    ) -> Tensor | LogProbOutput:
        of_call = {"temperature": temperature, "kept": kept}
        options = self.options | {name: each for name, each in of_call.items() if each is not None}
        return linear_log_prob(input, self.linear_weight, target, linear_bias=self.linear_bias, **options)


class LinearDivergence(_OfFunction):
    """A student's linear layer and its divergence from a teacher's, by `fused_softmax.linear_divergence`.

    in_features, num_classes, bias: the layer's. Its parameters are linear_weight [num_classes, in_features] and
        linear_bias [num_classes] or None, initialised like torch.nn.Linear's.
    options: arguments of the function, passed in every call; with group among them, num_classes are this rank's.
    device, dtype: of the parameters.

    Call it with the input [..., in_features] and the teacher's target_input [..., target features], target_weight
    [num_classes, target features] and, if it has one, target_bias [num_classes]; weight [...] says what rows count. It
    returns what the function returns, and raises its errors; an unknown option raises TypeError.

    >>> LinearDivergence(2048, 151936, kind="jsd")(hidden, of_teacher, teacher.lm_head.weight)  # [n, 2048], [n, 4096]
    """

    function = staticmethod(linear_divergence)

    def forward(
        self,
        input: Tensor,
        target_input: Tensor,
        target_weight: Tensor,
        target_bias: Tensor | None = None,
        *,
        weight: Tensor | None = None,
    ) -> Tensor:
        return linear_divergence(
            input, self.linear_weight, target_input, target_weight, linear_bias=self.linear_bias,
            target_bias=target_bias, weight=weight, **self.options,
        )  # fmt: skip


class Router(_OfLayer):
    """A linear layer and the experts that its outputs choose, by `fused_softmax.route`.

    in_features, num_experts: the layer's. Its parameters are linear_weight [num_experts, in_features] and, with bias,
        linear_bias [num_experts], initialised like torch.nn.Linear's.
    k: how many experts a row goes to.
    choice_bias: whether there is a buffer of that name, float32 [num_experts] and 0 at first, which every call passes
        as the function's bias. Whoever balances experts without a loss changes it after each step, by `counts`. A
        module that is cast to 16 bits casts it too, and loses small steps.
    options: arguments of the function, passed in every call.
    device, dtype: of the parameters. An input of another dtype is cast to theirs, so outside autocast float32 makes
        float32 logits of bf16 hidden states.

    Call it with the input [..., in_features] and, by keyword, noise [..., num_experts], indices [..., k] or row_mask
    [...]. It returns what the function returns, and raises its errors; an unknown option raises TypeError.

    >>> Router(2048, 128, 8, return_aux_loss=True)(hidden).weights  # [4, 1024, 2048] to [4, 1024, 8]
    """

    choice_bias: Tensor | None

    def __init__(
        self,
        in_features: int,
        num_experts: int,
        k: int,
        *,
        bias: bool = False,
        choice_bias: bool = False,
        device: Any = None,
        dtype: torch.dtype | None = None,
        **options: Any,
    ) -> None:
        super().__init__(in_features, num_experts, bias, device, dtype)
        self.k, self.options = k, _known(options, route)
        of_call = {"bias", "noise", "indices", "row_mask"} & options.keys()
        if of_call:
            raise TypeError(f"Router: {sorted(of_call)[0]} belongs to each call of the module, not to its constructor")
        of_experts = torch.zeros(num_experts, device=device, dtype=torch.float32) if choice_bias else None
        self.register_buffer("choice_bias", of_experts)

    def forward(
        self,
        input: Tensor,
        *,
        noise: Tensor | None = None,
        indices: Tensor | None = None,
        row_mask: Tensor | None = None,
    ) -> RouteOutput:
        logits = torch.nn.functional.linear(input.to(self.linear_weight.dtype), self.linear_weight, self.linear_bias)
        return route(
            logits, self.k, bias=self.choice_bias, noise=noise, indices=indices, row_mask=row_mask, **self.options
        )

    def extra_repr(self) -> str:
        n_experts, in_features = self.linear_weight.shape
        said = [f"in_features={in_features}", f"num_experts={n_experts}", f"k={self.k}"]
        said += [f"bias={self.linear_bias is not None}", f"choice_bias={self.choice_bias is not None}"]
        return ", ".join(said + [f"{name}={value!r}" for name, value in self.options.items()])


class MultiheadAttention(torch.nn.MultiheadAttention):
    """torch.nn.MultiheadAttention by `fused_softmax.attention`: an instance of it, with its constructor and its state.

    A call takes torch's arguments, and gives (output, weights or None) with torch's shapes, values and gradients.

    need_weights=False keeps no weights in memory and expands no mask; a query that sees no key then gets the output
    projection's bias, as torch gives. With need_weights, the default, torch's operations and `fused_softmax.softmax`
    compute, all weights are in memory, and such a query gives NaN, as torch's. The same operations compute in training
    with dropout, which drops weights as torch does, and for heads of more than 256 dims.
    key_padding_mask: [batch, keys]; attn_mask: [queries, keys] or [batch * heads, queries, keys]: bools, where True
        hides, or floats that are added, of either kind beside the other.
    is_causal: says that attn_mask is causal, as torch has it, and is then applied in its place.

    Raises RuntimeError for shapes, nested tensors and is_causal without attn_mask, TypeError for masks of other dtypes.
    It is not supported by torch.jit.script. torch's TransformerEncoderLayer may pass it by in inference, for kernels of
    torch's own.

    >>> MultiheadAttention(512, 8, batch_first=True)(x, x, x, need_weights=False)[0]  # [16, 1024, 512]
    """

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        self._check(query, key, value, is_causal and attn_mask is None)
        q, k, v = self._heads_of(query, key, value)
        n_queries, n_keys = q.shape[-2], k.shape[-2]
        masks: list[Tensor] = []  # bools, where True keeps, and floats
        if key_padding_mask is not None:
            shape = (*q.shape[:-3], n_keys)
            masks.append(_kept("key_padding_mask", key_padding_mask, shape)[..., None, None, :])
        if self.bias_k is not None and self.bias_v is not None:
            k, v = (torch.cat((t, self._of_all(t, b)), -2) for t, b in ((k, self.bias_k), (v, self.bias_v)))
        if attn_mask is not None:
            shapes = (n_queries, n_keys), (q.shape[:-2].numel(), n_queries, n_keys)
            keep = _kept("attn_mask", attn_mask, *shapes)
            masks.append(keep if keep.ndim == 2 else keep.view(*q.shape[:-2], n_queries, n_keys))
        in_memory = need_weights or self.head_dim > MOST_DIM or (self.training and self.dropout > 0)
        window = None
        if is_causal and not in_memory and self.bias_k is None:
            masks.pop()
            window = None, 0
        masks = [_padded(each, k.shape[-2] - n_keys) for each in masks]
        if in_memory:
            output, weights = self._with_weights(q, k, v, masks)
        else:
            sinks = q.new_zeros(self.num_heads) if self.add_zero_attn else None  # a key and a value of 0
            mask, bias = _two(masks)
            output = attention(q, k, v, mask, bias=bias, sinks=sinks, window=window)  # type: ignore[assignment]
            weights = None
        first = self.batch_first or query.ndim == 2
        output = (output.transpose(-3, -2) if first else output.permute(2, 0, 1, 3)).flatten(-2)
        output = torch.nn.functional.linear(output, self.out_proj.weight, self.out_proj.bias)
        if weights is None or not need_weights:
            return output, None
        return output, weights.mean(-3) if average_attn_weights else weights

    def _check(self, query: Tensor, key: Tensor, value: Tensor, is_causal_alone: bool) -> None:
        given = {"query": query, "key": key, "value": value}
        for name, tensor in given.items():
            if tensor.is_nested:
                raise RuntimeError(f"MultiheadAttention: {name} must be a dense tensor, got a nested one")
            width = {"query": self.embed_dim, "key": self.kdim, "value": self.vdim}[name]
            if tensor.ndim not in (2, 3) or tensor.ndim != query.ndim or tensor.shape[-1] != width:
                n_dims = query.ndim if query.ndim in (2, 3) else "2 or 3"
                raise RuntimeError(
                    f"MultiheadAttention: {name} must have {n_dims} dims, the last of {width}, got "
                    f"{tuple(tensor.shape)}"
                )
        if key.shape[:-1] != value.shape[:-1]:
            raise RuntimeError(
                f"MultiheadAttention: value must have the key's leading sizes {tuple(key.shape[:-1])}, got "
                f"{tuple(value.shape)}"
            )
        batch = 0 if self.batch_first else 1
        if query.ndim == 3 and query.shape[batch] != key.shape[batch]:
            raise RuntimeError(
                f"MultiheadAttention: key must have the query's batch of {query.shape[batch]}, got {tuple(key.shape)}"
            )
        if is_causal_alone:
            raise RuntimeError("MultiheadAttention: is_causal=True says that attn_mask is causal, got attn_mask=None")

    def _heads_of(self, query: Tensor, key: Tensor, value: Tensor) -> list[Tensor]:
        """Projected, as [batch, heads, length, dim] or [heads, length, dim]: views, whatever dim comes first."""
        linear = torch.nn.functional.linear
        if query is key is value and self.in_proj_weight is not None:
            found = linear(query, self.in_proj_weight, self.in_proj_bias).chunk(3, -1)
        else:
            of_each = self.q_proj_weight, self.k_proj_weight, self.v_proj_weight
            weights = of_each if self.in_proj_weight is None else self.in_proj_weight.chunk(3)
            biases = (None,) * 3 if self.in_proj_bias is None else self.in_proj_bias.chunk(3)
            given = zip((query, key, value), weights, biases, strict=True)
            found = tuple(linear(each, weight, bias) for each, weight, bias in given)
        heads = [each.unflatten(-1, (self.num_heads, self.head_dim)) for each in found]
        first = self.batch_first or query.ndim == 2
        return [each.transpose(-3, -2) if first else each.permute(1, 2, 0, 3) for each in heads]

    def _of_all(self, like: Tensor, bias: Tensor) -> Tensor:
        """bias_k or bias_v as one more position of each head."""
        return bias.view(self.num_heads, 1, self.head_dim).expand(*like.shape[:-2], 1, -1)

    def _with_weights(self, q: Tensor, k: Tensor, v: Tensor, masks: list[Tensor]) -> tuple[Tensor, Tensor]:
        if self.add_zero_attn:
            k, v = (torch.nn.functional.pad(each, (0, 0, 0, 1)) for each in (k, v))
            masks = [_padded(each, 1) for each in masks]
        scores, scale = q @ k.transpose(-2, -1), self.head_dim**-0.5
        mask, bias = _two(masks)
        if bias is not None:  # added to the scores as scaled
            scores, scale = scores * scale + bias.to(scores.dtype), 1.0
        weights = softmax(scores, -1, scale=scale, mask=mask)
        if self.training and self.dropout > 0:
            weights = torch.nn.functional.dropout(weights, self.dropout)
        return weights @ v, weights


def _kept(name: str, mask: Tensor, *shapes: tuple[int, ...]) -> Tensor:
    """A mask of torch.nn.MultiheadAttention as attention takes it: True keeps."""
    if tuple(mask.shape) not in shapes:
        wanted = " or ".join(str(each) for each in shapes)
        raise RuntimeError(f"MultiheadAttention: {name} must have shape {wanted}, got {tuple(mask.shape)}")
    if mask.dtype != torch.bool and not mask.is_floating_point():
        raise TypeError(f"MultiheadAttention: {name} must be of bool or a float dtype, got {mask.dtype}")
    return ~mask if mask.dtype == torch.bool else mask


def _padded(mask: Tensor, n_more: int) -> Tensor:
    """With so many keys more, all of which are seen."""
    if n_more == 0:
        return mask
    return torch.nn.functional.pad(mask, (0, n_more), value=1 if mask.dtype == torch.bool else 0)


def _two(masks: list[Tensor]) -> tuple[Tensor | None, Tensor | None]:
    """(a mask, a bias) of at most two masks; bools are one."""
    if len(masks) == 2 and masks[0].dtype == masks[1].dtype == torch.bool:
        return masks[0] & masks[1], None
    if len(masks) == 2:
        return (masks[0], masks[1]) if masks[0].dtype == torch.bool else (masks[1], masks[0])
    return (masks[0] if masks else None), None


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
