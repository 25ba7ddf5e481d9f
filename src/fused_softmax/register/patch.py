"""PyTorch's own softmax, log_softmax, logsumexp and cross_entropy on these kernels, in code that knows nothing of them.

`enable()` puts the kernels in the place of ATen's for CUDA tensors (CPU tensors with FUSED_SOFTMAX_INTERPRET=1). Below
autograd, autocast, vmap and modes, so all of these stay PyTorch's, second derivatives included; and below every name:
functions imported before, methods, modules, and ATen's own callers. cross_entropy, which ATen composes of others, is
taken where autograd begins, whole: its gradient is written in the forward pass; so is scaled_dot_product_attention, if
that is asked for. What the kernels do not take goes on to ATen's. A compiler has replaced softmax before there is a
call: what is compiled stays as it compiles it. softmax over the ragged dim of a nested tensor, which torch pads, is
taken where torch asks the class of nested tensors: its gradient there is that of another dim.
"""

import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor  # imported with torch

from fused_softmax.core.calls import find, keep
from fused_softmax.core.checks import DTYPES
from fused_softmax.core.launched import Launched
from fused_softmax.core.layout import overlap
from fused_softmax.core.options import by_environment
from fused_softmax.core.route import INTERPRET, is_sharded, needs_grad, on_device, watcher_of
from fused_softmax.ops.attention import sdpa as attention_sdpa
from fused_softmax.ops.attention.attention import attention
from fused_softmax.ops.losses.cross_entropy import prepare_plain
from fused_softmax.ops.losses.over_ranks.dtensor import loss_as_aten
from fused_softmax.ops.segments import operators as segment_rules
from fused_softmax.ops.segments.nested import is_jagged, like, of_nested
from fused_softmax.ops.softmax import calls as softmax_calls
from fused_softmax.ops.softmax.scores import PLAIN, PLAIN_IN_ANY_BATCH, Scores
from fused_softmax.register import pyg as of_pyg

_DEVICES = [name for name, there in (("CUDA", torch.backends.cuda.is_built()), ("CPU", INTERPRET)) if there]
# Where a thread waits that is within no call of anybody's: by module and function.
_IDLE = {("threading", "wait"), ("concurrent.futures.thread", "_worker"), ("selectors", "select")}

_no_torch_functions = torch._C.DisableTorchFunction

_lock = threading.Lock()
_depth = 0  # how many enable() have had no disable() yet
_asked: list[bool] = []  # of each of them, whether with attention
_asked_of_pyg: list[bool] = []  # and whether with PyG's softmax
_library: torch.library.Library | None = None  # its registrations live as long as it does
_of_attention: torch.library.Library | None = None
listener: Callable[..., Any] | None = None  # hears of calls that are not kept: listener(name, kernel, args, kwargs)


def enable(*, attention: bool = False, pyg: bool = False) -> None:
    """Run torch's softmax, log_softmax, logsumexp and cross_entropy on these kernels, from now on, in all threads.

    attention: also scaled_dot_product_attention, in 16 bits. The kernels take a call if they were measured to be faster
        (a float mask with its gradient, on GPUs of compute capability 9.0), or if torch would compose it of other
        operations, with all scores in memory. Other calls, and those with dropout, stay torch's.
    pyg: also torch_geometric.utils.softmax, by segment_softmax, in every module that has bound the name, such as those
        of GATConv and TransformerConv. Calls that a compiler traces stay PyG's. Raises ImportError without
        torch_geometric.

    Results, gradients and errors are torch's, but for three. A target that is not a class makes the loss NaN on a GPU.
    An ignored row has gradient 0, also where it holds NaN or an infinity, of which torch makes NaN. The gradient of
    softmax over the ragged dim of a nested tensor is that of its segments.
    Calls nest: each needs a `disable()` of its own. Make the first one before other threads call these functions.

    >>> enable()
    >>> torch.nn.functional.softmax(torch.randn(8, 50257, device="cuda"), dim=-1)  # the kernel `_part_forward`
    """
    global _depth, _library, _of_attention
    with _lock:
        if pyg:
            of_pyg.check_there()
            if not any(_asked_of_pyg):
                of_pyg.replace()
        if _library is None:
            _library = _register()
        if attention and _of_attention is None:
            _of_attention = _register_attention()
        _depth += 1
        _asked.append(attention)
        _asked_of_pyg.append(pyg)


def disable() -> None:
    """Undo the latest `enable()` that still stands. The last one gives ATen its kernels back.

    ATen's table of kernels must not change while another thread may read it. So while another thread runs, the
    stand-ins remain, and pass every call on to ATen, which takes about a microsecond each. A later `disable()` that
    finds no such thread removes them. A thread that waits in the standard library, like tqdm's, does not count.

    Raises RuntimeError if nothing is enabled.

    >>> enable()
    >>> disable()
    """
    global _depth, _library, _of_attention
    with _lock:
        if _depth == 0:
            raise RuntimeError("fused_softmax.disable() without an enable() before it")
        _depth -= 1
        _asked.pop()
        if _asked_of_pyg.pop() and not any(_asked_of_pyg):
            of_pyg.restore()
        if not any(_asked) and (_depth == 0 or _of_attention is not None) and _alone():
            _of_attention = None
            if _depth == 0:
                _library = None


@contextmanager
def enabled(*, attention: bool = False, pyg: bool = False) -> Iterator[None]:
    """`enable()` for the length of a with block, in all threads.

    >>> with enabled():
    ...     model(tokens)
    """
    enable(attention=attention, pyg=pyg)
    try:
        yield
    finally:
        disable()


def _alone() -> bool:
    frames = sys._current_frames()
    frames.pop(threading.get_ident())
    return all((frame.f_globals.get("__name__"), frame.f_code.co_name) in _IDLE for frame in frames.values())


def _register() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        # PyTorch says once that an operator of its own is replaced, which is what was asked for.
        warnings.filterwarnings("ignore", "Warning only once for all operators")
        for device in _DEVICES:
            keys = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, device))
            for name, stand_in in _STAND_INS.items():
                atens = partial(torch.library.get_kernel(f"aten::{name}", device).call_boxed, keys)
                library.impl(name, stand_in(atens), device)
            composed = torch.ops.aten.cross_entropy_loss.default.decompose
            for key in (device, f"Autograd{device}"):  # in inference mode autograd has no say
                library.impl("cross_entropy_loss", _cross_entropy(composed), key)
    for name, kernel in (("_softmax", _ragged_softmax), ("_softmax_backward_data", _ragged_gradient)):
        torch.library.register_torch_dispatch(f"aten::{name}", NestedTensor, _of_nested(name, kernel), lib=library)
    return library


def _register_attention() -> torch.library.Library:
    library = torch.library.Library("aten", "IMPL")
    composed = torch.ops.aten.scaled_dot_product_attention.default.decompose
    for device in _DEVICES:
        for key in (device, f"Autograd{device}"):
            library.impl("scaled_dot_product_attention", _attention(composed), key)
    return library


def _passing_on(name: str, atens: Callable, kernel: Callable) -> Callable:
    def passing_on(*args, **kwargs):
        if not _depth:
            return atens(*args, **kwargs)
        with _no_torch_functions():  # modes and subclasses have had their say
            return kernel(*args, **kwargs) if listener is None else listener(name, kernel, args, kwargs)

    return passing_on


def left_to_aten(atens: Callable, refused: str) -> Callable:
    """ATen's own, for a call that the kernels do not take. refused: why, for `explain()`, which listens here."""
    return atens


def _scores() -> Scores:
    """Those of a call of torch's, for which the environment alone says whether a row's bits may follow from others."""
    return PLAIN_IN_ANY_BATCH if by_environment() else PLAIN


# What stands in for ATen's kernel `atens`, and has its arguments.


def _softmax(log: bool, atens: Callable) -> Callable:
    of = softmax_calls.LOG_SOFTMAX if log else softmax_calls.SOFTMAX

    def kernel(x: Tensor, dim: int, half_to_float: bool, **out: Tensor) -> Tensor:
        dtype = torch.float32 if half_to_float else x.dtype
        refused = _refused(x, dim)
        if half_to_float and x.dtype != torch.float16:
            refused = f"half_to_float of {x.dtype}"
        refused = refused or _refused_outs(out, x.shape, dtype, x)
        if refused:
            return left_to_aten(atens, refused)(x, dim, half_to_float, **out)
        return softmax_calls.forward(of, x, (dim,), dtype, out.get("out"), _scores())

    kernel, name = _passing_on(of.name, atens, kernel), of.forward

    def seen_first(x: Tensor, dim: int, half_to_float: bool, out: Tensor | None = None) -> Tensor:
        if out is not None:
            return kernel(x, dim, half_to_float, out=out)
        if _depth and not half_to_float:
            call = find(name, ((dim,), x.dtype, False, by_environment()), x, None)
            if call is not None:
                return call(x, None, None, None)
        return kernel(x, dim, half_to_float)

    return seen_first


def _gradient(log: bool, atens: Callable) -> Callable:
    name = "log_softmax_backward" if log else "softmax_backward"

    def kernel(dy: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype, **out: Tensor) -> Tensor:
        rounded = (y.dtype, input_dtype) == (torch.float32, torch.float16)  # of a forward with half_to_float
        refused = _refused(y, dim) or _refused_outs(out, y.shape, input_dtype, y, dy)
        if dy.shape != y.shape or dy.dtype != y.dtype:
            refused = "the incoming gradient is not of the output's shape and dtype"
        elif not (rounded or input_dtype == y.dtype):
            refused = f"a gradient of {input_dtype} from an output of {y.dtype}"
        if refused:
            return left_to_aten(atens, refused)(dy, y, dim, input_dtype, **out)
        for each in out.values():
            return softmax_calls.backward_into(dy, y, each, dim, log, by_environment())
        return softmax_calls.backward(dy, y, dim, input_dtype, log, False, 1.0, by_environment())

    kernel = _passing_on(name, atens, kernel)

    def seen_first(dy: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype, **out: Tensor) -> Tensor:
        if _depth and not out:
            call = find(name, (dim, input_dtype, False, False, by_environment()), y, dy)
            if call is not None:
                return call(dy, y, 1.0)
        return kernel(dy, y, dim, input_dtype, **out)

    return seen_first


def _logsumexp(atens: Callable) -> Callable:
    of = softmax_calls.LOGSUMEXP

    def kernel(x: Tensor, dim: list[int], keepdim: bool = False, **out: Tensor) -> Tensor:
        refused = next(filter(None, (_refused(x, d) for d in dim)), "")
        if not dim or not x.ndim or not x.numel():
            refused = "there is nothing to sum over"
        if not refused:
            dims = {d % x.ndim for d in dim}
            shape = [1 if d in dims else size for d, size in enumerate(x.shape) if keepdim or d not in dims]
            twice = "a dim is given twice" if len(dims) < len(dim) else ""
            refused = twice or _refused_outs(out, torch.Size(shape), x.dtype, x)
        if refused:
            return left_to_aten(atens, refused)(x, dim, keepdim, **out)
        return softmax_calls.forward(of, x, tuple(dim), x.dtype, out.get("out"), _scores(), keepdim)

    kernel, name = _passing_on(of.name, atens, kernel), of.forward

    def seen_first(x: Tensor, dim: list[int], keepdim: bool = False, **out: Tensor) -> Tensor:
        if _depth and not out:
            call = find(name, (tuple(dim), x.dtype, keepdim, by_environment()), x, None)
            if call is not None:
                return call(x, None, None, None)
        return kernel(x, dim, keepdim, **out)

    return seen_first


def _cross_entropy(atens: Callable) -> Callable:
    def kernel(
        x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> Tensor:  # fmt: skip
        if is_sharded(x):
            found = loss_as_aten(x, target, weight, reduction, ignore_index, label_smoothing)
            if found is not None:
                return found
            return left_to_aten(atens, "this DTensor's shards are not worked on one by one")(
                x, target, weight, reduction, ignore_index, label_smoothing
            )
        refused = _refused_loss(x, target, weight, reduction, label_smoothing)
        if refused:
            return left_to_aten(atens, refused)(x, target, weight, reduction, ignore_index, label_smoothing)
        name = ("none", "mean", "sum")[reduction]
        prepared = prepare_plain(x, target, weight, ignore_index, name, label_smoothing)
        options = reduction, ignore_index, label_smoothing > 0, True, torch.is_grad_enabled(), by_environment()
        call = keep(prepared, "aten::cross_entropy", options, x, target, weight)
        return call(x, target, weight, label_smoothing)

    kernel = _passing_on("cross_entropy", atens, kernel)

    def seen_first(
        x: Tensor, target: Tensor, weight: Tensor | None = None, reduction: int = 1, ignore_index: int = -100,
        label_smoothing: float = 0.0,
    ) -> Tensor:  # fmt: skip
        if _depth:
            in_range = 0.0 <= label_smoothing <= 1.0
            smooth, grad = label_smoothing > 0, torch.is_grad_enabled()
            options = reduction, ignore_index, smooth, in_range, grad, by_environment()
            call = find("aten::cross_entropy", options, x, target, weight)
            if call is not None:
                return call(x, target, weight, label_smoothing)
        return kernel(x, target, weight, reduction, ignore_index, label_smoothing)

    return seen_first


def _attention(atens: Callable) -> Callable:
    def seen_first(
        query: Tensor, key: Tensor, value: Tensor, attn_mask: Tensor | None = None, dropout_p: float = 0.0,
        is_causal: bool = False, *, scale: float | None = None, enable_gqa: bool = False,
    ) -> Tensor:  # fmt: skip
        if not any(_asked):
            return atens(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)
        with _no_torch_functions():
            # A user switches ways of torch's off and on again.
            options = dropout_p, is_causal, scale, enable_gqa, torch._C._get_flash_sdp_enabled(), \
                torch._C._get_mem_efficient_sdp_enabled(), torch._C._get_math_sdp_enabled()  # fmt: skip
            look = "aten::attention", options, query, key, value, attn_mask
            call = find(*look)
            if call is None:
                args = query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
                if listener is None:
                    return kernel(look, *args)
                return listener("scaled_dot_product_attention", kernel, (look, *args), {})
            return call(query, key, value, attn_mask)

    def kernel(look, query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa):
        given: dict[str, Any] = {"is_causal": is_causal, "scale": scale, "enable_gqa": enable_gqa}
        tensors = [each for each in (query, key, value, attn_mask) if each is not None]
        watcher = watcher_of(*tensors)
        if watcher is not None:  # nothing is kept of a tensor without data
            return left_to_aten(atens, watcher.reason)(query, key, value, attn_mask, dropout_p, **given)
        refused = ""
        if dropout_p != 0:
            refused = "dropout_p is not 0"
        elif is_causal and attn_mask is not None:
            refused = "is_causal with attn_mask"
        elif query.dtype not in (torch.float16, torch.bfloat16):
            refused = f"no kernel was measured for {query.dtype}"
        elif any((each.dtype, each.device) != (query.dtype, query.device) for each in (key, value)):
            refused = "query, key and value differ in dtype or device"
        elif min(each.ndim for each in tensors[:3]) <= 2:
            refused = "there is no dim of heads"
        elif not attention_sdpa.takes_over(query, key, value, attn_mask, is_causal, scale, enable_gqa):
            refused = "torch's own ways take it, and the kernels were not measured to be faster"
        ours = (
            partial(left_to_aten(atens, refused), dropout_p=dropout_p, **given)
            if refused
            else partial(attention, **given)
        )
        return keep(Launched(ours), *look)(query, key, value, attn_mask)

    return seen_first


def _of_nested(name: str, kernel: Callable) -> Callable:
    """What NestedTensor's __torch_dispatch__ would be asked: the kernel, if a call is over the ragged dim."""

    def rule(cls: Any, func: Any, types: Any, args: Any, kwargs: Any) -> Any:
        *tensors, dim, _ = args
        if not _depth or kwargs or not all(_is_ragged(each, dim) for each in tensors):
            return cls.__torch_dispatch__(func, types, args, kwargs)
        with torch.no_grad():
            return _passing_on(name.strip("_").removesuffix("_data"), func, kernel)(*args)

    return rule


def _is_ragged(x: Any, dim: int) -> bool:
    """Whether `dim` is the ragged one, and torch takes it too: it has no kernel for other places of that dim."""
    if not is_jagged(x) or x._ragged_idx != 1 or dim not in (1, 1 - x.ndim) or x.lengths() is not None:
        return False
    return on_device(x) and x.dtype in DTYPES and watcher_of(x.values(), x.offsets()) is None


def _ragged_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return of_nested("softmax", x, dim, torch.float32 if half_to_float else x.dtype)


def _ragged_gradient(dy: Any, y: Any, dim: int, input_dtype: torch.dtype) -> Tensor:
    """dy's offsets equal y's, or autograd would have refused it."""
    dx = segment_rules.backward("segment_softmax", dy.values(), y.values(), y.offsets(), dtype=input_dtype)
    return like(y, dx)


# Why the kernels do not take a call; "" if they do.


def _refused(x: Tensor, dim: int) -> str:
    bound = max(1, x.ndim)
    if x.dtype not in DTYPES:
        return f"no kernel has {x.dtype}"
    return "" if -bound <= dim < bound else f"dim {dim} is out of range"


def _refused_outs(out: dict[str, Tensor], shape: torch.Size, dtype: torch.dtype, *read: Tensor) -> str:
    for each in out.values():
        like = (each.shape, each.dtype, each.device) == (shape, dtype, read[0].device)
        if not like or any(overlap(each, x) for x in read):
            return "out= is not like the result, or lies over an input"
    return ""


def _refused_loss(
    x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, label_smoothing: float
) -> str:  # fmt: skip
    watcher = watcher_of(*[each for each in (x, target, weight) if each is not None])
    if watcher is not None:
        return watcher.reason
    if x.dtype not in DTYPES:
        return f"no kernel has {x.dtype}"
    if x.ndim not in (1, 2):  # where the class dim is strided, log_softmax is taken as it lies
        return f"logits of {x.ndim} dims: log_softmax is taken as they lie"
    if target.dtype not in (torch.int64, torch.uint8):
        return f"targets are {target.dtype}"
    if target.shape != x.shape[:-1] or target.device != x.device or x.numel() == 0:
        return "targets do not fit, or there are no logits"
    if reduction not in (0, 1, 2) or not 0.0 <= label_smoothing <= 1.0:
        return "reduction or label_smoothing is out of range"
    if weight is not None and (weight.shape, weight.dtype, weight.device) != (x.shape[-1:], x.dtype, x.device):
        return "weight is not of the logits' classes, dtype and device"
    if weight is not None and needs_grad(weight):
        return "weight requires grad, of which torch raises its own error"
    return ""


_STAND_INS: dict[str, Callable[[Callable], Callable]] = {
    "_softmax": partial(_softmax, False),
    "_softmax.out": partial(_softmax, False),
    "_log_softmax": partial(_softmax, True),
    "_log_softmax.out": partial(_softmax, True),
    "_softmax_backward_data": partial(_gradient, False),
    "_softmax_backward_data.out": partial(_gradient, False),
    "_log_softmax_backward_data": partial(_gradient, True),
    "_log_softmax_backward_data.out": partial(_gradient, True),
    "logsumexp": _logsumexp,
    "logsumexp.out": _logsumexp,
}
