"""The gradients of a call whose bias has one, on sm_90: the kernel of dK and dV keeps dS, from which others follow.

dQ is the product of dS and the keys, and the bias's gradient is the sum of dS over what the bias is broadcast over. If
keys are few and batches share the bias, one kernel computes both; otherwise torch does. dS is made for some heads at a
time, in the inputs' dtype, so that it takes bounded memory.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from fused_softmax.ops.attention import hopper
from fused_softmax.ops.attention.call import Backward, Call, Launch, Tensors
from fused_softmax.ops.attention.layout import blocks
from fused_softmax.ops.attention.plan.hopper import VECTOR, HopperTiles
from fused_softmax.ops.attention.plan.tiles import plan_ds

_DS_BYTES = 2**30  # of dS, at most
_PROGRAMS, _LEAST_BATCHES = 2, 4  # of a multiprocessor, and those of each part, where a kernel reads dS once


@dataclass(frozen=True)
class StoredDs:
    """tiles: of the kernel of dK and dV. heads: of keys, whose dS is kept at a time.

    width: of a row of dS, as TMA wants it. of_head: elements of dS for one head of keys.
    """

    tiles: HopperTiles
    heads: int
    width: int
    of_head: int


def stored_ds_plan(asked: Backward) -> StoredDs | str:
    if asked.wanted_beside != ["bias"]:
        return "it is for a bias that has a gradient, and no mask that has one"
    c = asked.call
    width = blocks(c.n_keys, VECTOR) * VECTOR
    of_head = c.n_batches * c.group * c.n_queries * width
    most = _DS_BYTES // max(of_head * c.dtype.itemsize, 1)
    if not of_head:
        return "there are no queries or no keys"
    if not most:
        return f"dS of a head of keys takes more than {_DS_BYTES} bytes"
    tiles = hopper.keys_plan(asked)
    if isinstance(tiles, str):
        return tiles
    turns = blocks(c.key_heads, most)
    return StoredDs(tiles, blocks(c.key_heads, turns), width, of_head)


@dataclass(frozen=True)
class _Turn:
    """The heads of keys from `first` to `last`: what stores their dS, and what reads it by one launch, if anything."""

    first: int
    last: int
    keys: list[Launch]
    both: "_Both | None"


class GradientsByDs:
    """The gradients of query, key, value and bias of tensors like those of a pass: call it with them, in their order.

    tensors: of which the last are dK, dV, dQ and dS, that it makes itself.
    """

    def __init__(self, asked: Backward, plan: StoredDs, tensors: Tensors):
        self.call, self.plan, self.wants_query = asked.call, plan, asked.wanted.query
        self.device = asked.given.query.device
        c = self.call
        (dk, dv), dq, room = self._keys_made(), self._dq_made(), self._room()
        self.turns = []
        for first in range(0, c.key_heads, plan.heads):
            last = min(first + plan.heads, c.key_heads)
            ds = self._ds_of(room, last - first)
            every = {**tensors, "dk": dk, "dv": dv, "dq": dq, "ds": ds}
            keys = [prepare() for prepare in hopper.prepare_keys(c, plan.tiles, every, first)]
            self.turns.append(_Turn(first, last, keys, _prepare_both(c, every, first) if self.wants_query else None))

    def _keys_made(self) -> list[Tensor]:
        c = self.call
        shape = (*c.lead, c.key_heads, c.n_keys)
        return [torch.empty((*shape, dim), dtype=c.dtype, device=self.device) for dim in (c.head_dim, c.value_dim)]

    def _dq_made(self) -> Tensor | None:
        if not self.wants_query:
            return None
        return torch.empty((*self.call.rows, self.call.head_dim), dtype=self.call.dtype, device=self.device)

    def _room(self) -> Tensor:
        return torch.empty(self.plan.heads * self.plan.of_head, dtype=self.call.dtype, device=self.device)

    def _ds_of(self, room: Tensor, n: int) -> Tensor:
        """dS of n heads of keys."""
        c, plan = self.call, self.plan
        return room[: n * plan.of_head].view(c.n_batches, n * c.group, c.n_queries, plan.width)

    def __call__(self, tensors: tuple, k: Tensor) -> tuple[Tensor | None, Tensor, Tensor, Tensor]:
        c = self.call
        dk, dv = self._keys_made()
        dq, room = self._dq_made(), self._room()
        sums = _Sums(c, len(self.turns) == 1, self.device)
        for turn in self.turns:
            ds, of_queries = self._ds_of(room, turn.last - turn.first), slice(turn.first * c.group, turn.last * c.group)
            if c.how.bounded:
                ds.zero_()  # the kernel does not visit what is hidden
            every = (*tensors[:-4], dk, dv, dq, ds)
            for launch in turn.keys:
                launch.run(*launch.takes(every))
            if turn.both is not None:
                sums.add(turn.both(every), of_queries)
                continue
            if dq is not None:
                self._multiply(ds, k, dq, slice(turn.first, turn.last))
            sums.add(ds[..., : c.n_keys], of_queries)
        return dq, dk, dv, sums.whole().reshape(c.own["bias"])

    def _multiply(self, ds: Tensor, k: Tensor, dq: Tensor, which: slice) -> None:
        """dQ of these heads of keys, by torch."""
        c = self.call
        keys = k.reshape(c.n_batches, c.key_heads, c.n_keys, c.head_dim)[:, which].flatten(0, 1)
        into = dq.view(c.n_batches, c.key_heads, -1, c.head_dim)[:, which]
        shape = len(keys), c.group * c.n_queries, c.head_dim
        whole = into.is_contiguous()
        found = into.view(shape) if whole else into.new_empty(shape)
        of_keys = ds.view(*shape[:2], self.plan.width)[..., : c.n_keys]
        torch.baddbmm(found, of_keys, keys, beta=0, alpha=c.how.scale, out=found)
        if not whole:
            into.copy_(found.view(into.shape))


@dataclass(frozen=True)
class _Both:
    """One launch that reads dS once: it writes dQ, and gives sums [parts, heads, query, key] of dS in float32."""

    launch: Launch
    shape: tuple[int, ...]
    device: torch.device

    def __call__(self, tensors: tuple) -> Tensor:
        sums = torch.empty(self.shape, dtype=torch.float32, device=self.device)
        self.launch.run(*self.launch.takes(tensors), sums)
        return sums


def _prepare_both(c: Call, tensors: Tensors, first_head: int) -> _Both | None:
    """None if a program has no room for all keys, or if the bias is not shared.

    tensors: those of a pass; dS is that of the heads of keys from first_head on.
    """
    from fused_softmax.ops.attention.kernels.hopper.ds import _product_and_sum

    ds: Any = tensors["ds"]
    heads, width = ds.shape[1], ds.shape[3]
    tiles = plan_ds(c.head_dim, c.n_keys)
    if tiles is None or c.patterns["bias"].own[1] > 1 or c.n_batches < _LEAST_BATCHES:
        return None
    programs = heads * blocks(c.n_queries, tiles.block_m)
    parts = max(1, min(_PROGRAMS * c.gpu.sm_count // programs, c.n_batches // _LEAST_BATCHES))
    steps = blocks(c.n_batches, parts)
    shape = (blocks(c.n_batches, steps), heads, c.n_queries, c.n_keys)
    numbers = {
        "k_strides": c.strides_of("k")[1:4], "all_heads": c.n_heads, "first_head": first_head * c.group,
        "n_heads": heads, "octets": width // VECTOR, "steps": steps,
    }  # fmt: skip
    own = {"sums": torch.empty(shape, dtype=torch.float32, device=ds.device)}
    launch = c.prepare(
        _product_and_sum, programs * shape[0], tiles, tensors, numbers, own=own, pieces=blocks(c.n_keys, tiles.block_n)
    )
    return _Both(launch, shape, ds.device)


class _Sums:
    """dS summed over the batches and heads that the bias does not have. at_once: whether all heads come together.

    What is added is dS, or parts of its sum over batches in float32.
    """

    def __init__(self, c: Call, at_once: bool, device: torch.device):
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
