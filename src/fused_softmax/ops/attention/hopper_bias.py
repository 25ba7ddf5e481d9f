"""The gradients of a call whose bias has one, on sm_90: the kernel of dK and dV keeps dS, of which the others are made.

dQ is the product of dS and the keys, and the bias's gradient the sum of dS over what the bias is broadcast over. Where
keys are few and batches share the bias, one kernel computes both; elsewhere torch does. dS is that of some heads at a
time, in the inputs' dtype, so that it takes bounded memory.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from fused_softmax.ops.attention import hopper as attention_hopper
from fused_softmax.ops.attention.bias import blocks
from fused_softmax.ops.attention.kernels.hopper.ds import _product_and_sum
from fused_softmax.ops.attention.plan.hopper import VECTOR
from fused_softmax.ops.attention.plan.tiles import plan_ds

_DS_BYTES = 2**30  # of dS, at most
_PROGRAMS, _LEAST_BATCHES = 2, 4  # of a multiprocessor, and those of each part, where a kernel reads dS once


def prepare_by_sum(
    c: Any,
    read: Sequence[Tensor],
    bias: Tensor | None,
    do: Tensor,
    rows: Tensor,
    record: Tensor,
    coarse: Tensor,
    asks_query: bool,
) -> Callable[..., tuple[Tensor | None, Tensor, Tensor, Tensor]] | None:
    """What computes the gradients of query, key, value and bias on (query, key, value, bias, dO, rows, record, coarse).

    None where other kernels are to compute them, as those of a head for which dS is too large. read: query, key, value.
    """
    key_heads = c.n_heads // c.group
    width = -(-c.n_keys // VECTOR) * VECTOR  # as TMA wants it
    of_head = c.n_batches * c.group * c.n_queries * width  # elements of dS
    most = _DS_BYTES // max(of_head * c.dtype.itemsize, 1)
    if bias is None or not (most and of_head) or not attention_hopper.takes(c, "keys", read, bias, do):
        return None
    heads = -(-key_heads // -(-key_heads // most))  # at a time
    device = rows.device

    def keys_made() -> list[Tensor]:
        shape = (*c.lead, key_heads, c.n_keys)
        return [torch.empty((*shape, dim), dtype=c.dtype, device=device) for dim in (c.head_dim, c.value_dim)]

    def ds_of(room: Tensor, n: int) -> Tensor:
        """Of n heads of keys."""
        return room[: n * of_head].view(c.n_batches, n * c.group, c.n_queries, width)

    def dq_made() -> Tensor:
        return torch.empty((*c.rows, c.head_dim), dtype=c.dtype, device=device)

    (dk, dv), room = keys_made(), torch.empty(heads * of_head, dtype=c.dtype, device=device)
    launches = []
    for first in range(0, key_heads, heads):
        n = min(heads, key_heads - first)
        run = attention_hopper.prepare_keys(c, read, bias, do, rows, record, coarse, dk, dv, ds_of(room, n), first)
        of_ds = _prepare_both(c, ds_of(room, n), read[1], dq_made, first) if asks_query else None
        launches.append((slice(first, first + n), n, run, of_ds))

    def call(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor, do: Tensor, rows: Tensor, record: Tensor, coarse: Tensor
    ) -> Any:
        dk, dv = keys_made()
        dq = dq_made() if asks_query else None
        room, sums = torch.empty(heads * of_head, dtype=c.dtype, device=device), _Sums(c, len(launches) == 1, device)
        for which, n, run, of_ds in launches:
            ds, of_queries = ds_of(room, n), slice(which.start * c.group, which.stop * c.group)
            if c.how.bounded:
                ds.zero_()  # what is hidden is not visited
            run(q, k, v, bias, do, rows, record, coarse, dk, dv, ds)
            if of_ds is not None:
                sums.add(of_ds(ds, k, dq), of_queries)
                continue
            if dq is not None:
                keys = k.reshape(c.n_batches, key_heads, c.n_keys, c.head_dim)[:, which].flatten(0, 1)
                into = dq.view(c.n_batches, key_heads, -1, c.head_dim)[:, which]
                shape = len(keys), c.group * c.n_queries, c.head_dim
                whole = into.is_contiguous()
                found = into.view(shape) if whole else into.new_empty(shape)
                of_keys = ds.view(*shape[:2], width)[..., : c.n_keys]
                torch.baddbmm(found, of_keys, keys, beta=0, alpha=c.how.scale, out=found)
                if not whole:
                    into.copy_(found.view(into.shape))
            sums.add(ds[..., : c.n_keys], of_queries)
        return dq, dk, dv, sums.whole().reshape(c.own["bias"])

    return call


def _prepare_both(
    c: Any, ds: Tensor, k: Tensor, dq_made: Callable[[], Tensor], first_head: int
) -> Callable[..., Tensor] | None:
    """What computes dQ, into the last of (dS, key, dQ), and sums [parts, heads, query, key] of dS in float32.

    None where a program has no room for all keys, or the bias is not shared. ds: of the heads of keys from first_head.
    """
    heads, width = ds.shape[1], ds.shape[3]
    tiles = plan_ds(c.head_dim, c.n_keys)
    if tiles is None or c.patterns["bias"].own[1] > 1 or c.n_batches < _LEAST_BATCHES:
        return None
    programs = heads * blocks(c.n_queries, tiles.block_m)
    parts = max(1, min(_PROGRAMS * c.gpu.sm_count // programs, c.n_batches // _LEAST_BATCHES))
    steps = blocks(c.n_batches, parts)
    shape, device = (blocks(c.n_batches, steps), heads, c.n_queries, c.n_keys), ds.device
    run = c.prepare(
        _product_and_sum, programs * shape[0], tiles,
        (ds, k, dq_made(), torch.empty(shape, dtype=torch.float32, device=device)),
        (c.strides["k"][1:4], c.n_batches, c.n_heads, first_head * c.group, heads, c.group, c.n_queries, c.n_keys,
         width // VECTOR, steps, float(c.how.scale)),
        pieces=blocks(c.n_keys, tiles.block_n),
    )  # fmt: skip

    def call(ds: Tensor, k: Tensor, dq: Tensor) -> Tensor:
        sums = torch.empty(shape, dtype=torch.float32, device=device)
        run(ds, k, dq, sums)
        return sums

    return call


class _Sums:
    """dS summed over the batches and heads that the bias does not have. at_once: whether all heads come together.

    What is added is dS, or parts of its sum over batches in float32.
    """

    def __init__(self, c: Any, at_once: bool, device: torch.device):
        own = c.patterns["bias"].own
        sizes = c.n_batches, c.n_heads
        self.dims = [d for d in (0, 1) if own[d + 1] < sizes[d]]
        self.at_once, self.dtype = at_once, c.dtype
        self.found: list[Tensor] = []
        self.of_heads: Tensor | None = None
        if not at_once and 1 not in self.dims:
            self.of_heads = torch.empty(own[1:], dtype=c.dtype, device=device)

    def add(self, ds: Tensor, heads: slice) -> None:
        if self.of_heads is not None:
            into = self.of_heads[:, heads]
            if ds.dtype != self.dtype:
                into.copy_(ds.sum(0, keepdim=True))
            elif self.dims:
                torch.sum(ds, self.dims, keepdim=True, out=into)
            else:
                into.copy_(ds)
        elif self.dims:
            self.found.append(ds.sum(self.dims, keepdim=True, dtype=None if self.at_once else torch.float32))
        else:
            self.found.append(ds)

    def whole(self) -> Tensor:
        if self.of_heads is not None:
            return self.of_heads
        return (self.found[0] if self.at_once else torch.stack(self.found).sum(0)).to(self.dtype)
