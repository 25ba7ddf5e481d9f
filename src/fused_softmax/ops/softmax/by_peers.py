"""softmax and log_softmax of one rank's columns in one launch, which exchanges with those of the other ranks.

Traffic of a shard of N columns: it is read once and written once (2MN). The gradient exchanges a sum a row in a launch
of its own (5MN).
"""

import math
from typing import Any

import torch
from torch import Tensor

from fused_softmax.core.calls import contiguous_strides, find, keep
from fused_softmax.core.kernels.spec import ScoreSpec
from fused_softmax.core.launched import Launched, compose
from fused_softmax.core.layout import alignment_of, flatten, held_bytes
from fused_softmax.core.route import needs_grad
from fused_softmax.core.runner import spec_of
from fused_softmax.ops.softmax.over_ranks import SoftmaxOfShard
from fused_softmax.ops.softmax.scores import Scores
from fused_softmax.ranks.gather import told_by
from fused_softmax.ranks.groups import CHECK, Over, Shards
from fused_softmax.ranks.launches import DTYPES, Facts, allocator, facts_of, plan_of, prepare_launch
from fused_softmax.ranks.peers import Peers, known


def kept_softmax(name: str, input: Any, dim: Any, dtype: Any, over: Over) -> Tensor | None:
    """The result by a call that is kept; None where there is none."""
    group = over.group
    if CHECK or type(input) is not Tensor or type(dim) is not int:
        return None
    peers = known(group, input.device)
    if not isinstance(peers, Peers):
        return None
    call = find(f"{name} by peers", (peers.number, dim, dtype, *over[1:]), input)
    if call is None:
        return None
    peers.ready(name)
    return call(name, peers, group, input)


def in_one_launch(x: Tensor, dim: int, dtype: torch.dtype, scores: Scores, shards: Shards) -> bool:
    """Whether one launch reads columns, exchanges and writes: by what is the same on all ranks."""
    if dim % x.ndim != x.ndim - 1 or not scores.plain or x.dtype not in DTYPES or dtype not in DTYPES:
        return False
    n_rows = _rows(x)
    return n_rows > 0 and plan_of(n_rows, held_bytes(x), "even", facts_of(shards), x.get_device()) is not None


def softmax_by_peers(
    name: str, x: Tensor, dim: int, given_dtype: Any, dtype: torch.dtype, shards: Shards, peers: Peers, over: Over
) -> Tensor:
    """This rank's columns of the softmax, in the dtype `dtype`."""
    # The digest has the call's shape, and the call may be kept for others.
    launched = _prepare(name, x, dtype, facts_of(shards._replace(digest=None)), peers, shards.group)
    call = keep(launched, f"{name} by peers", (peers.number, dim, given_dtype, *over[1:]), x)
    return call(name, peers, shards.group, x)


def _rows(x: Tensor) -> int:
    return math.prod(x.shape[:-1])


def _prepare(name: str, input: Tensor, dtype: torch.dtype, facts: Facts, peers: Peers, group: Any) -> Launched:
    """call(name, peers, group, input) -> y"""
    log, held, columns = name == "log_softmax", facts.of(None).held, input.shape[-1]
    differentiates = needs_grad(input)
    padded, simple = held < columns, flatten(input[..., :held]) is not None
    asked = f"{name} {input.dtype} {dtype} {facts.sizes} {facts.n_classes} {differentiates}"
    launched = _prepare_launch(log, _as_rows(input[..., :held]), dtype, facts, peers, group, asked)
    empty = allocator(input.device)

    def build(n, run):
        shape = (*input_shape[:-1], held) if n is None else (n, *input_shape[1:-1], held)
        strides = contiguous_strides(shape)

        def written(x, peers, group):
            y = empty(shape, strides, dtype)
            run(peers, group, x if simple else x.contiguous(), y)
            return y

        def call(name, peers, group, input):
            peers.in_turn()
            x = input[..., :held] if padded else input
            if differentiates:
                y = _Softmax.apply(x, (written, peers, log, told_by(peers, name, facts.of(group))))
            else:
                y = written(x, peers, group)
            if padded:
                y = torch.nn.functional.pad(y, (0, columns - held), value=-torch.inf if log else 0.0)
            return y

        return call

    input_shape = tuple(input.shape)
    return compose(build, launched, n=input_shape[0] if simple and input.ndim > 1 else None)


def _as_rows(x: Tensor) -> Tensor:
    rows = flatten(x)
    return flatten(x.contiguous()) if rows is None else rows  # type: ignore[return-value]


def _prepare_launch(log: bool, x: Tensor, dtype, facts: Facts, peers: Peers, group, asked: str) -> Launched:
    from fused_softmax.ops.softmax.kernels.peers import _peer_forward

    y = torch.empty(x.shape, dtype=dtype, device=x.device)
    device, alignment, itemsize = x.get_device(), alignment_of(x, y), held_bytes(x)

    def plan_for(n_rows):
        plan = plan_of(n_rows, itemsize, alignment, facts, device)
        assert plan is not None
        return plan

    spec = spec_of(
        ScoreSpec, plan_for(len(x)), dtype, device, itemsize=x.element_size(), log=log, peers=True
    )  # fmt: skip
    return prepare_launch(
        _peer_forward, plan_for, len(x), spec, {"x": x, "y": y}, {}, (), peers, group, asked,
        besides=20 if itemsize == 2 else None,
    )  # fmt: skip


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, how):
        written, peers, log, shards = how
        y = written(x, peers, shards.group)
        ctx.of_call = log, x.ndim - 1, x.dtype, False, None, shards
        ctx.save_for_backward(y, None)
        return y

    @staticmethod
    def backward(ctx, dy):
        return SoftmaxOfShard.backward(ctx, dy)[0], None
