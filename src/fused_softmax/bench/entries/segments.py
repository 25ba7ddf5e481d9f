"""Softmax of segments and its gradient as they are measured, beside what others have.

Elements are [n, columns], and offsets say where segments begin; an unsorted index says of each element where it is.
A segment of ten million has results of a millionth, and one beside it has 1: so an error counts as a part of the
largest number of its own segment. Comparisons are cut between segments.
"""

import math
from collections.abc import Iterator
from functools import lru_cache

import torch
from torch import Tensor

from fused_softmax import segment_softmax
from fused_softmax.bench.cases import Case
from fused_softmax.bench.entries import ceiling
from fused_softmax.bench.entries.makers import Call, compiled
from fused_softmax.bench.entries.operation import Inputs, Operation, widest
from fused_softmax.bench.entries.segment_kinds import KINDS
from fused_softmax.ops.segments import operators, reference

SEED = 0  # of lengths: the same segments on every device
# Of our results, of their segment's largest: a sum of 100 million in float32 is made of the sums of its parts.
OWN_ERROR = 1e-5
CHUNK = 2**22  # positions that are compared at once, or one segment
MOST_PADDED = 2**33, 2**30  # bytes of a padded tensor, on a GPU and on a CPU: what else is timed has to fit beside it


@lru_cache(maxsize=2)
def offsets_of(case: Case) -> Tensor:
    """Where the segments of a case begin and end, int64 [n_segments + 1], on the CPU."""
    kind, n = KINDS[case.operation], case.n_rows
    count = kind.count(case)
    generator = torch.Generator("cpu").manual_seed(SEED)
    lengths = torch.full((count,), kind.mean, dtype=torch.float64, device="cpu")
    if kind.even:
        lengths += (2 * torch.rand(count, dtype=torch.float64, device="cpu", generator=generator) - 1) * kind.even
    if kind.deviation:
        variance = math.log1p((kind.deviation / kind.mean) ** 2)
        normal = torch.randn(count, dtype=torch.float64, device="cpu", generator=generator)
        lengths = (normal * variance**0.5 + math.log(kind.mean) - variance / 2).exp().clamp(max=kind.greatest)
    hub = min(kind.greatest, n / 2) if kind.greatest else kind.share * n
    if count == 1:
        lengths[0] = n
    elif hub:
        lengths[count // 2] = 0
        lengths *= (n - hub) / lengths.sum()
        lengths[count // 2] = hub
    upto = lengths.cumsum(0)
    return torch.cat([torch.zeros(1, dtype=torch.int64, device="cpu"), (upto * (n / upto[-1])).round().long()])


def longest(case: Case) -> int:
    return int(offsets_of(case).diff().max())


def inputs(case: Case, generator: torch.Generator) -> Inputs:
    """(x, offsets), or (dy, y, offsets); unsorted (x, index), or (dy, y, index, offsets, order) as the gradient has."""
    kind, device, dtype = KINDS[case.operation], generator.device, getattr(torch, case.dtype)
    where = offsets_of(case).to(device)
    if kind.unsorted:
        where = ids_of(where, case.n_rows)[torch.randperm(case.n_rows, device=device, generator=generator)]
    x = torch.randn(case.shape, device=device, dtype=dtype, generator=generator).mul_(2)
    if not kind.gradient:
        return x, where
    dy = torch.randn(case.shape, device=device, dtype=dtype, generator=generator)
    given = dy, softmax_of(x, where, n_indexed(case)), where
    return (*given, *reference.order_of(where, n_indexed(case))) if kind.unsorted else given


def n_indexed(case: Case) -> int | None:
    """How many segments an index has; None of a case with offsets."""
    kind = KINDS[case.operation]
    return kind.count(case) if kind.unsorted else None


def where_bytes(case: Case) -> int:
    """Of the offsets, or of an index or an order."""
    return 8 * (case.n_rows if KINDS[case.operation].unsorted else KINDS[case.operation].count(case) + 1)


def unread_bytes(case: Case) -> int:
    """A gradient goes by the offsets and the order, and what has these reads no index."""
    kind = KINDS[case.operation]
    return where_bytes(case) if kind.unsorted and kind.gradient else 0


def held_bytes(case: Case) -> int:
    kind = KINDS[case.operation]
    of_order = where_bytes(case) + 8 * (kind.count(case) + 2) if kind.unsorted and kind.gradient else 0
    return (3 if kind.gradient else 2) * case.tensor_bytes + where_bytes(case) + of_order


def checking_bytes(case: Case) -> int:
    """Of the formula's numbers of all elements and positions, and of float64 ones of what is compared at once."""
    at_once = min(case.n_rows, max(CHUNK, longest(case))) * case.n_cols
    return 4 * 4 * case.elements + 3 * 8 * case.n_rows + 10 * 8 * at_once


# Of torch's operations. where: offsets [n_segments + 1]; or an index [n], and then n_segments says of how many.


def ids_of(offsets: Tensor, n: int) -> Tensor:
    """The segment of each of n elements."""
    ids = torch.arange(len(offsets) - 1, device=offsets.device)
    return ids.repeat_interleave(offsets.diff(), output_size=n)


def reduced(x: Tensor, where: Tensor, n_segments: int | None, how: str) -> Tensor:
    """The "max" or "sum" of each segment of x [n, columns]."""
    if n_segments is None:
        given = x.contiguous().view(-1) if x.shape[1] == 1 else x.contiguous()  # flat ones are added up side by side
        return torch.segment_reduce(given, how, offsets=where, axis=0, unsafe=True).view(-1, x.shape[1])
    start = x.new_full((n_segments, x.shape[1]), -math.inf if how == "max" else 0.0)
    return start.scatter_reduce(0, where[:, None].expand_as(x), x, "amax" if how == "max" else how)


def spread(numbers: Tensor, where: Tensor, n_segments: int | None, n: int) -> Tensor:
    """Each element's number of its segment."""
    return numbers.index_select(0, ids_of(where, n) if n_segments is None else where)


def softmax_of(x: Tensor, where: Tensor, n_segments: int | None) -> Tensor:
    z, how = x.to(widest(x)), (where, n_segments)
    e = (z - spread(reduced(z, *how, "max"), *how, len(x))).exp()
    return (e / spread(reduced(e, *how, "sum"), *how, len(x))).to(x.dtype)


def gradient_of(dy: Tensor, y: Tensor, where: Tensor, n_segments: int | None) -> Tensor:
    a, b, how = y.to(widest(y)), dy.to(widest(y)), (where, n_segments)
    return (a * (b - spread(reduced(a * b, *how, "sum"), *how, len(y)))).to(y.dtype)


def formula(case: Case) -> Call:
    n_segments = n_indexed(case)
    if KINDS[case.operation].gradient:
        return lambda dy, y, where, *_: gradient_of(dy, y, where, n_segments)
    return lambda x, where: softmax_of(x, where, n_segments)


# What is compared.


def parts(case: Case, given: Inputs) -> Iterator[tuple[slice | Tensor, Inputs]]:
    """Some whole segments at a time: which elements these are, and the inputs of them alone."""
    n_tensors = 2 if KINDS[case.operation].gradient else 1
    where = given[n_tensors]
    if n_indexed(case) is None:
        order, offsets = None, where
    else:
        ids, order = where.sort()
        offsets = torch.searchsorted(ids, torch.arange(int(ids[-1]) + 2, device=ids.device))
    begins = offsets.cpu()
    first = 0
    while first < len(begins) - 1:
        last = int(torch.searchsorted(begins, int(begins[first]) + CHUNK, right=True)) - 1
        last = max(first + 1, min(last, len(begins) - 1))
        start, end = int(begins[first]), int(begins[last])
        at = slice(start, end) if order is None else order[start:end]
        own = offsets[first : last + 1] - start if order is None else where[at]
        if end > start:
            yield at, (*(each[at] for each in given[:n_tensors]), own)
        first = last


def compared(case: Case, given: Inputs, y: Tensor) -> Iterator[tuple[Tensor, Tensor]]:
    """Parts of a result and what they have to be in float64, both over the largest number of each segment.

    Of a gradient y (dy - d) this is the largest |y| times the largest |dy|, for the difference may cancel.
    """
    n_segments = n_indexed(case)
    for at, (*tensors, where) in parts(case, given):
        tensors = [each.double() for each in tensors]
        want = formula(case)(*tensors, where)
        largest = torch.ones((), dtype=torch.float64, device=y.device)
        for each in tensors if KINDS[case.operation].gradient else [want]:
            largest = largest * spread(reduced(each.abs(), where, n_segments, "max"), where, n_segments, len(want))
        largest = largest.clamp(min=torch.finfo(torch.float64).tiny)
        yield y[at].double() / largest, want / largest


# The providers.


def own(case: Case) -> Call:
    kind, n_segments = KINDS[case.operation], n_indexed(case)
    if not kind.gradient:
        if kind.unsorted:
            return lambda x, index: segment_softmax(x, index=index, n_segments=n_segments)
        return lambda x, offsets: segment_softmax(x, offsets)
    if kind.unsorted:
        return lambda dy, y, index, offsets, order: operators.backward("segment_softmax", dy, y, offsets, order)
    return lambda dy, y, offsets: operators.backward("segment_softmax", dy, y, offsets)


def by_pyg(case: Case) -> Call:
    from torch_geometric.utils import softmax

    if (n_segments := n_indexed(case)) is not None:
        return lambda x, index: softmax(x, index, num_nodes=n_segments)
    return lambda x, offsets: softmax(x, ptr=offsets)


def by_torch_scatter(case: Case) -> Call:
    from torch_scatter import gather_csr, scatter_softmax, segment_csr

    def call(x, offsets):
        e = (x - gather_csr(segment_csr(x, offsets, reduce="max"), offsets)).exp()
        return e / gather_csr(segment_csr(e, offsets, reduce="sum"), offsets)

    if (n_segments := n_indexed(case)) is not None:
        return lambda x, index: scatter_softmax(x, index, 0, n_segments)
    return call


def by_padding(case: Case) -> Call:
    """softmax of [n_segments, longest, columns], which a segment's elements begin and -inf fills up."""
    count, n, size, width = KINDS[case.operation].count(case), case.n_rows, longest(case), case.n_cols
    padded_bytes = count * size * width * case.itemsize

    def padded(x: Tensor, at: Tensor, value: float) -> Tensor:
        return x.new_full((count * size, width), value).index_copy(0, at, x).view(count, size, width)

    def places(offsets: Tensor) -> Tensor:
        ahead = torch.arange(count, device=offsets.device) * size - offsets[:-1]
        return torch.arange(n, device=offsets.device) + spread(ahead, offsets, None, n)

    def forward(x, offsets):
        at = places(offsets)
        return torch.softmax(padded(x, at, -math.inf), 1).view(-1, width)[at]

    def backward(dy, y, offsets):
        at = places(offsets)
        dx = torch._softmax_backward_data(padded(dy, at, 0.0), padded(y, at, 0.0), 1, y.dtype)
        return dx.view(-1, width)[at]

    def refused(x, *_):
        if padded_bytes > MOST_PADDED[not x.is_cuda]:
            raise RuntimeError(f"{count} segments padded to {size} take {padded_bytes / 2**30:.0f} GiB")
        return (backward if KINDS[case.operation].gradient else forward)(x, *_)

    return refused


def by_padding_compiled(case: Case) -> Call:
    return compiled(by_padding)(case)


def _entry(name: str) -> Operation:
    kind = KINDS[name]
    samples = {"texts": (4001, 1), "hub": (120, 64), "one": (300, 64), "reddit": (2500, 1)}
    return Operation(
        inputs=inputs,
        own=own,
        formula=formula,
        held_bytes=held_bytes,
        unread_bytes=unread_bytes,
        ceilings=lambda case: ceiling.adds() if kind.gradient else ceiling.copies(),
        parameters=lambda case: {"segments": kind.count(case), "longest": longest(case)},
        compared=compared,
        checking_bytes=checking_bytes,
        own_error=OWN_ERROR,
        sample=Case(samples.get(name.split("_")[2], (331, 3))),
    )


ENTRIES = {name: _entry(name) for name in KINDS}
