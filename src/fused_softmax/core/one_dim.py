"""The rules of any operator y = f(input, dim, dtype) of the input's shape whose gradient is made of y and dy.

What such an operator takes after these arguments (scale, mask) goes through them as it is, or by rules of its own.
"""

import torch
from torch import Tensor


def forward_schema(*more: str) -> str:
    """more: the arguments after these, as torch.library writes them."""
    return f"({', '.join(('Tensor input, int dim, ScalarType? dtype=None', *more))}) -> Tensor"


def backward_schema(*more: str) -> str:
    return f"({', '.join(('Tensor dy, Tensor y, int dim, ScalarType? dtype=None', *more))}) -> Tensor"


# What tracing is told instead of results.


def fake(input, dim, dtype=None, *rest):
    return input.new_empty(input.shape, dtype=dtype)


def fake_backward(dy, y, dim, dtype=None, *rest):
    return y.new_empty(y.shape, dtype=dtype)


# vmap: the batch is one more dim, in front.


def batched(operator, info, in_dims, input, dim, *rest):
    scalar = input.ndim == (in_dims[0] is not None)
    input = in_front(input, in_dims[0], info.batch_size)
    if scalar:
        input, dim = input.unsqueeze(-1), 0
    y = operator(input, dim % (input.ndim - 1) + 1, *rest)
    return y.squeeze(-1) if scalar else y, 0


def batched_backward(operator, info, in_dims, dy, y, dim, *rest):
    scalar = y.ndim == (in_dims[1] is not None)
    dy, y = (in_front(t, at, info.batch_size) for t, at in zip((dy, y), in_dims, strict=False))
    if scalar:
        dy, y, dim = dy.unsqueeze(-1), y.unsqueeze(-1), 0
    dx = operator(dy, y, dim % (y.ndim - 1) + 1, *rest)
    return dx.squeeze(-1) if scalar else dx, 0


def in_front(t: Tensor, at: int | None, batch_size: int) -> Tensor:
    """t with its batch dim, or a new one where it has none, first."""
    return t.expand(batch_size, *t.shape) if at is None else t.movedim(at, 0)


def one_by_one(operator, info, in_dims, arguments):
    """A call for each of the batch; of an empty one, a call on zeros tells the shapes."""
    found, n = [], info.batch_size
    for i in range(n or 1):
        tensors = zip(arguments, in_dims, strict=False)
        of_call = [each if not isinstance(at, int) else _example(each, at, i, n) for each, at in tensors]
        found.append(operator(*of_call))
    return tuple(torch.stack(each)[:n] for each in zip(*found, strict=True)), (0,) * len(found[0])


def _example(each: Tensor, at: int, i: int, n: int) -> Tensor:
    return each.select(at, i) if n else each.sum(at, dtype=each.dtype)
