"""A call of attention as its launches take it: sizes, strides, and how each tensor is made ready for them.

A pass that is to be prepared is one object, `Forward` or `Backward`. Ways are asked whether they take it, and one of
them prepares it. It holds tensors like those that the pass will be called with, so nothing that is kept holds it.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property, partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax.core import launch
from fused_softmax.core.device import device_of
from fused_softmax.core.plan import Device
from fused_softmax.core.runner import TLDTYPES
from fused_softmax.ops.attention.kernels.spec import ADDED_MASK, BOOL_MASK, NO_MASK, AttentionSpec
from fused_softmax.ops.attention.layout import Groups, Pattern, maker, own_sizes, skipping
from fused_softmax.ops.attention.options import Attention
from fused_softmax.ops.attention.plan.tiles import AttentionPlan, Tiles, blocks_of, plan_attention

_MOST_STRIDE = 2**23  # of the rows of a tile, whose offsets have 32 bits
_VECTOR = 8  # elements of 16 bits

NAMES = "q", "k", "v", "mask", "bias", "sinks", "slopes"  # of the inputs, as kernels' parameters have them
RESULTS = "o", "lse", "entropy", "row_max", "sums"  # likewise
Ready = Callable[[Tensor], Tensor]
Tensors = Mapping[str, Tensor | None]  # of a pass, by those names, in the order in which its launches get them
Strides = tuple[int, ...] | None


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
    """The results of a pass; None for what is not asked for. lse is always there."""

    output: Tensor
    lse: Tensor
    entropy: Tensor | None
    row_max: Tensor | None
    column_sums: Tensor | None


class Gradients(NamedTuple):
    """Gradients; None for those that are not asked for."""

    query: Tensor | None
    key: Tensor | None
    value: Tensor | None
    attn_mask: Tensor | None
    bias: Tensor | None
    sinks: Tensor | None


class Wanted(NamedTuple):
    """Which gradients are asked for."""

    query: bool
    key: bool
    value: bool
    attn_mask: bool
    bias: bool
    sinks: bool


class Launch(NamedTuple):
    """A prepared kernel, and which of a pass's tensors it takes: `run(*takes(tensors))`."""

    run: Callable[..., None]
    takes: Callable[[tuple], tuple]


Preparing = Callable[[], Launch]


class Call:
    """What the launches of a call share: sizes, strides, and how each tensor is made ready for them.

    how: its options. dtype: of query, key and value. device: their index, -1 of a CPU under the interpreter. gpu: what
    the planner knows of it.
    lead: the leading sizes without the heads. inner: the second of the two dims over which these are numbered.
    group: how many heads of query share one of key and value. shape: of scores, [*lead, n_heads, n_queries, n_keys].
    ready: by name, what makes a tensor ready; tensors that are taken as they lie have no entry.
    strides: of ready tensors by name: (outer, inner, head, row); of a mask and bias (outer, inner, head, query, key);
    of slopes (outer, inner, head); None if the call goes without one.
    own: sizes of a mask, bias and slopes themselves. patterns: of a mask and bias, against those of the call.
    spec: what all kernels are compiled for, without their tiles. plan: the tiles of the plain kernels.
    """

    how: Attention
    dtype: torch.dtype
    device: int
    gpu: Device
    lead: tuple[int, ...]
    inner: int
    n_heads: int
    n_queries: int
    n_keys: int
    head_dim: int
    value_dim: int
    group: int
    shape: tuple[int, ...]
    ready: dict[str, Ready]
    strides: dict[str, Strides]
    own: dict[str, tuple[int, ...]]
    patterns: dict[str, Pattern]
    spec: AttentionSpec
    plan: AttentionPlan

    def __init__(self, given: Inputs, how: Attention, do: Tensor | None = None, gpu: Device | None = None):
        """gpu: the one that a call on tensors without memory is planned for."""
        query, key, value = given.query, given.key, given.value
        self.how, self.dtype, self.device = how, query.dtype, query.get_device() if gpu is None else 0
        self.gpu = device_of(self.device) if gpu is None else gpu
        self.lead = tuple(query.shape[:-3])
        self.n_heads, self.n_queries, self.head_dim = query.shape[-3:]
        self.n_keys, self.value_dim = value.shape[-2:]
        self.group = self.n_heads // key.shape[-3] if key.shape[-3] else 1
        self.shape = (*self.lead, self.n_heads, self.n_queries, self.n_keys)
        self.ready, self.patterns = {}, {}
        self.strides = {"mask": None, "bias": None, "slopes": None, "do": None}
        self._lay(given, do)
        self.spec = spec = self._spec(given)
        self.plan = plan_attention(
            self.head_dim, self.value_dim, self.dtype.itemsize, self.n_queries, self.n_keys, self.gpu,
            (spec.mask != NO_MASK) + spec.bias + spec.softcap + spec.alibi + spec.left
            + 2 * self.how.entropy + self._unaligned,
            self.window,
        )  # fmt: skip

    @cached_property
    def rows(self) -> tuple[int, ...]:
        """The shape of lse."""
        return self.shape[:-1]

    @cached_property
    def n_batches(self) -> int:
        return math.prod(self.lead)

    @cached_property
    def all_heads(self) -> int:
        """Heads of query, of all batches."""
        return self.n_batches * self.n_heads

    @cached_property
    def key_heads(self) -> int:
        return self.n_heads // self.group

    @cached_property
    def window(self) -> int | None:
        """How many keys each query sees, if the window has a bound on both sides."""
        left, right = self.how.left, self.how.right
        return None if left is None or right is None else left + right + 1

    def _lay(self, given: Inputs, do: Tensor | None) -> None:
        dense = {"q": given.query, "k": given.key, "v": given.value} | ({} if do is None else {"do": do})
        for name, each in dense.items():
            if not _loads_as_it_lies(each):
                self.ready[name], dense[name] = _copied, _copied(each)
        added = {name: each for name, each in (("mask", given.attn_mask), ("bias", given.bias)) if each is not None}
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
            added["slopes"] = given.alibi_slopes
            views["slopes"] = given.alibi_slopes.expand(self.shape[:-2])
            own["slopes"] = own_sizes(given.alibi_slopes, n - 2)
        n_lead = len(self.lead)
        every = dense | views
        groups = Groups(self.lead, list(every.values()), [own.get(name, self.lead)[:n_lead] for name in every])
        if not groups.fits:  # one dim of contiguous tensors
            for name in dense:
                self.ready[name], dense[name] = _copied, _copied(dense[name])
            for name, each in views.items():
                shape = own[name] = (*self.lead, *own[name][n_lead:])
                self.ready[name] = partial(_expanded, shape)
                views[name] = _expanded(shape, added[name]).expand(each.shape)
            every = dense | views
            groups = Groups(self.lead, list(every.values()), [self.lead] * len(every))
        _, self.inner = groups.sizes
        self.own = own
        n_dims = {"slopes": 1, "mask": 3, "bias": 3}  # after the leading ones; of the others two
        for name, each in every.items():
            self.strides[name] = groups.strides(each, n_dims.get(name, 2))
            if n_dims.get(name) == 3:
                self.patterns[name] = groups.pattern(own[name], self.shape)

    def _spec(self, given: Inputs) -> AttentionSpec:
        mask, how = given.attn_mask, self.how
        kind = NO_MASK if mask is None else BOOL_MASK if mask.dtype == torch.bool else ADDED_MASK
        slopes, bias = given.alibi_slopes is not None, given.bias is not None
        mask_rows = mask is None or self.strides_of("mask")[3] != 0
        skips, vector = skipping(mask, self.strides["mask"], mask_rows, self.n_keys, "mask" in self.ready)
        folds = kind != ADDED_MASK and not (bias or slopes) and how.softcap is None and how.scale > 0
        block_d, block_v = blocks_of(self.head_dim, self.value_dim, self.dtype.itemsize)
        return AttentionSpec(
            block_m=0, block_n=0, head_dim=self.head_dim, value_dim=self.value_dim, block_d=block_d, block_v=block_v,
            vector=_VECTOR if self.dtype.itemsize == 2 else 1, dtype=TLDTYPES[self.dtype], left=self._left is not None,
            right=self._right is not None, mask=kind, mask_rows=mask_rows, skips=skips, mask_vector=vector, bias=bias,
            bias_rows=not bias or self.strides_of("bias")[3] != 0, alibi=slopes, softcap=how.softcap is not None,
            sinks=given.sinks is not None, folds=folds,
        )  # fmt: skip

    def strides_of(self, name: str) -> tuple[int, ...]:
        """The strides of a tensor that exists."""
        strides = self.strides[name]
        assert strides is not None
        return strides

    @cached_property
    def stats_refused(self) -> str:
        """Why a kernel that stores only output and lse does not take the call; empty if it does."""
        asked = [name for name in ("entropy", "row_max") if getattr(self.how, name)]
        return f"its kernel computes no {' and no '.join(asked)}" if asked else ""

    @cached_property
    def _unaligned(self) -> bool:
        """Whether the rows of a mask or bias begin at any address, so that each element takes a load of its own."""
        return any(strides is not None and strides[3] % 16 for strides in (self.strides["mask"], self.strides["bias"]))

    @cached_property
    def _offset(self) -> int:
        return self.how.offset(self.n_queries, self.n_keys)

    @cached_property
    def _left(self) -> int | None:
        """The window's left bound; None if no key is so far to the left that it is hidden."""
        left, most = self.how.left, self.n_queries - 1 + self._offset
        return None if left is None or left >= most else left

    @cached_property
    def _right(self) -> int | None:
        right, most = self.how.right, self.n_keys - 1 - self._offset
        return None if right is None or right >= most else right

    @cached_property
    def n_seen(self) -> int:
        """How many keys some query sees: the window or causality hides all others."""
        offset = self._offset
        begin = 0 if self._left is None else max(0, offset - self._left)
        end = self.n_keys if self._right is None else min(self.n_keys, self.n_queries + offset + self._right)
        return max(0, end - begin)

    @cached_property
    def numbers(self) -> dict[str, Any]:
        """What parameters of these names get, if a launch gives no other values."""
        return {f"{name}_strides": each for name, each in self.strides.items()} | {
            "n_inner": self.inner, "n_batches": self.n_batches, "n_heads": self.n_heads, "group": self.group,
            "n_queries": self.n_queries, "n_keys": self.n_keys, "left": self._left or 0, "right": self._right or 0,
            "offset": self._offset, "scale": float(self.how.scale), "cap": float(self.how.softcap or 1.0),
        }  # fmt: skip

    def prepare(
        self, kernel: Any, programs: int, tiles: Tiles, tensors: Tensors, values: Mapping[str, Any] | None = None,
        *, own: Tensors | None = None, plan: Any = None, capped: bool = False, **fields: Any,
    ) -> Launch:  # fmt: skip
        """As `launch`, of a kernel by tiles. plan: whose the tiles are; themselves if None. fields: of the spec.

        capped: whether finding tiles that a mask hides may take no more registers than visiting all.
        """
        ragged = self.n_keys % tiles.block_n != 0
        spec = replace(self.spec, block_m=tiles.block_m, block_n=tiles.block_n, ragged=ragged, **fields)
        options: dict[str, Any] = {"num_warps": tiles.num_warps, "num_stages": tiles.num_stages}
        if capped and spec.skips:  # no fewer programs are to be resident
            options["registers_of"] = {"K": replace(spec, skips=False)}
        return self.launch(kernel, programs, spec, tensors, values or {}, own=own, plan=plan or tiles, **options)

    def launch(
        self, kernel: Any, programs: int, spec: Any, tensors: Tensors, values: Mapping[str, Any], *, plan: Any,
        own: Tensors | None = None, maps: Mapping[str, Any] | None = None, **options: Any,
    ) -> Launch:  # fmt: skip
        """A launch whose arguments are found by the names of the kernel's parameters.

        `q_ptr` is the tensor q, and `q_map` its descriptor among maps; None if a call goes without. All others are
        numbers: values, or the call's own. own: tensors that do not belong to the pass; `run` gets them after those
        that do.
        """
        numbers, places = self.numbers | dict(values), {name: i for i, name in enumerate(tensors)}
        by_kind = {"_ptr": {**tensors, **(own or {})}, "_map": maps or {}}
        given: list[Any] = []
        scalars, taken = [], []
        for parameter in kernel.arg_names:
            name, kind = parameter[:-4], parameter[-4:]
            if kind in by_kind:
                given.append(by_kind[kind].get(name))
                if given[-1] is not None and name not in (own or ()):
                    taken.append(places[name])
            elif parameter != "K":
                scalars.append(numbers[parameter])
        run = launch.prepare(
            kernel, programs, tuple(given), tuple(scalars), {"K": spec}, device=self.device, plan=plan, **options
        )
        return Launch(run, itemgetter(*taken))

    def of(self, name: str, tensor: Tensor) -> Tensor:
        """A tensor as the launches take it."""
        ready = self.ready.get(name)
        return tensor if ready is None else ready(tensor)

    def readied(self, given: tuple[Tensor | None, ...]) -> tuple[Any, ...]:
        """A call's tensors, in the order of Inputs, as the launches take them."""
        if not self.ready:
            return given
        return tuple(each if each is None else self.of(name, each) for name, each in zip(NAMES, given, strict=True))


def _loads_as_it_lies(tensor: Tensor) -> bool:
    """Whether kernels load rows as they lie; otherwise they get a copy. 16-bit rows are loaded as vectors."""
    if (tensor.stride(-1) != 1 and tensor.shape[-1] > 1) or tensor.stride(-2) >= _MOST_STRIDE:
        return False
    steps = [step for n, step in zip(tensor.shape[:-1], tensor.stride()[:-1], strict=True) if n > 1]
    whole = tensor.data_ptr() % 16 == 0 and not any(step % _VECTOR for step in steps)
    return whole or tensor.element_size() != 2


def _copied(tensor: Tensor) -> Tensor:
    """A contiguous copy, which begins where memory is aligned."""
    return tensor.clone(memory_format=torch.contiguous_format)


def _expanded(shape: tuple[int, ...], tensor: Tensor) -> Tensor:
    return tensor.expand(shape).contiguous()


def widened(tensor: Tensor) -> Tensor:
    """A tensor whose last dim is a whole number of vectors, with zeros at its end."""
    return torch.nn.functional.pad(tensor, (0, -tensor.shape[-1] % _VECTOR))


@dataclass(eq=False, kw_only=True)
class Pass:
    """A pass that is to be prepared, for tensors like those given. gpu: as `Call` has it."""

    given: Inputs
    how: Attention
    gpu: Device | None = None

    @cached_property
    def widens(self) -> bool:
        """Whether heads of 16 bits are widened: loading rows by elements takes long, and ptxas makes mistakes with it.

        `plan.tiles.blocks_of` says how.
        """
        query, value = self.given.query, self.given.value
        return query.element_size() == 2 and any(each.shape[-1] % _VECTOR for each in (query, value))

    @cached_property
    def given_wide(self) -> Inputs:
        given = self.given
        if not self.widens:
            return given
        return given._replace(query=widened(given.query), key=widened(given.key), value=widened(given.value))

    @cached_property
    def call(self) -> Call:
        return Call(self.given_wide, self.how, gpu=self.gpu)

    @cached_property
    def tensors(self) -> dict[str, Tensor | None]:
        """By name, as the launches take them."""
        raise NotImplementedError


@dataclass(frozen=True)
class Made:
    """Makes empty results. Column sums begin at 0."""

    stats: tuple[str, ...]
    columns: tuple[int, ...]
    device: torch.device
    of_output: Callable[[], Tensor]
    of_rows: Callable[[], Tensor]

    def __call__(self) -> Results:
        stats = self.stats
        if not stats:
            return Results(self.of_output(), self.of_rows(), None, None, None)
        entropy, row_max = (self.of_rows() if each in stats else None for each in ("entropy", "row_max"))
        asks_sums = "column_sums" in stats
        sums = torch.zeros(self.columns, dtype=torch.float32, device=self.device) if asks_sums else None
        return Results(self.of_output(), self.of_rows(), entropy, row_max, sums)


@dataclass(eq=False, kw_only=True)
class Forward(Pass):
    """A forward pass. with_lse: whether lse is asked for, by the caller or a gradient."""

    with_lse: bool = True

    @cached_property
    def made(self) -> Made:
        c, device = self.call, self.given.query.device
        columns = (*c.lead, c.n_heads, c.n_keys)
        of_output, of_rows = maker((*c.rows, c.value_dim), c.dtype, device), maker(c.rows, torch.float32, device)
        return Made(c.how.stats, columns, device, of_output, of_rows)

    @cached_property
    def tensors(self) -> dict[str, Tensor | None]:
        """The inputs and the results, by name, as the launches take them."""
        inputs = dict(zip(NAMES, self.call.readied(self.given_wide), strict=True))
        return inputs | dict(zip(RESULTS, self.made(), strict=True))


@dataclass(eq=False, kw_only=True)
class Backward(Pass):
    """A backward pass: the gradients that are wanted, by those of the output and, if it has one, of lse."""

    do: Tensor
    dlse: Tensor | None
    output: Tensor
    lse: Tensor
    wanted: Wanted

    @cached_property
    def do_wide(self) -> Tensor:
        return widened(self.do) if self.widens else self.do

    @cached_property
    def call(self) -> Call:
        return Call(self.given_wide, self.how, self.do_wide, gpu=self.gpu)

    @cached_property
    def tensors(self) -> dict[str, Tensor | None]:
        """By name, as the launches take them; the output is contiguous."""
        output = self.output.contiguous()
        found = dict(zip(NAMES, self.call.readied(self.given_wide), strict=True))
        found |= {"do": self.call.of("do", self.do_wide), "o": widened(output) if self.widens else output}
        return found | {"lse": self.lse, "dlse": self.dlse}

    @cached_property
    def beside(self) -> dict[str, Any]:
        return {"mask": self.given.attn_mask, "bias": self.given.bias}

    @cached_property
    def wanted_beside(self) -> list[str]:
        """Which of mask and bias have a gradient."""
        wanted = {"mask": self.wanted.attn_mask, "bias": self.wanted.bias}
        return [name for name, wants in wanted.items() if wants]

    @cached_property
    def full_beside(self) -> list[str]:
        """Those that are broadcast over nothing, so that their gradient is dS."""
        return [name for name in self.wanted_beside if self.call.patterns[name].full]
