"""Launches of attention's kernels, prepared once for tensors like those at hand: layouts, tiles and allocations."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax.core import launch, workspace
from fused_softmax.core.device import device_of
from fused_softmax.core.runner import TLDTYPES
from fused_softmax.ops.attention import hopper as attention_hopper
from fused_softmax.ops.attention.bias import blocks, prepare_bias
from fused_softmax.ops.attention.hopper_bias import prepare_by_sum
from fused_softmax.ops.attention.kernels.forward import _attention
from fused_softmax.ops.attention.kernels.gradient import _delta, _keys_gradient, _queries_gradient
from fused_softmax.ops.attention.kernels.spec import ADDED_MASK, BOOL_MASK, GRANULE, NO_MASK, AttentionSpec
from fused_softmax.ops.attention.kernels.stats import _column_sums
from fused_softmax.ops.attention.layout import Groups, Pattern, maker, own_sizes, skipping
from fused_softmax.ops.attention.options import Attention
from fused_softmax.ops.attention.plan.tiles import Tiles, blocks_of, plan_attention
from fused_softmax.ops.attention.special import prepare_decode, prepare_short, prepare_short_backward, prepare_window

_MOST_STRIDE = 2**23  # of the rows of a tile, whose offsets have 32 bits
_COARSE = 3  # the use of slots
_VECTOR = 8  # elements of 16 bits

Ready = Callable[[Tensor], Tensor]


class Inputs(NamedTuple):
    """Query, key, value, and what stands beside them: query, key and value of the same leading shape."""

    query: Tensor
    key: Tensor
    value: Tensor
    attn_mask: Tensor | None = None
    bias: Tensor | None = None
    sinks: Tensor | None = None
    alibi_slopes: Tensor | None = None


class Results(NamedTuple):
    """Those that are not asked for are None; lse is there always."""

    output: Tensor
    lse: Tensor
    entropy: Tensor | None
    row_max: Tensor | None
    column_sums: Tensor | None


class _Call:
    """What the launches of a call share: sizes, strides, and how each tensor is made ready for them."""

    def __init__(self, given: Inputs, how: Attention, do: Tensor | None = None):
        query, key, value = given[:3]
        self.how, self.dtype, self.device = how, query.dtype, query.get_device()
        self.lead = tuple(query.shape[:-3])
        self.n_heads, self.n_queries, self.head_dim = query.shape[-3:]
        self.n_keys, self.value_dim = value.shape[-2:]
        self.group = self.n_heads // key.shape[-3] if key.shape[-3] else 1
        self.shape = (*self.lead, self.n_heads, self.n_queries, self.n_keys)
        self.ready: dict[str, Ready] = {}
        self.strides: dict[str, Any] = {"mask": None, "bias": None, "slopes": None}
        self.patterns: dict[str, Pattern] = {}
        self._lay(given, do)
        self.spec = self._spec(given)
        self.gpu, spec = device_of(self.device), self.spec
        self.plan = plan_attention(
            self.head_dim, self.value_dim, self.dtype.itemsize, self.n_queries, self.n_keys, self.gpu,
            (spec.mask != NO_MASK) + spec.bias + spec.softcap + spec.alibi + spec.left
            + 2 * ("entropy" in self.how.stats) + self._unaligned,
            None if how.left is None or how.right is None else how.left + how.right + 1,
        )  # fmt: skip

    @property
    def rows(self) -> tuple[int, ...]:
        """The shape of lse."""
        return self.shape[:-1]

    @property
    def n_batches(self) -> int:
        return math.prod(self.lead)

    def _lay(self, given: Inputs, do: Tensor | None) -> None:
        dense = {"q": given.query, "k": given.key, "v": given.value} | ({} if do is None else {"do": do})
        for name, each in dense.items():
            if not _loads_as_it_lies(each):
                self.ready[name], dense[name] = _copied, _copied(each)
        added: dict[str, Any] = {"mask": given.attn_mask, "bias": given.bias}
        added = {name: each for name, each in added.items() if each is not None}
        if given.sinks is not None and given.sinks.stride() != (1,):
            self.ready["sinks"] = torch.Tensor.contiguous
        for name, each in added.items():
            last = zip(each.shape[-2:], each.stride()[-2:], strict=True)
            if any(size > 1 and stride >= _MOST_STRIDE for size, stride in last):
                self.ready[name], added[name] = torch.Tensor.contiguous, each.contiguous()
        n = len(self.shape)
        own = {name: own_sizes(each, n) for name, each in added.items()}
        views = {name: each.expand(self.shape) for name, each in added.items()}
        if given.alibi_slopes is not None:
            views["slopes"] = given.alibi_slopes.expand(self.shape[:-2])
            own["slopes"] = own_sizes(given.alibi_slopes, n - 2)
        n_lead = len(self.lead)
        every = dense | views
        sizes = [own.get(name, self.lead)[:n_lead] for name in every]
        groups = Groups(self.lead, list(every.values()), sizes)
        if not groups.fits:  # one dim of contiguous tensors
            for name in dense:
                self.ready[name], dense[name] = _copied, _copied(dense[name])
            for name, each in views.items():
                shape = (*self.lead, *own[name][n_lead:])
                self.ready[name] = partial(_expanded, shape)
                views[name] = _expanded(shape, added.get(name, given.alibi_slopes)).expand(each.shape)
                own[name] = shape
            every = dense | views
            groups = Groups(self.lead, list(every.values()), [self.lead] * len(every))
        _, self.inner = groups.sizes
        self.own = own
        for name in dense:
            self.strides[name] = groups.strides(dense[name], 2)
        for name, each in views.items():
            self.strides[name] = groups.strides(each, 1 if name == "slopes" else 3)
            if name != "slopes":
                self.patterns[name] = groups.pattern(own[name], self.shape)

    def _spec(self, given: Inputs) -> AttentionSpec:
        mask, how = given.attn_mask, self.how
        kind = NO_MASK if mask is None else BOOL_MASK if mask.dtype == torch.bool else ADDED_MASK
        slopes, bias = given.alibi_slopes is not None, given.bias is not None
        mask_rows = mask is None or self.strides["mask"][3] != 0
        skips, vector = skipping(mask, self.strides["mask"], mask_rows, self.n_keys, "mask" in self.ready)
        folds = kind != ADDED_MASK and not (bias or slopes) and how.softcap is None and how.scale > 0
        block_d, block_v = blocks_of(self.head_dim, self.value_dim, self.dtype.itemsize)
        return AttentionSpec(
            block_m=0, block_n=0, head_dim=self.head_dim, value_dim=self.value_dim, block_d=block_d, block_v=block_v,
            vector=_VECTOR if self.dtype.itemsize == 2 else 1, dtype=TLDTYPES[self.dtype], left=self._left is not None,
            right=self._right is not None, mask=kind, mask_rows=mask_rows, skips=skips, mask_vector=vector, bias=bias,
            bias_rows=not bias or self.strides["bias"][3] != 0, alibi=slopes, softcap=how.softcap is not None,
            sinks=given.sinks is not None, folds=folds,
        )  # fmt: skip

    @property
    def _unaligned(self) -> bool:
        """Whether the rows of a mask or bias begin at any address, so that each element takes a load of its own."""
        return any(strides is not None and strides[3] % 16 for strides in (self.strides["mask"], self.strides["bias"]))

    @property
    def _left(self) -> int | None:
        """None where no key is so far to the left that it is hidden."""
        left, most = self.how.left, self.n_queries - 1 + self.how.offset(self.n_queries, self.n_keys)
        return None if left is None or left >= most else left

    @property
    def _right(self) -> int | None:
        right, most = self.how.right, self.n_keys - 1 - self.how.offset(self.n_queries, self.n_keys)
        return None if right is None or right >= most else right

    @property
    def n_seen(self) -> int:
        """Keys that some query sees: all others are hidden by the window or causality."""
        offset = self.how.offset(self.n_queries, self.n_keys)
        begin = 0 if self._left is None else max(0, offset - self._left)
        end = self.n_keys if self._right is None else min(self.n_keys, self.n_queries + offset + self._right)
        return max(0, end - begin)

    def numbers(self) -> tuple:
        """As every kernel takes them, from n_inner on."""
        offset = self.how.offset(self.n_queries, self.n_keys)
        return (
            self.inner, self.n_heads, self.group, self.n_queries, self.n_keys, self._left or 0, self._right or 0,
            offset, float(self.how.scale), float(self.how.softcap or 1.0),
        )  # fmt: skip

    def prepare(
        self, kernel: Any, programs: int, tiles: Tiles, tensors: Sequence, scalars: tuple, plan: Any = None,
        **fields: Any,
    ):  # fmt: skip
        """What launches a kernel. plan: whose the tiles are; themselves if None. fields: of the spec."""
        ragged = self.n_keys % tiles.block_n != 0
        spec = replace(self.spec, block_m=tiles.block_m, block_n=tiles.block_n, ragged=ragged, **fields)
        options: dict[str, Any] = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
        if spec.skips and kernel in (_attention, _queries_gradient):  # no fewer programs are to be resident
            options["registers_of"] = {"K": replace(spec, skips=False)}
        return launch.prepare(
            kernel, programs, tensors, scalars, {"K": spec}, device=self.device, plan=plan or tiles, **options
        )

    def of(self, name: str, tensor: Tensor | None) -> Tensor | None:
        """A tensor as the launches take it."""
        ready = self.ready.get(name)
        return tensor if ready is None or tensor is None else ready(tensor)

    def readied(self, given: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
        """A call's tensors, in the order of Inputs, as the launches take them."""
        if not self.ready:
            return given
        names = "q", "k", "v", "mask", "bias", "sinks", "slopes"
        return tuple(self.of(name, each) for name, each in zip(names, given, strict=True))


def _loads_as_it_lies(tensor: Tensor) -> bool:
    """Whether kernels load rows as they lie; else they get a copy. Of 16 bits they load vectors."""
    if (tensor.stride(-1) != 1 and tensor.shape[-1] > 1) or tensor.stride(-2) >= _MOST_STRIDE:
        return False
    steps = [step for n, step in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if n > 1]
    whole = tensor.data_ptr() % 16 == 0 and not any(step % _VECTOR for step in steps)
    return whole or tensor.element_size() != 2


def _copied(tensor: Tensor) -> Tensor:
    """A contiguous copy, which begins where memory is aligned."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _expanded(shape: tuple[int, ...], tensor: Any) -> Tensor:
    return tensor.expand(shape).contiguous()


def widened(tensor: Tensor) -> Tensor:
    """A tensor whose last dim is a whole number of vectors, with zeros at its end."""
    return torch.nn.functional.pad(tensor, (0, -tensor.shape[-1] % _VECTOR))


def _widens(given: Inputs) -> bool:
    """Whether heads of 16 bits are to be widened. Rows that are loaded by elements take long, and ptxas errs with them.

    `plan.attention.blocks_of` says how.
    """
    dims = given.query.shape[-1], given.value.shape[-1]
    return given.query.element_size() == 2 and any(dim % _VECTOR for dim in dims)


def prepare_forward(given: Inputs, how: Attention) -> Callable[..., Results]:
    """What computes a call on tensors like these: call it with them."""
    if not _widens(given):
        return _prepare_forward(given, how)
    dim = given.value.shape[-1]
    made = _prepare_forward(
        given._replace(query=widened(given.query), key=widened(given.key), value=widened(given.value)), how
    )

    def call(*given: Any) -> Results:
        found = made(*map(widened, given[:3]), *given[3:])
        return found._replace(output=found.output[..., :dim].contiguous())

    return call


def _prepare_forward(given: Inputs, how: Attention) -> Callable[..., Results]:
    c = _Call(given, how)
    stats = how.stats
    device, dtype, out_shape, rows = given.query.device, c.dtype, (*c.rows, c.value_dim), c.rows
    columns = (*c.lead, c.n_heads, c.n_keys)
    n = c.n_batches * c.n_heads * c.n_queries
    of_output, of_rows = maker(out_shape, dtype, device), maker(rows, torch.float32, device)

    def made() -> Results:
        """Empty results."""
        if not stats:
            return Results(of_output(), of_rows(), None, None, None)
        entropy, row_max = (of_rows() if each in stats else None for each in ("entropy", "row_max"))
        sums = torch.zeros(columns, dtype=torch.float32, device=device) if "column_sums" in stats else None
        return Results(of_output(), of_rows(), entropy, row_max, sums)

    of_record = maker(record_shape(c), torch.float32, device)

    if n == 0:
        return lambda *_: made()
    like, ready = made(), c.readied(given)
    q, k, v, mask, bias, sinks, slopes = ready
    strides = [c.strides[name] for name in ("q", "k", "v", "mask", "bias", "slopes")]
    tensors = (q, k, v, mask, bias, sinks, slopes, like.output, like.lse, like.entropy, like.row_max)
    scalars = (*strides, *c.numbers())
    run = (
        prepare_decode(c, tensors, scalars)
        or prepare_short(c, tensors, scalars)
        or prepare_window(c, tensors)
        or attention_hopper.prepare_forward(c, q, k, v, bias, sinks, slopes, like.output, like.lse)
    )
    if run is None:
        tiles = c.plan.forward
        programs = blocks(c.n_queries, tiles.block_m) * c.n_batches * c.n_heads
        run = c.prepare(
            _attention, programs, tiles, tensors, scalars, entropy="entropy" in stats, row_max="row_max" in stats
        )  # fmt: skip
    sums = record_rows = None
    if like.column_sums is not None and c.n_keys:
        tiles = c.plan.sums
        programs = blocks(c.n_keys, tiles.block_n) * c.n_batches * c.n_heads
        of_sums = (strides[0], strides[1], *strides[3:], *c.numbers())
        record = of_record()
        record_rows = prepare_delta(c, ready, None, None, like.lse, None, record, None, None)
        sums = c.prepare(_column_sums, programs, tiles, (q, k, mask, bias, slopes, record, like.column_sums), of_sums)

    def call(*given: Tensor | None) -> Results:
        found, ready = made(), c.readied(given)
        run(*[each for each in (*ready, *found[:4]) if each is not None])
        if sums is not None and record_rows is not None:
            q, k, _, mask, bias, sinks, slopes = ready
            record = of_record()
            record_rows(*[each for each in (q, k, mask, bias, sinks, slopes, found.lse, record) if each is not None])
            every = (q, k, mask, bias, slopes, record, found.column_sums)
            sums(*[each for each in every if each is not None])
        return found

    return call


def record_shape(c: _Call) -> tuple[int, int]:
    """Of what `_delta` records: three numbers of each query."""
    return c.n_batches * c.n_heads, 3 * c.n_queries


def prepare_delta(
    c: _Call, ready: tuple, output: Tensor | None, do: Tensor | None, lse: Tensor, dlse: Tensor | None, record: Tensor,
    coarse: Tensor | None, rows: Tensor | None,
) -> Callable[..., None]:  # fmt: skip
    """What launches `_delta` on those of its tensors that are given.

    ready: the call's tensors, in the order of Inputs.
    """
    q, k, _, mask, bias, sinks, slopes = ready
    strides = [c.strides[name] for name in ("q", "k", "mask", "bias", "slopes")]
    tiles = Tiles(GRANULE, 32, 4, 1)
    n_padded = attention_hopper.rows_shape(c)[-1]
    return c.prepare(
        _delta, blocks(c.n_queries, GRANULE) * c.n_batches * c.n_heads, tiles,
        (q, k, mask, bias, sinks, slopes, output, do, lse, dlse, record, coarse, rows),
        (*strides, c.strides.get("do"), *c.numbers(), n_padded),
    )  # fmt: skip


class Gradients(NamedTuple):
    """Those that are not asked for are None."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    attn_mask: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None


def prepare_backward(
    given: Inputs, how: Attention, do: Tensor, dlse: Tensor | None, output: Tensor, lse: Tensor, asked: Sequence[bool]
) -> Callable[..., Gradients]:
    """What computes the gradients that are asked for: call it with do, dlse, output, lse, and the inputs."""
    if not _widens(given):
        return _prepare_backward(given, how, do, dlse, output, lse, asked)
    wide = given._replace(query=widened(given.query), key=widened(given.key), value=widened(given.value))
    made = _prepare_backward(wide, how, widened(do), dlse, widened(output), lse, asked)

    def call(do: Tensor, dlse: Tensor | None, output: Tensor, lse: Tensor, *given: Any) -> Gradients:
        found = made(widened(do), dlse, widened(output), lse, *map(widened, given[:3]), *given[3:])
        dq, dk, dv = (
            each if each is None else each[..., : like.shape[-1]].contiguous()
            for each, like in zip(found[:3], given[:3], strict=True)
        )
        return found._replace(query=dq, key=dk, value=dv)

    return call


def _prepare_backward(
    given: Inputs, how: Attention, do: Tensor, dlse: Tensor | None, output: Tensor, lse: Tensor, asked: Sequence[bool]
) -> Callable[..., Gradients]:
    c = _Call(given, how, do)
    device = given.query.device
    ready = q, k, v, mask, bias, _, slopes = c.readied(given)
    do = c.of("do", do)  # type: ignore[assignment]
    n_rows = c.n_batches * c.n_heads * c.n_queries
    strides = [c.strides[name] for name in ("q", "k", "v", "mask", "bias", "slopes", "do")]
    scalars = (*strides, *c.numbers())
    short = prepare_short_backward(c, (q, k, v, mask, bias, slopes, do, lse), dlse, scalars, asked)
    if short is not None:
        return lambda *tensors: Gradients(*short(*tensors))
    of_record, of_dq = maker(record_shape(c), torch.float32, device), maker((*c.rows, c.head_dim), c.dtype, device)
    record = of_record()
    own_coarse = torch.zeros(1, dtype=torch.int64, device=device) if c.device < 0 else None

    def of_coarse() -> Tensor:
        """What tells the kernel of dK and dV that some lse is too coarse: 0 before and after a call."""
        return own_coarse if own_coarse is not None else workspace.slots(c.device, 1, 1, _COARSE)

    coarse = of_coarse()
    beside = {"mask": given.attn_mask, "bias": given.bias}
    wanted = [name for name, asks in zip(("mask", "bias"), asked[3:5], strict=True) if asks]
    full = [name for name in wanted if c.patterns[name].full]
    ds_dtype = None
    for name in full:
        dtype = beside[name].dtype  # type: ignore[union-attr]
        ds_dtype = dtype if ds_dtype is None else torch.promote_types(ds_dtype, dtype)
    rows_shape = attention_hopper.rows_shape(c)
    of_tiled_rows = maker(rows_shape, torch.float32, device)
    rows = of_tiled_rows()
    by_sum = None
    if wanted == ["bias"]:
        by_sum = prepare_by_sum(c, (q, k, v, slopes), bias, do, rows, record, coarse, bool(asked[0]))
    for_keys, for_queries = bool(asked[1] or asked[2]), bool(asked[0] or full)
    if by_sum is not None:
        for_keys, for_queries, wanted, full = False, False, [], []
    dq_like = of_dq()
    key_shape = (*c.lead, c.n_heads // c.group, c.n_keys)
    read = (q, k, v, mask, bias, slopes, do, record)
    with_coarse = (*read, coarse)

    of_dk, of_dv = (maker((*key_shape, d), c.dtype, device) for d in (c.head_dim, c.value_dim))

    def keys_made() -> tuple[Tensor, Tensor]:
        dk, dv = of_dk(), of_dv()
        return (dk, dv) if n_rows else (dk.zero_(), dv.zero_())  # without queries nothing is written

    def ds_made() -> Tensor:
        make = torch.zeros if c.how.bounded else torch.empty  # what is hidden is not visited
        return make(c.shape, dtype=ds_dtype, device=device)

    of_delta = of_keys = of_queries = None
    keys_tiled = queries_tiled = None  # by the kernels for sm_90
    if for_keys and n_rows and c.n_keys:
        keys_tiled = attention_hopper.prepare_keys(c, (q, k, v, slopes), bias, do, rows, record, coarse, *keys_made())
        tiles = c.plan.keys
        programs = blocks(c.n_keys, tiles.block_n) * c.n_batches * (c.n_heads // c.group)
        if keys_tiled is None:
            of_keys = attention_hopper.both(
                c.prepare(_keys_gradient, programs, tiles, (*with_coarse, *keys_made()), scalars, recorded=recorded)
                for recorded in (False, True)
            )
    if for_queries and n_rows:
        if not full:
            queries_tiled = attention_hopper.prepare_queries(
                c, (q, k, v, slopes), bias, do, rows, record, coarse, dq_like
            )
        tiles = c.plan.queries
        programs = blocks(c.n_queries, tiles.block_m) * c.n_batches * c.n_heads
        if queries_tiled is None:
            more = (*with_coarse, dq_like, ds_made() if full else None)
            of_queries = c.prepare(_queries_gradient, programs, tiles, more, scalars, stores_ds=bool(full))
    any_tiled = any(each is not None for each in (keys_tiled, queries_tiled, by_sum))
    if n_rows:
        of_delta = prepare_delta(c, ready, output, do, lse, dlse, record, coarse, rows if any_tiled else None)
    of_bias = {name: prepare_bias(c, name, read, strides, beside[name].dtype) for name in wanted if name not in full}  # type: ignore[union-attr]

    def call(do: Tensor, dlse: Tensor | None, output: Tensor, lse: Tensor, *given: Tensor | None) -> Gradients:
        q, k, v, mask, bias, sinks, slopes = c.readied(given)
        do = c.of("do", do)  # type: ignore[assignment]
        record, coarse = of_record(), of_coarse()
        rows = of_tiled_rows() if any_tiled else None
        if of_delta is not None:
            every = q, k, mask, bias, sinks, slopes, output, do, lse, dlse, record, coarse, rows
            of_delta(*[each for each in every if each is not None])
        read = [each for each in (q, k, v, mask, bias, slopes, do, record) if each is not None]
        by_tiles = [each for each in (q, k, v, bias, slopes, do, rows, record, coarse) if each is not None]
        dq = dk = dv = ds = None
        if for_keys:
            dk, dv = keys_made()
            if keys_tiled is not None:
                keys_tiled(*by_tiles, dk, dv)
            elif of_keys is not None:
                of_keys(*read, coarse, dk, dv)
        if for_queries:
            dq = of_dq()
            ds = ds_made() if full else None
            if queries_tiled is not None:
                queries_tiled(*by_tiles, dq)
            elif of_queries is not None:
                of_queries(*read, coarse, dq, *(() if ds is None else (ds,)))
        if n_rows and not for_queries:  # whose kernel does so
            coarse.zero_()
        added: dict[str, Tensor | None] = {"mask": None, "bias": None}
        if by_sum is not None:
            dq, dk, dv, dbias = by_sum(*by_tiles)
            coarse.zero_()
            added["bias"] = dbias.sum_to_size(given[4].shape)  # type: ignore[union-attr]
        for name in wanted:
            tensor: Any = given[3 if name == "mask" else 4]
            if name in full:
                found: Any = ds.to(tensor.dtype)  # type: ignore[union-attr]
                # Of two gradients neither is a view of the other.
                own = found.clone() if found is ds and len(full) > 1 else found  # type: ignore[union-attr]
                added[name] = own.sum_to_size(tensor.shape)
            else:
                added[name] = of_bias[name](read).sum_to_size(tensor.shape)
        delta = record[:, : c.n_queries].view(c.rows)
        dsinks = sinks_gradient(sinks, lse, delta) if asked[5] and sinks is not None else None
        return Gradients(
            dq if asked[0] else None, dk if asked[1] else None, dv if asked[2] else None, added["mask"], added["bias"],
            dsinks,
        )  # fmt: skip

    return call


def sinks_gradient(sinks: Tensor, lse: Tensor, delta: Tensor) -> Tensor:
    """-sum exp(sink - lse) delta over batches and queries."""
    z = sinks.to(lse.dtype)[:, None]
    p = (z - lse).exp().masked_fill(z == -math.inf, 0.0)
    terms = -p * delta
    return terms.sum([d for d in range(terms.ndim) if d != terms.ndim - 2]).to(sinks.dtype)
