"""What every operator asks of its arguments: whether its kernels take the call, and how tensors lie as rows."""

import os

import torch
import triton.language as tl
from torch import Tensor
from torch._C._functorch import TransformType
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor
from torch.autograd import forward_ad

from fused_softmax.plan import Alignment

TLDTYPES = {
    torch.float32: tl.float32, torch.float16: tl.float16, torch.bfloat16: tl.bfloat16, torch.float64: tl.float64,
}  # fmt: skip
DTYPES = tuple(TLDTYPES)  # of results
_TRACED_TYPES = (Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)
INTERPRET = os.environ.get("FUSED_SOFTMAX_INTERPRET") == "1"  # CPU tensors run on the kernels, interpreted


def check(name: str, input: Tensor, dim: int, dtype: torch.dtype | None, out: Tensor | None) -> torch.dtype:
    """The dtype of the result, or an error for a call that torch refuses too."""
    if not isinstance(input, Tensor):
        raise TypeError(f"{name}: input must be a Tensor, not {type(input).__name__}")
    if input.is_nested or input.layout != torch.strided:
        kind = "nested" if input.is_nested else str(input.layout)
        # As torch: what is sparse has no such kernel, what is nested is refused by the one it has.
        error = RuntimeError if input.is_nested else NotImplementedError
        raise error(f"{name}: input must be a dense strided tensor, got a {kind} one of shape {_shape(input)}")
    if not isinstance(dim, int) or isinstance(dim, bool):
        raise TypeError(f"{name}: dim must be an int, not {type(dim).__name__} ({dim!r})")
    bound = max(1, input.ndim)
    if not -bound <= dim < bound:
        raise IndexError(
            f"{name}: dim {dim} is out of range [{-bound}, {bound - 1}] for input of shape {_shape(input)}"
        )
    if dtype is not None and not isinstance(dtype, torch.dtype):
        raise TypeError(f"{name}: dtype must be a torch.dtype, not {type(dtype).__name__} ({dtype!r})")
    result_dtype = dtype or input.dtype
    if not result_dtype.is_floating_point and not result_dtype.is_complex:
        what = f"dtype={dtype}" if dtype is not None else f"input of dtype {input.dtype} without dtype="
        raise NotImplementedError(f"{name}: not implemented for {what}; give a floating dtype")
    if out is not None:
        _check_out(name, input, result_dtype, out)
    return result_dtype


def runs_here(input: Tensor, *others: Tensor) -> bool:
    """Whether these kernels take a call on these tensors; what is not `traced` either is left to torch's operations."""
    return (
        not torch.compiler.is_compiling()  # first, for dynamo follows none of the others
        and type(input) is Tensor
        and all(type(other) in (Tensor, torch.nn.Parameter) and not other.is_neg() for other in others)
        and on_device(input)
        and not input.is_neg()
        and not torch._C._functorch.is_legacy_batchedtensor(input)  # batched gradients, in torch.autograd.grad
        and forward_ad._current_level < 0
        and not torch.jit.is_tracing()
        and not torch._C._are_functorch_transforms_active()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._len_torch_function_stack()
    )


def traced(*tensors: Tensor) -> bool:
    """Whether a call becomes an operator of `library`, for a compiler, export, vmap or a mode watches it."""
    if not all(type(tensor) in _TRACED_TYPES and on_device(tensor) for tensor in tensors):
        return False
    if torch.compiler.is_compiling():
        return not _transformed()
    watched = (
        torch._C._are_functorch_transforms_active()
        or torch._C._len_torch_dispatch_stack()
        or any(type(tensor) is FakeTensor for tensor in tensors)
    )
    return bool(watched) and not torch.jit.is_tracing() and not _transformed()


def traced_whole(*tensors: Tensor) -> bool:
    """As `traced`, of operators that have no rule for vmap either."""
    return not _within_functorch() and traced(*tensors)


def on_device(tensor: Tensor) -> bool:
    return tensor.is_cuda or (INTERPRET and tensor.device.type == "cpu")


def _transformed() -> bool:
    """Whether something differentiates by rules that operators cannot have: functorch's grad and jvp, forward mode."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return forward_ad._current_level >= 0 or any(level.key() != TransformType.Vmap for level in levels)


def _within_functorch() -> bool:
    """Whether a transform of functorch's runs; its own functionalization, by which AOTAutograd traces, is none."""
    levels = torch._C._functorch.get_interpreter_stack() or ()
    return any(level.key() != TransformType.Functionalize for level in levels)


# As torch.compiler.assume_constant_result, which imports dynamo: it asks while it traces, and guards on the answer.
_transformed._dynamo_marked_constant = True  # type: ignore[attr-defined]
_within_functorch._dynamo_marked_constant = True  # type: ignore[attr-defined]


def needs_grad(*tensors: Tensor) -> bool:
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def batched(*tensors: Tensor | None) -> bool:
    """Whether one stands for many, as the gradients of torch.autograd.grad(is_grads_batched=True) do."""
    return any(each is not None and torch._C._functorch.is_legacy_batchedtensor(each) for each in tensors)


def alignment_of(x: Tensor, *others: Tensor) -> Alignment:
    """How the rows of all these tensors lie against 16-byte boundaries, counted in elements of x."""
    vector = 16 // x.element_size()
    many = x.shape[0] > 1
    places = {(t.data_ptr() // t.element_size() % vector, t.stride(0) % vector if many else 0) for t in (x, *others)}
    if places == {(0, 0)} and x.shape[1] % vector == 0:
        return "even"
    return "shifted" if len(places) == 1 and x.shape[1] >= 2 * vector else "scalar"


def as_rows(x: Tensor) -> Tensor:
    """x as [n_rows, n_cols] with contiguous columns; a copy only where no single row stride describes it."""
    if x.ndim == 0:
        return x.reshape(1, 1)
    rows = _flatten(x)
    return rows if rows is not None else x.contiguous().view(-1, x.shape[-1])


def is_rows(x: Tensor) -> bool:
    rows = as_rows(x) if x.ndim == 0 else _flatten(x)
    return rows is not None and (rows.shape[0] == 1 or rows.stride(0) >= rows.shape[1])


def overlap(a: Tensor, b: Tensor) -> bool:
    return a.untyped_storage().data_ptr() == b.untyped_storage().data_ptr()


def _flatten(x: Tensor) -> Tensor | None:
    n_cols = x.shape[-1]
    if n_cols > 1 and x.stride(-1) != 1:
        return None
    n_rows, row_stride = 1, n_cols
    for size, stride in zip(reversed(x.shape[:-1]), reversed(x.stride()[:-1]), strict=True):
        if size == 1:
            continue
        if n_rows == 1:
            row_stride = stride
        elif stride != n_rows * row_stride:
            return None
        n_rows *= size
    return x.as_strided((n_rows, n_cols), (row_stride, 1))


def _check_out(name: str, input: Tensor, result_dtype: torch.dtype, out: Tensor) -> None:
    if not isinstance(out, Tensor):
        raise TypeError(f"{name}: out must be a Tensor, not {type(out).__name__}")
    if out.dtype != result_dtype:
        raise RuntimeError(f"{name}: out must have dtype {result_dtype}, got {out.dtype}")
    if out.device != input.device:
        raise RuntimeError(f"{name}: out must be on the input's device {input.device}, got {out.device}")
    if out.shape != input.shape and out.numel() > 0:
        raise RuntimeError(f"{name}: out must have the input's shape {_shape(input)}, got {_shape(out)}")


def _shape(x: Tensor) -> str:
    return "(nested)" if x.is_nested else str(tuple(x.shape))
