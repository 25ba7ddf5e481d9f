"""Logits that are not made: the head of a model gives its input in their place, until a loss or a reader takes them.

What a model does to its logits before its loss is recorded, not computed: casts, views, rows that are left out, a
scale, a bias, a softcap. cross_entropy of such logits is linear_cross_entropy of the head's input. Any other reader
gets the tensor that the model would have made, so a model that this file knows nothing of gets its own results.
"""

import math
import operator
import sys
import threading
import warnings
import weakref
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import fields
from functools import cache, partial
from inspect import CO_VARARGS
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch._C._functorch import is_functorch_wrapped_tensor
from torch.compiler import is_compiling
from torch.fx.experimental.proxy_tensor import get_proxy_mode
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn import functional as F
from torch.nn.modules.module import _has_any_global_hook
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils._pytree import tree_flatten, tree_map
from torch.utils.hooks import RemovableHandle

from fused_softmax.ops.losses.linear_cross_entropy import linear_cross_entropy


def revived(mixin: type, base: type) -> Any:
    """An object of `base` with the mixin, not initialised: what a copy or a pickle of one begins with."""
    made = mixed(mixin, base)
    return made.__new__(made)


@cache
def mixed(mixin: type, base: type) -> Any:
    """`base` with a mixin before it, under its own name, by which transformers and PEFT know a class."""
    named = {name: getattr(base, name) for name in ("__module__", "__qualname__", "__doc__")}
    named |= mixin.members_for(base)  # type: ignore[attr-defined]
    return type(base)(base.__name__, (mixin, base), named)


class Mixin:
    """What a module of an applied model is, beside what it was."""

    @classmethod
    def members_for(cls, base: type) -> dict[str, Any]:
        """Members of the mixed class that depend on its base."""
        return {}

    def __reduce_ex__(self, protocol: Any) -> Any:
        made = super().__reduce_ex__(protocol)
        return (revived, type(self).__bases__, *made[2:]) if is_mixed(type(self)) else made


def is_mixed(kind: type) -> bool:
    """Whether `mixed` has made a class, and nothing else has derived another from it since, as fully_shard does."""
    return len(kind.__bases__) == 2 and issubclass(kind.__bases__[0], Mixin)


def put(module: nn.Module, mixin: Any) -> None:
    kind: Any = type(module)
    module.__class__ = mixed(mixin, kind)
    if mixin is Head:
        _follow(module)


def taken(module: nn.Module) -> None:
    """Undo `put`."""
    if isinstance(module, Head):
        _unfollow(module)
    module.__class__ = type(module).__bases__[1]


class _Opened(threading.local):
    """Of this thread: the heads of the forward pass with labels that is running, and whether one of them was called.

    grad: whether that pass has gradients. A checkpoint turns them off within it. unpacked: whether each row of its
    batch is one sequence, so that transformers need not look for several.
    """

    def __init__(self) -> None:
        self.heads: tuple[nn.Module, ...] = ()
        self.deferred = False
        self.grad = False
        self.unpacked = False


opened = _Opened()


_IN_SHARDS = "logits are read after the forward pass, when their weight lies in shards again"
_heads: weakref.WeakSet[Any] = weakref.WeakSet()
_listening: list[RemovableHandle] = []


def _follow(head: nn.Module) -> None:
    """Count the steps of optimizers that have a head's parameters."""
    steps = head.__dict__.setdefault("steps", 0)
    head.__dict__["counter"] = torch.tensor(steps, device=next((each.device for each in head.parameters()), None))
    _heads.add(head)
    if not _listening:
        _listening.append(register_optimizer_step_post_hook(_stepped))


def _unfollow(head: nn.Module) -> None:
    """Undo `_follow`."""
    for name in ("steps", "counter"):
        del head.__dict__[name]
    _heads.discard(head)
    if not _heads and _listening:
        _listening.pop().remove()


def _stepped(optimizer: Any, *_: Any) -> None:
    """Called after an optimizer's step, whose kernels may write to parameters without autograd's notice."""
    trained = {id(each) for group in optimizer.param_groups for each in group["params"]} if _heads else set()
    for head in tuple(_heads):
        if any(id(each) in trained for each in head.parameters()):
            head.steps += 1
            head.counter.fill_(head.steps)


class Head(Mixin, nn.Module):
    """A linear layer that makes no logits while its model's forward pass has labels.

    steps: how often an optimizer has changed it. counter: the same on its device, which compiled code can read.
    chunks: what apply() was given of linear_cross_entropy's arguments.
    """

    chunks: dict[str, Any]
    steps: int
    counter: Tensor

    def __setstate__(self, state: Any) -> None:  # of a copy, or of what was pickled
        super().__setstate__(state)
        _follow(self)

    def _apply(self, *args: Any, **named: Any) -> Any:  # which moves a module
        found = super()._apply(*args, **named)
        _follow(self)
        return found

    def __call__(self, input: Tensor) -> Any:
        defers = self in opened.heads and isinstance(input, Tensor) and not _is_watched(self)
        if defers and torch.is_grad_enabled() == opened.grad:
            opened.deferred = True
            return Deferred(self, input)
        return super().__call__(input)

    def forward(self, input: Tensor, loss: Callable[..., Tensor] | None = None) -> Tensor:
        # Within the forward pass of its own, where FSDP2 has put the weight together.
        if loss is not None:
            return loss(input, self.weight, self.bias)
        weight: Any = self._parameters.get("weight")  # a parametrization makes another at each use
        if not _is_shard(weight) or _is_shard(input):
            return super().forward(input)
        # Of a reader that comes after the forward pass of the module that keeps the weight together.
        if torch.is_grad_enabled():
            raise RuntimeError(f"{_IN_SHARDS}: read them under torch.no_grad(), or call the model without labels")
        bias: Any = self.bias
        bias = None if bias is None else bias.full_tensor().to(input.dtype)
        return F.linear(input, weight.full_tensor().to(input.dtype), bias)


def _is_shard(tensor: Any) -> bool:
    return hasattr(tensor, "full_tensor")


def _layer_of(head: Any) -> Any:
    """(weight, bias) of a linear layer; None if its class makes one of them at each use, as a parametrization does.

    A replica of DataParallel and FSDP1 have them as plain tensors.
    """
    names, places = ("weight", "bias"), (head._parameters, head.__dict__)
    if any(hasattr(type(head), name) for name in names):
        return None
    return [next((place[name] for place in places if name in place), None) for name in names]


def _is_freed(tensor: Tensor | None) -> bool:
    """Whether FSDP1 has taken the memory of an unsharded tensor."""
    if tensor is None or is_functorch_wrapped_tensor(tensor):
        return False
    return tensor.numel() > 0 and tensor.untyped_storage().size() == 0


def _n_classes(head: Any) -> int:
    weight = head._parameters.get("weight")
    return head.out_features if weight is None or not weight.shape[0] else weight.shape[0]


def _is_watched(head: nn.Module) -> bool:
    """Whether hooks or a forward of the module's own look at its output or gradient, such as a user's, or accelerate's.

    FSDP2's hooks gather the weight, and do nothing to logits. But a head that makes its weight of what they gather
    counts as watched.
    """
    if "forward" in head.__dict__ or _has_any_global_hook():
        return True
    if _layer_of(head) is None and (_has_hooks(head) or any(map(_is_shard, head.parameters()))):
        return True
    hooks = [hook for each in _hooks(head) for hook in each.values()] if _has_hooks(head) else []
    return any(not str(getattr(each, "__module__", "")).startswith("torch.distributed.fsdp.") for each in hooks)


def _hooks(head: nn.Module) -> tuple[Any, ...]:
    return head._forward_hooks, head._forward_pre_hooks, head._backward_hooks, head._backward_pre_hooks


def _has_hooks(head: nn.Module) -> bool:
    return any(bool(each) for each in _hooks(head))


def _functions(base: Any = torch.autograd.Function) -> Iterator[Any]:
    """All autograd.Functions that there are."""
    for each in base.__subclasses__():
        yield each
        yield from _functions(each)


def _arguments(frame: FrameType) -> list[Any]:
    """What a frame's function was given, as far as its names have it still."""
    code = frame.f_code
    n = code.co_argcount + code.co_kwonlyargcount
    several = code.co_varnames[n : n + bool(code.co_flags & CO_VARARGS)]
    found = [frame.f_locals.get(name) for name in code.co_varnames[:n]]
    return [*found, *(each for name in several for each in frame.f_locals.get(name, ()))]


class Deferred:
    """What stands for logits within a model's forward pass.

    shown: whether a reader outside the model has got them, as Logits, so that there is one tensor of them.
    head, given: a linear layer and its input, as the model called it. layer: (weight, bias) that the head had. A
    parametrization makes them once, at that call. None where FSDP2 moves them, or a compiler traces them. rows: those
    of the input whose logits these are.
    made: the dtype of the head's output; dtype: of these logits.
    The logits are the head's output, or step(the parent's logits, *arguments); or bias + the head's output, times
    `times`, over `over`, and, if cap is a number, cap * tanh of that over cap.
    """

    state = (
        "head", "given", "rows", "device_type", "autocast", "lowered", "made", "dtype", "parent", "step", "arguments",
        "bias", "times", "over", "bounded", "cap", "layer", "n_classes", "grad", "within", "shown", "version",
        "with_graph", "without", "hooks_by_id", "parameters", "inputs", "steps",
    )  # fmt: skip

    __array_priority__ = Tensor.__array_priority__  # by which NumPy's numbers leave their products to these

    def __init__(self, head: Any, given: Tensor) -> None:
        self.head, self.given, self.rows = head, given, given
        self.device_type = given.device.type
        self.autocast = torch.is_autocast_enabled(self.device_type)
        self.lowered = torch.get_autocast_dtype(self.device_type)
        self.made = self.lowered if self.autocast and given.dtype != torch.float64 else given.dtype
        self.dtype = self.made
        self.parent: Deferred | None = None
        self.step: Any = None
        self.arguments: tuple[Any, ...] = ()
        self.bias: Tensor | None = None
        self.times, self.over, self.bounded = 1.0, 1.0, False
        self.cap: Any = None
        # FSDP2 takes parameters apart, and puts them together again.
        apart = _has_hooks(head) or _is_shard(head._parameters.get("weight"))
        moved = _layer_of(head) is not None and (is_compiling() or apart)
        self.layer = None if moved else (head.weight, head.bias)
        self.n_classes = _n_classes(head) if self.layer is None else self.layer[0].shape[0]
        own: list[Any] = [each for each in (self.layer or head.parameters()) if each is not None]
        self.grad = torch.is_grad_enabled() and any(each.requires_grad for each in [given, *own])
        self.within = True  # the model's forward pass
        self.version: int | None = None  # of the logits that were made last
        self.with_graph: Tensor | None = None
        self.without: Tensor | None = None
        self.hooks_by_id: dict[int, Any] = OrderedDict()
        self.shown = False
        # FSDP2 moves whole parameters, and its shards stay where they are.
        self.parameters = _seen([each.to_local() for each in own if _is_shard(each)] if moved else own)
        self.inputs = _seen([given])
        self.steps = head.counter.clone() if is_compiling() else head.steps

    # What is known without the logits.

    @property
    def shape(self) -> torch.Size:
        return torch.Size((*self.rows.shape[:-1], self.n_classes))

    @property
    def device(self) -> torch.device:
        return self.rows.device

    @property
    def ndim(self) -> int:
        return self.rows.ndim

    @property
    def requires_grad(self) -> bool:
        return bool(self.grad)

    @property
    def is_cuda(self) -> bool:
        return self.rows.is_cuda

    def size(self, dim: int | None = None) -> Any:
        return self.shape if dim is None else self.shape[dim]

    def dim(self) -> int:
        return self.ndim

    def numel(self) -> int:
        return self.shape.numel()

    def is_floating_point(self) -> bool:
        return True

    def element_size(self) -> int:
        return self.dtype.itemsize

    # What is written down.

    def _then(self, step: Any, *arguments: Any, **changed: Any) -> "Deferred":
        found = type(self).__new__(type(self))
        for name in self.state:  # copy.copy() ends a graph of torch 2.11
            setattr(found, name, getattr(self, name))
        found.hooks_by_id, found.shown = OrderedDict(), False
        found.parent, found.step, found.arguments = self, step, arguments
        for name, each in changed.items():
            setattr(found, name, each)
        return found

    def _is_made(self) -> bool:
        """Whether these logits, or those they were taken from, are made, so that nothing is saved any more."""
        made = self.with_graph is not None or self.without is not None
        return made or (self.parent is not None and self.parent._is_made())

    def to(self, *to: Any, **named: Any) -> Any:
        target = [*to, *(named[name] for name in ("device", "dtype") if name in named)]
        dtypes = [each for each in target if isinstance(each, torch.dtype)]
        stays = all(isinstance(each, torch.dtype) or _same_device(each, self.device) for each in target)
        rest = {name: each for name, each in named.items() if name not in ("device", "dtype")}
        if self._is_made() or rest or not stays or len(dtypes) > 1:
            return self.tensor().to(*to, **named)
        if not dtypes or dtypes[0] == self.dtype:
            return self
        if not dtypes[0].is_floating_point:
            return self.tensor().to(dtypes[0])
        return self._then(Tensor.to, dtypes[0], dtype=dtypes[0])

    def float(self) -> Any:
        return self.to(torch.float32)

    def type_as(self, other: Tensor) -> Any:
        return self.to(other.dtype)

    def contiguous(self) -> Any:
        return self.tensor().contiguous() if self._is_made() else self

    def view(self, *shape: Any) -> Any:
        return self._reshaped(Tensor.view, shape)

    def reshape(self, *shape: Any) -> Any:
        return self._reshaped(Tensor.reshape, shape)

    def _reshaped(self, step: Any, shape: tuple[Any, ...]) -> Any:
        sizes = tuple(shape[0]) if len(shape) == 1 and isinstance(shape[0], (tuple, list)) else shape
        fits = len(sizes) > 0 and not any(isinstance(each, torch.dtype) for each in sizes)
        if self._is_made() or not fits or sizes[-1] != self.shape[-1]:
            return step(self.tensor(), *shape)
        return self._then(Tensor.reshape, sizes, rows=self.rows.reshape(*sizes[:-1], self.rows.shape[-1]))

    def flatten(self, start_dim: int = 0, end_dim: int = -1) -> Any:
        if self._is_made() or end_dim % self.ndim == self.ndim - 1:
            return self.tensor().flatten(start_dim, end_dim)
        return self._then(Tensor.flatten, start_dim, end_dim, rows=self.rows.flatten(start_dim, end_dim))

    def __getitem__(self, index: Any) -> Any:
        if self._is_made() or not _leaves_last(index, self.ndim):
            return self.tensor()[index]
        index = tree_map(_kept, index)
        return self._then(operator.getitem, index, rows=self.rows[index])

    def __mul__(self, factor: Any) -> Any:
        if self._is_made() or not _is_number(factor):
            return self.tensor() * factor
        if not self.bounded:
            return self._then(operator.mul, factor, times=self.times * factor)
        if self.cap is not None or factor <= 0:
            return self.tensor() * factor
        return self._then(operator.mul, factor, cap=factor)

    __rmul__ = __mul__

    def __truediv__(self, factor: Any) -> Any:
        if self._is_made() or not _is_number(factor) or self.bounded:
            return self.tensor() / factor
        return self._then(operator.truediv, factor, over=self.over * factor)

    def tanh(self) -> Any:
        if self._is_made() or self.bounded:
            return self.tensor().tanh()
        return self._then(torch.tanh, bounded=True)

    def __add__(self, other: Any) -> Any:
        of_classes = isinstance(other, Tensor) and other.numel() == self.shape[-1] == other.shape[-1]
        plain = self.times == self.over and not self.bounded
        if self._is_made() or not of_classes or not plain or other.dtype != self.dtype or other.ndim > self.ndim:
            return self.tensor() + other
        if other.dtype != self.made and (other.dtype, self.made.itemsize) != (torch.float32, 2):
            return self.tensor() + other  # no head has such a bias
        other = other.clone()
        bias = other.reshape(-1)
        return self._then(
            operator.add, other, bias=bias if self.bias is None else self.bias + bias,
            grad=self.grad or (torch.is_grad_enabled() and other.requires_grad),
        )  # fmt: skip

    __radd__ = __add__

    # What makes something of them.

    def cross_entropy(
        self, target: Any, weight: Tensor | None = None, size_average: Any = None, ignore_index: int = -100,
        reduce: Any = None, reduction: str = "mean", label_smoothing: Any = 0.0,
    ) -> Tensor:  # fmt: skip
        """torch.nn.functional.cross_entropy of these logits."""
        self._check_function()
        classes = isinstance(target, Tensor) and not target.is_floating_point() and target.ndim == 1
        late = size_average is not None or reduce is not None or (self.bounded and self.cap is None)
        if self._is_made() or self.ndim != 2 or not classes or late:
            return F.cross_entropy(
                self.tensor(), target, weight, size_average, ignore_index, reduce, reduction, label_smoothing
            )
        scale = (self.times * self.cap if self.cap is not None else self.times) / self.over
        dtype, added = self.dtype, self.bias
        if torch.is_autocast_enabled(self.device_type) and dtype.itemsize == 2:
            dtype = torch.float32  # as autocast has cross_entropy

        self._check_unchanged()

        def loss(input: Tensor, linear_weight: Tensor, linear_bias: Tensor | None) -> Tensor:
            if added is not None:
                linear_bias = added if linear_bias is None else linear_bias + added
            return linear_cross_entropy(
                input, linear_weight, target, linear_bias=linear_bias, weight=weight, reduction=reduction,
                ignore_index=ignore_index, label_smoothing=label_smoothing, softcap=self.cap,
                scale=None if scale == 1 else scale, dtype=dtype, **self.head.chunks,
            )  # type: ignore[return-value]  # fmt: skip

        with self._as_then():
            if self.layer is None:
                return nn.Module.__call__(self.head, self.rows, loss)
            return loss(self.rows, *self.layer)

    def tensor(self) -> Tensor:
        """The logits, made once, with a graph only for who reads them with one."""
        grad = self.grad and torch.is_grad_enabled()
        self._check_function()
        found = self._made(grad)
        if found is not None:
            return found
        if self.within:
            _say_made()
        was_shard = _is_shard(self.head._parameters.get("weight"))
        inference = nullcontext() if is_compiling() else torch.inference_mode(self.given.is_inference())
        with inference, self._as_then(), nullcontext() if grad else torch.no_grad():
            found = self._make(grad, keep=self.within)
        # FSDP2 may keep what a forward pass has put together until its backward pass, and here none may come.
        if was_shard and not _is_shard(self.head._parameters.get("weight")):
            self.head.reshard()
        self._keep(found, grad)
        return found

    def _check_function(self) -> None:
        """An autograd.Function that was given these has them without a gradient, and nothing else would say so."""
        if not self.grad or is_compiling() or torch.is_grad_enabled():
            return
        # By the code of forward passes, which Functions may share: apply() has no frame from torch 2.14 on.
        forwards = {getattr(each.forward, "__code__", None) for each in _functions()}
        frame: Any = sys._getframe(1)
        while frame is not None:
            if frame.f_code in forwards and any(map(self._is_or_comes_of, _arguments(frame))):
                raise RuntimeError(
                    "autograd.Function.apply() is given logits that are not made, of which it would have no gradient: "
                    "give it logits.clone(), or undo() what hf.apply() has done"
                )
            frame = frame.f_back

    def _is_or_comes_of(self, other: Any) -> bool:
        other = getattr(other, "deferred", other) if isinstance(other, Tensor) else other
        return other is self or (self.parent is not None and self.parent._is_or_comes_of(other))

    def _made(self, grad: bool) -> Tensor | None:
        return self.with_graph if grad or self.with_graph is not None else self.without

    def _keep(self, found: Tensor, grad: bool) -> None:
        if grad:
            self.with_graph = found
            for key in self.hooks_by_id:
                found.register_hook(partial(_heard, self.hooks_by_id, key))
        else:
            self.without = found
        self.version = version_of(found)

    def _make(self, grad: bool, keep: bool) -> Tensor:
        """The logits, by all steps from the head, or from where logits are made. keep: those before the last step."""
        if self.without is not None and version_of(self.without) != self.version:
            raise RuntimeError(
                "logits were written to in place under torch.no_grad(), and are read with a gradient only now: read "
                "them with a gradient before, or call the model without labels"
            )
        if self.parent is None:
            self._check_unchanged()
            if self._is_replaced():
                return F.linear(self.given, *self.layer)  # type: ignore[misc]
            return nn.Module.__call__(self.head, self.given)
        before = self.parent._made(grad)
        then = self.parent.version
        written = before is not None and then is not None and version_of(before) != then
        if before is None:
            before = self.parent._make(grad, keep)
            if keep or self.parent.shown:
                self.parent._keep(before, grad)
        found = self.step(before, *self.arguments)
        if written and found.untyped_storage().data_ptr() != before.untyped_storage().data_ptr():
            raise RuntimeError(
                f"logits were written to in place after {self.step.__name__}() of them, which is computed only now: "
                "write to them before it, or call the model without labels"
            )
        return found

    def _is_replaced(self) -> bool:
        """Whether the head's weight or bias is another tensor than it was, unless FSDP2 has put it into shards."""
        if self.layer is None:
            return False
        now = _layer_of(self.head)
        return now is None or (any(map(operator.is_not, now, self.layer)) and not any(map(_is_shard, now)))

    def _check_unchanged(self) -> None:
        """Raise RuntimeError if the head, or its input, is not what it was when the model called it."""
        if is_compiling():
            return
        in_shards = any(map(_is_shard, self.head.parameters()))
        if any(map(_is_freed, self.layer or ())) and not in_shards:
            raise RuntimeError(f"{_IN_SHARDS}: read them before the backward pass, or call the model without labels")
        stepped = int(self.steps) != self.head.steps
        gathered = in_shards and self.layer is not None  # which FSDP2 frees
        if stepped or (not gathered and self._are_written(self.parameters)):
            raise RuntimeError(
                "logits are read after the weight of their head has changed, as an optimizer's step does: read them "
                "before, or call the model without labels"
            )
        if self._are_written(self.inputs):
            raise RuntimeError(
                "logits are read after the hidden states of their head were written to in place: read them before, or "
                "call the model without labels"
            )

    def _are_written(self, tensors: list["_Seen"]) -> bool:
        return any(each.is_written(waits=not self.within) for each in tensors)

    def on_gradient(self, hook: Any) -> RemovableHandle:
        """As Tensor.register_hook, of a tensor that may never be made."""
        if self.with_graph is not None:
            return self.with_graph.register_hook(hook)
        handle = RemovableHandle(self.hooks_by_id)
        self.hooks_by_id[handle.id] = hook
        return handle

    def _as_then(self) -> AbstractContextManager:
        """Autocast as it was when the model called its head."""
        kind = self.device_type
        same = torch.is_autocast_enabled(kind) == self.autocast
        if same and (not self.autocast or torch.get_autocast_dtype(kind) == self.lowered):
            return nullcontext()
        return torch.autocast(kind, dtype=self.lowered, enabled=self.autocast)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return getattr(self.tensor(), name)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        this, kwargs = args[0] if args else None, kwargs or {}
        if isinstance(this, Deferred):
            if func is F.cross_entropy:
                return this.cross_entropy(*args[1:], **kwargs)
            if func is torch.tanh and len(args) == 1 and not kwargs:
                return this.tanh()
        return func(*tree_map(_made, args), **tree_map(_made, kwargs))


def _made(each: Any) -> Any:
    return each.tensor() if isinstance(each, Deferred) else each


def _heard(hooks: dict[int, Any], key: int, gradient: Tensor) -> Any:
    """What a hook says of a gradient, unless its handle has removed it."""
    return hooks[key](gradient) if key in hooks else None


def _operator(name: str) -> Callable[..., Any]:
    def of_tensor(self: Deferred, *others: Any) -> Any:
        return getattr(self.tensor(), name)(*map(_made, others))

    return of_tensor


_OPERATORS = (
    "sub", "rsub", "rtruediv", "pow", "rpow", "matmul", "rmatmul", "neg", "abs", "iadd", "isub", "imul", "itruediv",
    "lt", "le", "gt", "ge", "eq", "ne", "and", "or", "xor", "invert", "len", "iter", "setitem", "float", "int", "bool",
)  # fmt: skip
for _name in _OPERATORS:
    setattr(Deferred, f"__{_name}__", _operator(f"__{_name}__"))
Deferred.__hash__ = object.__hash__  # type: ignore[method-assign]


def version_of(tensor: Tensor) -> int | None:
    """What tells whether a tensor is written to in place; of one of inference mode nothing does."""
    return None if is_compiling() or tensor.is_inference() else tensor._version


def _kept(argument: Any) -> Any:
    """A copy of an argument for a step that is taken later, because its owner may write to it before."""
    return argument.clone() if isinstance(argument, Tensor) else argument


def _seen(tensors: Iterable[Tensor]) -> list["_Seen"]:
    return [] if is_compiling() or is_recorded() else [_Seen(each) for each in tensors]


class _Seen:
    """What a tensor was, by which later writes to it are noticed.

    In-place functions change its version, and an assignment to .data changes its memory. Writes through .data, such as
    those of DeepSpeed and some optimizers, change neither. A sample of elements is compared to notice these. storage: a
    weak reference, so that no other storage gets the same identity.
    """

    def __init__(self, tensor: Tensor) -> None:
        self.tensor, self.version = tensor, version_of(tensor)
        plain = type(tensor) in (Tensor, nn.Parameter) and not is_functorch_wrapped_tensor(tensor)
        self.storage = StorageWeakRef(tensor.untyped_storage()) if plain else None
        self.place = self._place() if plain else None
        self.sample = self._sample() if plain and not torch._C._len_torch_dispatch_stack() else None

    def is_written(self, waits: bool) -> bool:
        """waits: whether the host may wait for the elements, if the tensor is not on a CPU."""
        if version_of(self.tensor) != self.version:
            return True
        if self.storage is None:
            return False
        if self._place() != self.place or self.tensor.untyped_storage()._cdata != self.storage.cdata:
            return True
        readable = self.tensor.is_cpu or (waits and not torch.cuda.is_current_stream_capturing())
        if self.sample is None or not readable or torch._C._len_torch_dispatch_stack():
            return False
        return not torch.equal(self.sample, self._sample())

    def _place(self) -> Any:
        return self.tensor.data_ptr(), self.tensor.shape, self.tensor.stride()

    def _sample(self) -> Tensor:
        """Up to 4096 elements from all over a tensor, as bytes, so that NaN equals itself."""
        most = max(1, int(1024 ** (1 / max(1, self.tensor.ndim))))
        steps = tuple(slice(None, None, max(1, size // most)) for size in self.tensor.shape)
        found = self.tensor.detach()[steps].clone(memory_format=torch.contiguous_format)
        return found.view(torch.uint8)


def _same_device(device: Any, of: torch.device) -> bool:
    wanted = torch.device(device) if isinstance(device, (str, int, torch.device)) else None
    if wanted is None or wanted.type != of.type:
        return False
    # Without an index it is the current one.
    return wanted.index == of.index or (
        wanted.index is None and torch.get_device_module(of.type).current_device() == of.index
    )


def _is_number(factor: Any) -> bool:
    return isinstance(factor, (int, float)) and not isinstance(factor, bool) and 0 < abs(factor) < math.inf


def _is_index(part: Any) -> bool:
    """Whether it says itself how many dims it takes: a mask of bytes, a list or another library's array may not."""
    if isinstance(part, Tensor):
        return part.dtype != torch.uint8
    return part is Ellipsis or (isinstance(part, (int, slice)) and not isinstance(part, bool))


def _leaves_last(index: Any, ndim: int) -> bool:
    """Whether an index takes rows, and leaves the last dim whole and last."""
    parts = index if isinstance(index, tuple) else (index,)
    if not all(map(_is_index, parts)):
        return False
    dims = sum(each.ndim if isinstance(each, Tensor) and each.dtype == torch.bool else 1 for each in parts)
    has_rest = any(each is Ellipsis for each in parts)
    tensors = sum(isinstance(each, Tensor) for each in parts)
    if has_rest:
        dims -= 1
    if tensors > 1 or dims > ndim:
        return False
    if not has_rest and dims < ndim:
        return True
    last = parts[-1]
    return isinstance(last, slice) and last == slice(None)


@cache
def _warn_once(text: str) -> None:
    warnings.warn(f"fused_softmax.hf.apply: {text}", stacklevel=2)


def say(text: str) -> None:
    """Warn of it once, unless a compiler traces the call."""
    if not is_compiling():
        _warn_once(text)


def _say_made() -> None:
    """Warn that a model's own code asks for logits, which costs what was to be saved."""
    if is_compiling():
        return
    frame: Any = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_filename == __file__:
        frame = frame.f_back
    where = f"{Path(frame.f_code.co_filename).name}, {frame.f_code.co_name}, line {frame.f_lineno}"
    say(f"all logits are made, as without apply(), because more than their cross_entropy is asked for in {where}")


class Logits(Tensor):
    """What an output holds in place of logits: a Tensor of their shape and dtype, made when anything reads it."""

    deferred: Deferred

    @staticmethod
    def __new__(cls, deferred: Deferred) -> "Logits":
        made = Tensor._make_wrapper_subclass(
            cls, deferred.shape, dtype=deferred.dtype, device=deferred.device, requires_grad=False
        )
        made.deferred = deferred
        deferred.shown = True
        return made

    def __init__(self, deferred: Deferred) -> None:
        pass

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        return f"logits {tuple(self.deferred.shape)} that are made when they are read"

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.deferred.tensor().__reduce_ex__(protocol)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        this, kwargs = args[0] if args else None, kwargs or {}
        if isinstance(this, Logits):
            if func in _KNOWN:
                return _KNOWN[func](this.deferred)
            if func is Tensor.clone and _is_of(sys._getframe(1), "torch.nn.parallel."):
                return Logits(this.deferred)  # which DDP passes on, and reads nothing
            if func is Tensor.register_hook:  # FSDP2 registers one with every output
                return this.deferred.on_gradient(args[1])
            if func in (Tensor.float, Tensor.to):
                found = this.deferred.to(*(args[1:] if func is Tensor.to else (torch.float32,)), **kwargs)
                return Logits(found) if isinstance(found, Deferred) else found
        return func(*tree_map(_read, args), **tree_map(_read, kwargs))

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """For code beneath torch functions, such as that of collectives, through which no gradient goes."""
        flat, _ = tree_flatten((args, kwargs or {}))
        if torch.is_grad_enabled() and any(isinstance(each, Logits) and each.deferred.grad for each in flat):
            raise RuntimeError(f"{func} does not take logits that are not made: read output.logits, and give it that")
        return func(*tree_map(_read, args), **tree_map(_read, kwargs or {}))


def _read(each: Any) -> Any:
    return each.deferred.tensor() if isinstance(each, Logits) else each


_OF_TENSOR: Any = Tensor
# What is known of logits that are not made.
_KNOWN: dict[Any, Callable[[Deferred], Any]] = {
    _OF_TENSOR.shape.__get__: lambda of: of.shape,
    _OF_TENSOR.dtype.__get__: lambda of: of.dtype,
    _OF_TENSOR.device.__get__: lambda of: of.device,
    _OF_TENSOR.ndim.__get__: lambda of: of.ndim,
    _OF_TENSOR.requires_grad.__get__: lambda of: of.grad,
    _OF_TENSOR.is_cuda.__get__: lambda of: of.is_cuda,
    _OF_TENSOR._base.__get__: lambda of: None,
    _OF_TENSOR.grad_fn.__get__: lambda of: None if of.with_graph is None else of.with_graph.grad_fn,
    _OF_TENSOR.dim: lambda of: of.ndim,
    _OF_TENSOR.numel: lambda of: of.numel(),
    _OF_TENSOR.is_floating_point: lambda of: True,
    torch.is_floating_point: lambda of: True,
}


def is_recorded() -> bool:
    """Whether torch.export, torch.jit or make_fx records a graph of the pass. Its outputs have to be plain tensors."""
    if is_compiling():
        # is_exporting() of torch 2.11 is true in all compiled code.
        flag = getattr(torch.compiler, "_is_exporting_flag", None)
        return torch.compiler.is_exporting() if flag is None else flag
    return torch.jit.is_tracing() or get_proxy_mode() is not None


def settled(output: Any, made: bool = False) -> Any:
    """A model's output without deferred logits that a reader could take for something else than a tensor.

    made: whether logits are made now.
    """

    def leave(each: Any) -> Any:
        return _left(each, made)

    if isinstance(output, Deferred):
        return leave(output)
    kind: Any = type(output)
    names: Any = output if isinstance(output, dict) else getattr(output, "__dict__", {})
    if isinstance(names.get("data"), dict):  # of a UserDict, such as BatchEncoding
        names = names["data"]
    each_of = output if isinstance(output, (tuple, list)) else names.values()
    if not any(isinstance(each, Deferred) for each in each_of):
        return output
    if isinstance(output, (tuple, list)):
        parts = [leave(each) for each in output]
        return kind(*parts) if hasattr(output, "_fields") else kind(parts)
    if not (isinstance(output, dict) and hasattr(kind, "__dataclass_fields__")):
        names.update({name: leave(each) for name, each in names.items()})
        return output
    if kind not in _LAZY and not is_compiling():
        register_output(kind)
    if kind not in _LAZY:  # which a compiler cannot make
        return kind(**{name: _made(each) for name, each in output.items()})
    return _LAZY[kind](**{name: leave(each) for name, each in output.items()})


def _left(each: Any, made: bool) -> Any:
    if not isinstance(each, Deferred):
        return each
    if each.with_graph is not None:
        return each.with_graph
    each.within = False
    if made:
        return each.tensor()
    return each if is_compiling() else Logits(each)


def _plain(each: Any) -> Any:
    """The tensor of a field that may hold logits that are not made."""
    return _made(_read(each))


def _walks(frame: Any) -> bool:
    """Whether the reader is FSDP2, which walks over all fields of an output for hooks and casts, and reads nothing."""
    while frame is not None and frame.f_globals.get("__name__") == "dataclasses":
        frame = frame.f_back
    return frame is not None and _is_of(frame, "torch.distributed.")


def _is_of(frame: Any, package: str) -> bool:
    return str(frame.f_globals.get("__name__")).startswith(package)


_LAZY: dict[type, Any] = {}


def register_output(base: Any) -> None:
    """Make a class of outputs of transformers whose fields are made when they are read."""

    def field(name: str) -> property:
        def put(self: Any, each: Any) -> None:
            self.__dict__[name] = each

        def get(self: Any) -> Any:
            each = self.__dict__[name]
            return each if isinstance(each, Logits) and _walks(sys._getframe(1)) else _plain(each)

        return property(get, put)

    def __getitem__(self: Any, key: Any) -> Any:
        if isinstance(key, str):
            return _plain(base.__getitem__(self, key))
        if isinstance(key, int):
            return self[tuple(self.keys())[key]]
        return self.to_tuple()[key]

    members = {
        "__module__": base.__module__, "__qualname__": base.__qualname__, "__doc__": base.__doc__,
        "__getitem__": __getitem__,
        "to_tuple": lambda self: tuple(self[name] for name in self.keys()),
        "get": lambda self, key, default=None: _plain(base.get(self, key, default)),
        "__reduce__": lambda self: (base, tuple(getattr(self, each.name) for each in fields(self))),
        **{each.name: field(each.name) for each in fields(base)},
    }  # fmt: skip
    _LAZY[base] = type(base.__name__, (base,), members)
