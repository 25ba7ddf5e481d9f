"""Tokens of rows whose columns lie in shards over ranks: each rank gathers some of the rows whole, and draws these.

A token is a function of its whole row: a nucleus is a sum of all columns, and scores are rounded relative to one origin
of the row. So the rows are exchanged, not states of them: each of R ranks gets the columns of one row in R, draws from
these rows as one device does, and tells all ranks the tokens. They have the bits of one device, whatever is asked for.
Traffic of a shard of N columns: between ranks MN (R - 1) / R sent and received, and an all_gather of 2 to 3 + 2 k
numbers a row (k: top_logprobs); on a rank MN read, 2MN of memory held beside it.
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from fused_softmax.ops.sampling.one_device import position_of, seed_of
from fused_softmax.ops.sampling.options import (
    Sampling,
    check_logits,
    check_out,
    check_random,
    check_shape,
    check_tensor,
    sampling_of,
)
from fused_softmax.ops.sampling.reference import SampleOutput
from fused_softmax.ranks.groups import WITHOUT_PEERS, Over, Refusing, Shards, check_over, gather, shards_of, sizes_of
from fused_softmax.ranks.peers import choose

_NAME = "sample"
WITHOUT_PEERS.add(_NAME)
_FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)


class Part(NamedTuple):
    """The draws of each rank, of whole rows: as many as each other's, but for the last ones. most: of any rank's."""

    n_draws: int
    ranks: int
    rank: int

    @property
    def most(self) -> int:
        return -(-self.n_draws // self.ranks)

    def of(self, rank: int) -> slice:
        return slice(min(rank * self.most, self.n_draws), min((rank + 1) * self.most, self.n_draws))

    @property
    def here(self) -> slice:
        return self.of(self.rank)

    @property
    def sizes(self) -> list[int]:
        return [self.of(rank).stop - self.of(rank).start for rank in range(self.ranks)]

    def mine(self, value: Any) -> Any:
        """This rank's part of what draws have each, or what all of them share."""
        return value[self.here] if isinstance(value, Tensor) and value.ndim else value


def sample_of_shards(
    logits: Tensor, numbers: Mapping[str, Any], tensors: Mapping[str, Any], asked: Mapping[str, Any],
    random: tuple[Any, Any, Any], out: Tensor | None, over: Over, draw: Callable[..., SampleOutput],
) -> SampleOutput:  # fmt: skip
    """A call over a group: logits [n_rows, this rank's columns], and what `sample` takes beside them, by name.

    numbers: temperature, the filters, the penalties. tensors: logit_bias, bitmask, row_indices, token_ids. asked: the
    rest but random = (seed, position, generator) and out. draw: `sample` itself, for the rows that a rank draws of.
    """
    bias, rows = tensors["logit_bias"], tensors["row_indices"]
    with Refusing(_NAME, over, logits):
        check_over(_NAME, over, logits, *numbers.values(), *tensors.values())
        if asked["return_kept"]:
            raise ValueError(f"{_NAME}: return_kept needs whole rows, and with group a rank has some columns")
        no_columns = isinstance(logits, Tensor) and logits.ndim == 2 and logits.shape[1] == 0
        check_logits(_NAME, "logits", _shaped(logits, logits.shape[0], 1) if no_columns else logits, "[n_rows, vocab]")
        columns = logits.shape[1]
        if rows is not None:  # the rest of it is checked beside the whole rows
            check_tensor(_NAME, "row_indices", rows, logits, (torch.int64, torch.int32), "int64 or int32")
        n_draws = logits.shape[0] if rows is None or rows.ndim != 1 else rows.shape[0]
        if bias is not None:
            check_tensor(_NAME, "logit_bias", bias, logits, _FLOATS, "16 to 64 bit floats")
            check_shape(_NAME, "logit_bias", bias, (columns,), (n_draws, columns))
        check_random(_NAME, *random, logits, n_draws)
        if out is not None:
            check_out(_NAME, out, logits, torch.int64, "int64", (n_draws,))
        sizes = sizes_of(_NAME, over, columns)
        whole = _shaped(logits, logits.shape[0], over.n_classes or sum(sizes))
        others = {name: each for name, each in tensors.items() if name != "logit_bias"}
        options = sampling_of(_NAME, whole, **numbers, **others, **asked)
        alike = _alike(logits, numbers, tensors, asked, random)
    shards = shards_of(_NAME, sizes, n_draws, over, logits.device, alike)
    peers = choose(_NAME, over.transport, over.group, logits.device, None)
    if peers is not None:  # whose hosts can tell that rows are exchanged by equal sizes
        peers.ready(_NAME)
        peers.agree(_NAME, (sizes, shards.n_classes, n_draws, *alike.items()))
    with torch.no_grad():
        x, there = _rows_of_draws(logits, rows, n_draws)
        seed, position, generator = random
        if position_of(seed, position) is None:
            position = torch.arange(n_draws, device=x.device)
        if seed is None:  # of a generator, whose state then is as after a call on one device
            seed = seed_of(generator, x.device)
        random = seed, position, None
        if _greedy(options):
            drawn = _greatest(x, bias, there, shards, draw)
        else:
            drawn = _told(_drawn(x, bias, there, options, random, shards, draw), options, n_draws, shards)
        return drawn if out is None else drawn._replace(tokens=out.copy_(drawn.tokens))


def _shaped(like: Tensor, n_rows: int, n_cols: int) -> Tensor:
    """What has a shape, a dtype and a device, and no memory."""
    return like.new_empty(()).expand(n_rows, n_cols)


def _alike(
    logits: Tensor, numbers: Mapping[str, Any], tensors: Mapping[str, Any], asked: Mapping[str, Any], random: Sequence
) -> dict[str, Any]:
    """What all ranks have to ask alike. Seeds and positions are data, as targets of a loss are."""
    said = {"operation": _NAME, "dtype": logits.dtype, "shape": (logits.shape[0],), **asked}
    said |= {name: (*value.shape,) if isinstance(value, Tensor) else value for name, value in numbers.items()}
    said |= {name: None if value is None else (value.dtype, value.ndim) for name, value in tensors.items()}
    return said | {"seeded": random[0] is not None}


def _rows_of_draws(logits: Tensor, rows: Tensor | None, n_draws: int) -> tuple[Tensor, Tensor | None]:
    """(the row of each draw, whether there is one; None where there always is)."""
    if rows is None:
        return logits, None
    there = (rows >= 0) & (rows < logits.shape[0])
    if not logits.shape[0]:
        return logits.new_zeros(n_draws, logits.shape[1]), there
    return logits.index_select(0, rows.clamp(0, logits.shape[0] - 1)), there


def _greedy(options: Sampling) -> bool:
    """Whether the greatest logits alone decide. Filters keep them, but one of a tensor may have no meaning."""
    if any(isinstance(each, Tensor) for each in (options.temperature, options.top_k, options.top_p, options.min_p)):
        return False
    others = options.bitmask, options.token_ids, options.return_logprobs
    return bool(options.temperature == 0) and all(each is None for each in others)


def _greatest(
    x: Tensor, bias: Tensor | None, there: Tensor | None, shards: Shards, draw: Callable[..., SampleOutput]
) -> SampleOutput:
    """The columns of the greatest logits of all shards, of equals the first."""
    n, held = len(x), shards.held
    m = x.new_full((n,), -torch.inf, dtype=torch.float64)
    at, n_inf = torch.zeros_like(m), torch.zeros_like(m)
    if held:
        x = x[:, :held]
        bias = None if bias is None else bias[..., :held]
        own = draw(x, temperature=0.0, seed=0, logit_bias=bias)
        m = (x if bias is None else x.float() + bias.float()).amax(1).double()
        at = (own.tokens + shards.first).double()
        n_inf = torch.where(m == torch.inf, 2.0 - own.valid.double(), 0.0)
    m, at, n_inf = gather(torch.stack((m, at, n_inf)), shards).unbind(1)
    valid = ~m.isnan().any(0) & (m.amax(0) > -torch.inf) & (n_inf.sum(0) <= 1)
    valid = valid if there is None else valid & there
    tokens = at.gather(0, m.argmax(0, keepdim=True)).squeeze(0)
    return SampleOutput(torch.where(valid, tokens, 0.0).long(), valid)


def _drawn(
    x: Tensor, bias: Tensor | None, there: Tensor | None, options: Sampling, random: tuple[Any, Any, Any],
    shards: Shards, draw: Callable[..., SampleOutput],
) -> SampleOutput:  # fmt: skip
    """The draws of this rank's part."""
    part = Part(len(x), len(shards.sizes), shards.rank)
    if bias is not None and bias.ndim == 1:  # one row, which every rank gets
        bias = _whole_rows(bias.expand(part.ranks, -1), Part(part.ranks, part.ranks, part.rank), shards)[0]
    elif bias is not None:
        bias = _whole_rows(bias, part, shards)
    rows = None
    if there is not None:  # one that is out of range cannot be drawn from
        here = part.mine(there)
        rows = torch.where(here, torch.arange(len(here), device=here.device), -1)
    given = {name: part.mine(value) for name, value in options.options().items()}
    seed, position, _ = map(part.mine, random)
    given |= {"logit_bias": bias, "row_indices": rows, "seed": seed, "position": position}
    return draw(_whole_rows(x, part, shards), **given)


def _whole_rows(x: Tensor, part: Part, shards: Shards) -> Tensor:
    """[this rank's rows, n_classes] of x [rows, this rank's columns]; padding is left out."""
    held = shards.held_by
    x = x[:, : held[part.rank]].contiguous()
    if part.ranks == 1:
        return x
    mine = part.sizes[part.rank]
    sent = [rows * held[part.rank] * x.element_size() for rows in part.sizes]
    heard = [mine * columns * x.element_size() for columns in held]
    received = torch.empty(sum(heard), dtype=torch.uint8, device=x.device)  # bytes, which every backend takes
    dist.all_to_all_single(received, x.view(-1).view(torch.uint8), heard, sent, group=shards.group)
    blocks = [each.view(x.dtype).view(mine, columns) for each, columns in zip(received.split(heard), held, strict=True)]
    return torch.cat(blocks, 1)


def _told(own: SampleOutput, options: Sampling, n_draws: int, shards: Shards) -> SampleOutput:
    """All ranks' draws, on every rank. In float64, which holds tokens and log-probabilities."""
    part = Part(n_draws, len(shards.sizes), shards.rank)
    n_top = options.top_logprobs
    of_rows = own.tokens, own.valid, own.logprobs, own.rank
    said = [each[:, None] for each in of_rows if each is not None]
    if own.top_logprobs is not None and own.top_tokens is not None:
        said += [own.top_logprobs, own.top_tokens]
    message = own.tokens.new_zeros(sum(each.shape[1] for each in said), part.most, dtype=torch.float64)
    message[:, : len(own.tokens)] = torch.cat([each.double() for each in said], 1).T
    heard = gather(message, shards).movedim(1, 2).flatten(0, 1)[:n_draws]
    valid = heard[:, 1] == 1  # NaN where ranks asked for different things
    tokens = torch.where(valid, heard[:, 0], 0.0).long()
    logprobs = heard[:, 2].float() if own.logprobs is not None else None
    rank = heard[:, 3].nan_to_num(0.0).long() if own.rank is not None else None
    top = heard[:, -2 * n_top : -n_top].float() if n_top else None
    top_tokens = heard[:, -n_top:].nan_to_num(-1.0).long() if n_top else None
    return SampleOutput(tokens, valid, logprobs, top, top_tokens, rank=rank)
