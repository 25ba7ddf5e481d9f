"""Passes of attention, prepared once for tensors like those at hand: which way, its launches and allocations."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax.core import workspace
from fused_softmax.core.launch import together
from fused_softmax.core.plan import Device
from fused_softmax.ops.attention import hopper, sdpa, special, ways
from fused_softmax.ops.attention.bias import BiasGradient, prepare_bias
from fused_softmax.ops.attention.call import (
    NAMES,
    Backward,
    Call,
    Forward,
    Gradients,
    Inputs,
    Launch,
    Made,
    Preparing,
    Results,
    Tensors,
    Wanted,
    widened,
)
from fused_softmax.ops.attention.hopper_bias import GradientsByDs, StoredDs, stored_ds_plan
from fused_softmax.ops.attention.kernels.spec import GRANULE
from fused_softmax.ops.attention.layout import blocks, maker
from fused_softmax.ops.attention.options import Attention
from fused_softmax.ops.attention.plan.hopper import HopperTiles
from fused_softmax.ops.attention.plan.tiles import AttentionPlan, Tiles
from fused_softmax.ops.attention.ways import Choice, Way

_COARSE = 3  # the use of slots


def prepare_forward(given: Inputs, how: Attention, with_lse: bool = True) -> Callable[..., Results]:
    """What computes a call on tensors like these: call it with them."""
    asked = Forward(given=given, how=how, with_lse=with_lse)
    if 0 in given.query.shape[:-1]:
        return _ByLaunch(asked.call, asked.made, None, (), None, asked.widens)
    return ways.chosen("the forward pass", FORWARD, asked).prepare(asked)


def prepare_backward(
    given: Inputs, how: Attention, do: Tensor, dlse: Tensor | None, output: Tensor, lse: Tensor, wanted: Wanted
) -> Callable[..., Gradients]:
    """What computes the gradients that are wanted: call it with do, dlse, output, lse, and the inputs."""
    asked = Backward(given=given, how=how, do=do, dlse=dlse, output=output, lse=lse, wanted=wanted)
    return ways.chosen("the gradients", GRADIENTS, asked).prepare(asked)


@dataclass(frozen=True)
class _ByLaunch:
    """A forward pass by one launch, if there are queries, and column sums by two more."""

    call: Call
    made: Made
    launch: Launch | None
    sums: tuple[Launch, ...]
    of_record: Callable[[], Tensor] | None
    widens: bool

    def __call__(self, *given: Any) -> Results:
        dim = given[2].shape[-1]
        if self.widens:
            given = (*map(widened, given[:3]), *given[3:])
        found = self.made()
        if self.launch is not None:
            tensors = (*self.call.readied(given), *found)
            self.launch.run(*self.launch.takes(tensors))
            if self.of_record is not None:
                tensors = (*tensors, self.of_record())
                for launch in self.sums:
                    launch.run(*launch.takes(tensors))
        return found._replace(output=found.output[..., :dim].contiguous()) if self.widens else found


def _by_launch(prepare: Callable[[Forward, Any], Launch], asked: Forward, plan: Any) -> _ByLaunch:
    from fused_softmax.ops.attention.kernels.stats import _column_sums

    c, launch = asked.call, prepare(asked, plan)
    if asked.tensors["sums"] is None or not c.n_keys:
        return _ByLaunch(c, asked.made, launch, (), None, asked.widens)
    of_record = _of_record(c, asked.given.query.device)
    tensors, tiles = asked.tensors | {"record": of_record()}, c.plan.sums
    programs = blocks(c.n_keys, tiles.block_n) * c.all_heads
    sums = _prepare_delta(c, tensors | {"o": None}), c.prepare(_column_sums, programs, tiles, tensors)
    return _ByLaunch(c, asked.made, launch, sums, of_record, asked.widens)


def _prepare_plain(asked: Forward, tiles: Tiles) -> Launch:
    from fused_softmax.ops.attention.kernels.forward import _attention

    c = asked.call
    programs, how = blocks(c.n_queries, tiles.block_m) * c.all_heads, c.how
    return c.prepare(_attention, programs, tiles, asked.tensors, capped=True, entropy=how.entropy, row_max=how.row_max)


def _of_record(c: Call, device: torch.device) -> Callable[[], Tensor]:
    """Makes an empty record for `_delta`: three numbers of each query."""
    return maker((c.all_heads, 3 * c.n_queries), torch.float32, device)


def _prepare_delta(c: Call, tensors: Tensors) -> Launch:
    """`_delta` with those of its tensors that exist."""
    from fused_softmax.ops.attention.kernels.gradient import _delta

    tiles, programs = Tiles(GRANULE, 32, 4, 1), blocks(c.n_queries, GRANULE) * c.all_heads
    return c.prepare(_delta, programs, tiles, tensors, {"n_padded": hopper.rows_shape(c)[-1]})


class _Own(NamedTuple):
    """What a backward pass makes, or what makes it, by the names of parameters; None for what is not needed."""

    record: Any
    coarse: Any
    rows: Any
    dk: Any
    dv: Any
    dq: Any
    ds: Any


@dataclass(frozen=True)
class _ByLaunches:
    """Gradients by launches on tensors that they share.

    makers: of what is not given. launches: of `_delta`, then of dK and dV, and of dQ. by_ds: what computes these and
    the bias's gradient in their place. beside: of a mask and bias whose gradients have launches of their own. full:
    names of those whose gradient is dS as it is. clears: whether no launch of dQ sets `coarse` back to 0.
    """

    call: Call
    wanted: Wanted
    makers: _Own
    launches: list[Launch]
    by_ds: GradientsByDs | None
    beside: dict[str, BiasGradient]
    full: list[str]
    clears: bool

    def __call__(self, do: Tensor, dlse: Tensor | None, output: Tensor, lse: Tensor, *given: Any) -> Gradients:
        c, wanted, full = self.call, self.wanted, self.full
        inputs = Inputs(*c.readied(given))
        own = _Own(*[None if make is None else make() for make in self.makers])
        tensors = (*inputs, c.of("do", do), output, lse, dlse, *own)
        for launch in self.launches:
            launch.run(*launch.takes(tensors))
        dq, dk, dv, added = own.dq, own.dk, own.dv, {}
        if self.by_ds is not None:
            dq, dk, dv, dbias = self.by_ds(tensors, inputs.key)
            added["bias"] = dbias.sum_to_size(given[NAMES.index("bias")].shape)
        if self.clears:  # the launches of dK and dV have read it
            own.coarse.zero_()
        for name in (*full, *self.beside):
            like = given[NAMES.index(name)]
            if name in full:
                found = own.ds.to(like.dtype)
                # Of two gradients neither is a view of the other.
                each = found.clone() if found is own.ds and len(full) > 1 else found
            else:
                each = self.beside[name](tensors)
            added[name] = each.sum_to_size(like.shape)
        dsinks = None
        if wanted.sinks and inputs.sinks is not None:
            dsinks = sinks_gradient(inputs.sinks, lse, own.record[:, : c.n_queries].view(c.rows))
        return Gradients(
            dq if wanted.query else None, dk if wanted.key else None, dv if wanted.value else None, added.get("mask"),
            added.get("bias"), dsinks,
        )  # fmt: skip


def _prepare_launches(asked: Backward, plan: StoredDs | AttentionPlan) -> _ByLaunches:
    c, wanted, device = asked.call, asked.wanted, asked.given.query.device
    of_ds = isinstance(plan, StoredDs)
    beside, full = ([], []) if of_ds else (asked.wanted_beside, asked.full_beside)
    for_keys = not of_ds and (wanted.key or wanted.value)
    for_queries = not of_ds and (wanted.query or bool(full))
    n_rows = c.all_heads * c.n_queries
    keys = ways.chosen("dK and dV", KEYS, asked) if for_keys and n_rows and c.n_keys else None
    queries = ways.chosen("dQ", QUERIES, asked) if for_queries and n_rows else None
    by_hopper = of_ds or any(each is not None and isinstance(each.plan, HopperTiles) for each in (keys, queries))
    makers = _Own(
        record=_of_record(c, device),
        coarse=_of_coarse(c.device),
        rows=maker(hopper.rows_shape(c), torch.float32, device) if by_hopper else None,
        dk=_of_keys(c, c.head_dim, device) if for_keys else None,
        dv=_of_keys(c, c.value_dim, device) if for_keys else None,
        dq=maker((*c.rows, c.head_dim), c.dtype, device) if for_queries else None,
        ds=_of_ds(asked, device) if full else None,
    )
    own = {name: None if make is None else make() for name, make in makers._asdict().items()}
    tensors = asked.tensors | own
    preparing = [partial(_prepare_delta, c, tensors)] if n_rows else []
    for each in (keys, queries):
        preparing += [] if each is None else each.prepare(c, tensors)
    launches = together(*preparing)
    by_ds = GradientsByDs(asked, plan, tensors) if isinstance(plan, StoredDs) else None
    of_beside = {
        name: prepare_bias(c, name, tensors, asked.beside[name].dtype, device) for name in beside if name not in full
    }
    return _ByLaunches(c, wanted, makers, launches, by_ds, of_beside, full, bool(n_rows) and not for_queries)


def _of_coarse(device: int) -> Callable[[], Tensor]:
    """Makes the number that tells the kernel of dK and dV of lse that is too coarse: 0 before and after a call."""
    if device >= 0:
        return partial(workspace.slots, device, 1, 1, _COARSE)
    coarse = torch.zeros(1, dtype=torch.int64, device="cpu")
    return lambda: coarse


def _of_keys(c: Call, dim: int, device: torch.device) -> Callable[[], Tensor]:
    shape = (*c.lead, c.key_heads, c.n_keys, dim)
    if c.all_heads * c.n_queries:
        return maker(shape, c.dtype, device)
    return partial(torch.zeros, shape, dtype=c.dtype, device=device)  # without queries nothing is written


def _of_ds(asked: Backward, device: torch.device) -> Callable[[], Tensor]:
    make = torch.zeros if asked.how.bounded else torch.empty  # kernels do not visit what is hidden
    dtypes = [asked.beside[name].dtype for name in asked.full_beside]
    return partial(make, asked.call.shape, dtype=reduce(torch.promote_types, dtypes), device=device)


def _plain_keys(c: Call, tiles: Tiles, tensors: Tensors) -> list[Preparing]:
    """Two launches, of which one returns at once: `coarse` says which."""
    from fused_softmax.ops.attention.kernels.gradient import _keys_gradient

    programs = blocks(c.n_keys, tiles.block_n) * c.n_batches * c.key_heads
    of_keys = partial(c.prepare, _keys_gradient, programs, tiles, tensors)
    return [partial(of_keys, recorded=recorded) for recorded in (False, True)]


def _plain_queries(c: Call, tiles: Tiles, tensors: Tensors) -> list[Preparing]:
    from fused_softmax.ops.attention.kernels.gradient import _queries_gradient

    programs, stores_ds = blocks(c.n_queries, tiles.block_m) * c.all_heads, tensors["ds"] is not None
    return [partial(c.prepare, _queries_gradient, programs, tiles, tensors, capped=True, stores_ds=stores_ds)]


def _by_kernels(prepare: Callable[[Backward, Any], Callable[..., Gradients]], asked: Backward, plan: Any):
    """Gradients of heads as they are given, by kernels that take widened heads and contiguous outputs."""
    made, widens = prepare(asked, plan), asked.widens
    if not widens and asked.output.is_contiguous():
        return made

    def call(do: Tensor, dlse: Tensor | None, output: Tensor, lse: Tensor, *given: Any) -> Gradients:
        output = output.contiguous()
        if not widens:
            return made(do, dlse, output, lse, *given)
        found = made(widened(do), dlse, widened(output), lse, *map(widened, given[:3]), *given[3:])
        dq, dk, dv = (
            each if each is None else each[..., : like.shape[-1]].contiguous()
            for each, like in zip(found[:3], given[:3], strict=True)
        )
        return found._replace(query=dq, key=dk, value=dv)

    return call


def sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """-sum exp(sink - lse) delta over batches and queries."""
    z = sinks.to(lse.dtype)[:, None]
    p = (z - lse).exp().masked_fill(z == -math.inf, 0.0)
    terms = -p * delta
    return terms.sum([d for d in range(terms.ndim) if d != terms.ndim - 2]).to(sinks.dtype)


def planned(shape: Sequence[int], dtype: torch.dtype, gpu: Device) -> list[Choice]:
    """Which way takes each pass of plain attention, and each part of one, on a GPU that need not be present.

    shape: [batch, heads, length, dim] of query, key and value.
    """
    q = torch.empty(tuple(shape), dtype=dtype, device="meta")
    lse = torch.empty(q.shape[:-1], dtype=torch.float32, device="meta")
    given, how = Inputs(q, q, q), Attention(scale=1.0)
    wanted = Wanted(True, True, True, False, False, False)
    forward = Forward(given=given, how=how, gpu=gpu)
    backward = Backward(given=given, how=how, gpu=gpu, do=q, dlse=None, output=q, lse=lse, wanted=wanted)
    found = [ways.chosen("the forward pass", FORWARD, forward), ways.chosen("the gradients", GRADIENTS, backward)]
    if found[-1].way is not SEPARATE:
        return found
    return [*found, ways.chosen("dK and dV", KEYS, backward), ways.chosen("dQ", QUERIES, backward)]


SEPARATE = Way("separate kernels", lambda asked: asked.call.plan, partial(_by_kernels, _prepare_launches))
FORWARD = (
    Way("cuDNN", sdpa.forward_plan, sdpa.prepare_forward),
    Way("decode", special.decode_plan, partial(_by_launch, special.prepare_decode)),
    Way("short", special.short_plan, partial(_by_launch, special.prepare_short)),
    Way("window", special.window_plan, partial(_by_launch, special.prepare_window)),
    Way("hopper", hopper.forward_plan, partial(_by_launch, hopper.prepare_forward)),
    Way("plain", lambda asked: asked.call.plan.forward, partial(_by_launch, _prepare_plain)),
)
GRADIENTS = (
    Way("cuDNN", sdpa.backward_plan, sdpa.prepare_backward),
    Way("short", special.short_gradient_plan, partial(_by_kernels, special.prepare_short_gradient)),
    Way("stored dS", stored_ds_plan, partial(_by_kernels, _prepare_launches)),
    SEPARATE,
)
KEYS = (
    Way("hopper", hopper.keys_plan, hopper.prepare_keys),
    Way("plain", lambda asked: asked.call.plan.keys, _plain_keys),
)
QUERIES = (
    Way("hopper", hopper.queries_plan, hopper.prepare_queries),
    Way("plain", lambda asked: asked.call.plan.queries, _plain_queries),
)
