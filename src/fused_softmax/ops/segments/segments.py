"""softmax, log_softmax and logsumexp of segments of a dim: of a graph's edges at each node, of a batch's texts.

Kernels read and write what they must once (`kernels/bunches.py`); torch's operations, in `reference.py`, compute what
they do not take. An index is sorted first.
"""

from dataclasses import replace

import torch
from torch import Tensor

from fused_softmax.core.checks import arithmetic_in
from fused_softmax.core.route import Route, needs_grad, route_of
from fused_softmax.ops import autocast
from fused_softmax.ops.segments import reference
from fused_softmax.ops.segments.gradients import differentiated
from fused_softmax.ops.segments.launches import Cut, forward, refused
from fused_softmax.ops.segments.options import Segments, segments_of


def segment_softmax(
    input: Tensor,
    offsets: Tensor | None = None,
    *,
    index: Tensor | None = None,
    n_segments: int | None = None,
    dim: int = 0,
    scale: float | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """softmax of `input * scale` within each segment of `dim`: torch.softmax of each segment on its own.

    input: [..., n, ...] with n elements in `dim`; float32, float16, bfloat16 or float64, and with `dtype` integers too.
        Each place of the other dims, such as a head, has a softmax of its own. Differentiable, any number of times.
    offsets: [n_segments + 1], int64 or int32, from 0 to n: segment i has the elements from offsets[i] up to, and
        without, offsets[i + 1]. The crow_indices of a CSR matrix, PyG's ptr, cu_seqlens.
    index: [n], int64 or int32, at least 0: each element's segment, in any order. Give it or offsets.
    n_segments: how many segments there are. Without it they are as many as offsets say, or as an index needs.
    dim: the dim that segments cut.
    scale: a number that multiplies the input, finite and not 0.
    dtype: the dtype of the result; the input is rounded to it first. Under torch.autocast on a GPU it is float32.

    Returns the input's shape, contiguous. NaN, inf and rows of -inf do in a segment what they do in a row of torch's;
    other segments are as if they were not there.

    Every run has the same bits: nothing is added by atomics, and an index is sorted on the device, stably. Nothing
    waits for the device, which is why wrong offsets are no error there: a segment whose begin or end is less than an
    offset before it, more than n, or not 0 or n where all begins or ends, is NaN, and so are the elements up to the
    next segment. So is an element with an index below 0 or from n_segments on. On a CPU, and with FUSED_SOFTMAX_CHECK=1
    in the environment, such offsets raise ValueError, and such an index IndexError.

    Raises TypeError for an argument of another type or dtype; ValueError for both or neither of offsets and index, for
    shapes that do not fit, and for a scale of 0; IndexError for a dim out of range; NotImplementedError for integers
    without dtype and for a DTensor; RuntimeError for tensors on different devices, and for nested ones, whose segments
    softmax takes.

    The formula is that of Veličković et al., "Graph attention networks" (arXiv 1710.10903), eq. 3.

    >>> x = torch.tensor([0.0, 0.0, 1.0, 5.0])
    >>> segment_softmax(x, torch.tensor([0, 3, 3, 4]))
    tensor([0.2119, 0.2119, 0.5761, 1.0000])
    >>> segment_softmax(x, index=torch.tensor([1, 0, 1, 0]))
    tensor([0.2689, 0.0067, 0.7311, 0.9933])
    """
    return _of_segments("segment_softmax", input, offsets, index, Segments(n_segments, dim, scale, dtype))


def segment_log_softmax(
    input: Tensor,
    offsets: Tensor | None = None,
    *,
    index: Tensor | None = None,
    n_segments: int | None = None,
    dim: int = 0,
    scale: float | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """The logarithm of segment_softmax: z - m - log s. Arguments and errors are segment_softmax's.

    Here z are the segment's elements times scale, m is their maximum, and s is sum exp(z - m).

    >>> segment_log_softmax(torch.tensor([0.0, 0.0, 1.0, 5.0]), torch.tensor([0, 3, 3, 4]))
    tensor([-1.5514, -1.5514, -0.5514,  0.0000])
    """
    return _of_segments("segment_log_softmax", input, offsets, index, Segments(n_segments, dim, scale, dtype))


def segment_logsumexp(
    input: Tensor,
    offsets: Tensor | None = None,
    *,
    index: Tensor | None = None,
    n_segments: int | None = None,
    dim: int = 0,
    scale: float | None = None,
    dtype: torch.dtype | None = None,
) -> Tensor:
    """log sum exp(input * scale) over each segment of `dim`. Arguments and errors are segment_softmax's.

    n_segments: needed with index, for it is a size of the result.

    Returns the input's shape with n_segments in the place of n. An empty segment is -inf, as torch.logsumexp of
    nothing is. On a GPU an element whose index is out of range is in no segment, and its gradient is NaN.

    >>> segment_logsumexp(torch.tensor([0.0, 0.0, 1.0, 5.0]), torch.tensor([0, 3, 3, 4]))
    tensor([1.5514,   -inf, 5.0000])
    """
    return _of_segments("segment_logsumexp", input, offsets, index, Segments(n_segments, dim, scale, dtype))


def _of_segments(name: str, input: Tensor, offsets: Tensor | None, index: Tensor | None, given: Segments) -> Tensor:
    options = segments_of(name, input, offsets, index, given)
    dtype, whose = options.dtype, offsets if offsets is not None else index
    assert dtype is not None
    assert whose is not None
    route = route_of(name, input, whose, refused=refused(input, dtype), batches=False)
    with autocast.off(input):
        if name == "segment_logsumexp" and route is not Route.COMPOSED and dtype.itemsize < 4:
            # lse in 16 bits may be off by more than 1, which its gradient has as a power.
            exact = _computed(route, name, input.to(dtype), offsets, index, replace(options, dtype=torch.float32))
            return exact.to(dtype)
        return _computed(route, name, input, offsets, index, options)


def _computed(
    route: Route, name: str, input: Tensor, offsets: Tensor | None, index: Tensor | None, options: Segments
) -> Tensor:
    dtype, how = options.dtype, (options.dim, options.scale)
    assert dtype is not None
    if route is Route.COMPOSED:
        compute = getattr(reference, name)
        return compute(input, offsets, index=index, **options.formula(), arithmetic=arithmetic_in(dtype))
    cut = _cut_of(offsets, index, options.n_segments)
    if route is Route.OPERATOR:
        return getattr(torch.ops.fused_softmax, name).default(input, *cut, *how, dtype)
    function = differentiated if needs_grad(input) else forward
    return function(name, input, cut, *how, dtype)


def _cut_of(offsets: Tensor | None, index: Tensor | None, n_segments: int | None) -> Cut:
    if offsets is not None:
        return Cut(offsets.contiguous(), None)
    assert index is not None
    return Cut(*reference.order_of(index, n_segments))
