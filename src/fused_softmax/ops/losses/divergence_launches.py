"""Prepared launches of the divergences of pairs of rows, and of their gradient.

A row has the same bits in any batch: see `plan_alone`. The gradient has no sums.
"""

from dataclasses import replace
from functools import partial
from operator import itemgetter
from typing import Any, NamedTuple

import torch
from torch import Tensor

from fused_softmax.core.calls import allocator, kept
from fused_softmax.core.device import device_of
from fused_softmax.core.launch import together
from fused_softmax.core.launched import Launched, compose
from fused_softmax.core.plan import RowPlan, plan_alone, plan_pairs, plan_reduction
from fused_softmax.core.runner import IN_TURN, prepare, spec_of
from fused_softmax.ops.losses.kernels.spec import PairNumbers, PairSpec
from fused_softmax.ops.losses.launches import blocks_of, picked_of
from fused_softmax.ops.losses.options import Divergence

NUMBERS = PairNumbers._fields
GRADIENT = "divergence_gradient"  # the name by which it is kept
_MERGED = 32  # rows that a program merges
BESIDES = 32  # registers of a thread besides those that hold a pair
# As `runner.IN_TURN`, for two exchanges.
IN_TURN_TWICE: tuple[dict[str, bool], ...] = (
    {"collect": False},
    {"publish": False, "collect_shares": False},
    {"publish": False, "publish_shares": False},
)


class Pair(NamedTuple):
    """Rows [n, n_classes] of a student and of a teacher, temperatures of rows [n] or None, and weights of classes."""

    x: Tensor
    y: Tensor
    weight: Tensor | None = None
    temperature: Tensor | None = None
    target_temperature: Tensor | None = None


OF_PAIR = len(Pair._fields)


class PairRows(NamedTuple):
    """Of every row [n], float32: both states, the divergence, and `total`, what its gradient takes of the whole row."""

    m: Tensor
    ls: Tensor
    m_t: Tensor | None
    ls_t: Tensor | None
    value: Any  # a Tensor, or None for the gradient, which does not need it
    total: Tensor


def in_vectors(x: Tensor, other: Tensor) -> Tensor:
    """Rows, of which each starts where vectors of both tensors do, if rows are a whole number of vectors."""
    vector = 16 // min(x.element_size(), other.element_size())
    rows = x if x.shape[1] <= 1 or x.stride(1) == 1 else x.contiguous()
    return rows if x.shape[1] % vector or _even(rows, vector) else rows.clone(memory_format=torch.contiguous_format)


def _even(rows: Tensor, vector: int) -> bool:
    """Whether each row starts where a vector of so many elements does."""
    return rows.data_ptr() % 16 == 0 and (len(rows) == 1 or rows.stride(0) % vector == 0)


def forward(pair: Pair, asked: Divergence) -> PairRows:
    """The divergences of rows that lie `in_vectors`."""
    call = kept("divergences", asked.key, pair, prepare_forward, pair, asked)
    return call(pair, asked.numbers)


def _itemsize(pair: Pair) -> int:
    return min(pair.x.element_size(), pair.y.element_size())


def vector_of(pair: Pair) -> int:
    """The number of columns in a vector of 16 bytes of the smaller dtype."""
    return 16 // _itemsize(pair)


def kind_of(pair: Pair, asked: Divergence) -> dict[str, Any]:
    """The fields of a PairSpec that the options decide, and what stands beside the rows."""
    kind = asked.fields() | {"weighted": pair.weight is not None}
    kind["scaled"] |= pair.temperature is not None
    kind["target_scaled"] |= pair.target_temperature is not None
    return kind


def _spec(pair: Pair, asked: Divergence, plan: RowPlan) -> PairSpec:
    device = pair.x.get_device()
    spec = spec_of(PairSpec, plan, torch.float32, device, itemsize=_itemsize(pair), **kind_of(pair, asked))
    return replace(spec, pieces=1, full_pieces=0, axis=1, itemsize=_itemsize(pair))


def prepare_forward(pair: Pair, asked: Divergence, states: bool = True) -> Launched:
    """What runs the kernels on tensors like these: call(pair, numbers) -> PairRows.

    states: whether more than the divergences is read of these, such as by a gradient.
    """
    from fused_softmax.ops.losses.kernels.divergence import _merge_pairs, _merge_sums, _pair_states, _pair_sums

    x, device = pair.x, pair.x.get_device()
    n_rows, n_cols = x.shape
    empty = allocator(x.device)
    plan = plan_alone(n_rows, n_cols, _itemsize(pair), device_of(device))
    spec, parts = _spec(pair, asked, plan), plan.parts

    def of_row(n):
        return empty((n,), (1,), torch.float32)

    def rows_of(n):
        if not states and not asked.twice:
            rest = of_row(n)  # which nobody reads, so that one has all of it
            m_t = rest if asked.target_is == "logits" else None
            return PairRows(rest, rest, m_t, m_t, of_row(n), rest)
        m_t, ls_t = (of_row(n), of_row(n)) if asked.target_is == "logits" else (None, None)
        return PairRows(of_row(n), of_row(n), m_t, ls_t, of_row(n), of_row(n))

    def of_parts(numbers, n):
        return empty((numbers, n, parts), (n * parts, parts, 1), torch.float32)

    def states_of(n):
        return of_parts(5, n) if parts > 1 else None

    def arranged(pair, rows, states, sums):
        return *pair, states, *rows, sums

    sums_up = asked.twice and not asked.shard  # sums are by whole rows' states
    sums_of = partial(of_parts, 2) if sums_up else lambda n: None
    names = (*Pair._fields, "states", *PairRows._fields, "sums")
    given = arranged(pair, rows_of(n_rows), states_of(n_rows), sums_of(n_rows))
    tensors = dict(zip(names, given, strict=True))
    values = dict(zip(NUMBERS, asked.numbers, strict=True))
    merging = replace(spec, block_rows=_MERGED, block_cols=1)
    of_blocks = {"programs": partial(blocks_of, _MERGED), "num_warps": 1}
    kernels: list[tuple[Any, PairSpec, dict[str, Any]]] = [(_pair_states, spec, {})]
    if parts > 1:
        kernels.append((_merge_pairs, merging, of_blocks))
    if sums_up:
        kernels += [(_pair_sums, spec, {}), (_merge_sums, merging, of_blocks)]
    preparing, places = [], []
    for kernel, of_kernel, how in kernels:
        numbers = NUMBERS if "factor" in kernel.arg_names else ()
        how |= {"device": device, "numbers": numbers}
        preparing.append(partial(prepare, kernel, plan, of_kernel, tensors, values, **how))
        pointers = [names.index(name[:-4]) for name in kernel.arg_names if name.endswith("_ptr")]
        places.append((itemgetter(*[i for i in pointers if given[i] is not None]), bool(numbers)))

    def build(n, *launches):
        def call(pair, numbers):
            rows = rows_of(n)
            tensors = arranged(pair, rows, states_of(n), sums_of(n))
            for launch, (of_kernel, numbered) in zip(launches, places, strict=True):
                launch(*of_kernel(tensors), *(numbers if numbered else ()))
            return rows

        return call

    return compose(build, *together(*preparing), n=n_rows, by_row=True)


def plan_held(pair: Pair) -> RowPlan | None:
    """The plan of a launch that holds rows until their gradient is written; None if there is none.

    It is for rows that lie `in_vectors`. Rows that are not a whole number of vectors stay where they are, on any
    boundary.
    """
    n_rows, n_cols = pair.x.shape
    if n_cols % vector_of(pair):
        return None
    itemsize = max(pair.x.element_size(), pair.y.element_size())
    return plan_pairs(n_rows, n_cols, itemsize, device_of(pair.x.get_device()))


def at_once(
    pair: Pair, dvalue: Tensor | None, share: float, asked: Divergence, of_target: bool
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(the divergences of rows that lie `in_vectors`, and the gradients as `backward` gives them), in one launch.

    Only for rows that have a `plan_held`. dvalue: float32, contiguous; None for ones. share: a factor of all rows.
    """
    key, tensors = (*asked.key, of_target), (*pair, dvalue)
    call = kept("divergences_at_once", key, tensors, prepare_at_once, pair, dvalue, asked, of_target)
    return call(pair, dvalue, (*asked.numbers, share))


def prepare_at_once(pair: Pair, dvalue: Tensor | None, asked: Divergence, of_target: bool) -> Launched:
    """What writes divergences and gradients: call(pair, dvalue, numbers and share) -> as `at_once`."""
    from fused_softmax.ops.losses.kernels.divergence_held import _pair_held

    device, plan = pair.x.get_device(), plan_held(pair)
    assert plan is not None
    kind = kind_of(pair, asked)
    spec = spec_of(PairSpec, plan, torch.float32, device, itemsize=plan.itemsize, **kind)
    spec = replace(spec, itemsize=_itemsize(pair))
    if plan.strategy == "split":
        plan = replace(plan, copies=plan.copies * spec.messages)  # of slots
    names = (*Pair._fields, "dx", "dy", "dvalue", "value")
    empty, n_cols = allocator(pair.x.device), pair.x.shape[1]
    dtype, dtype_of_target = pair.x.dtype, pair.y.dtype if of_target else None

    def written(n):
        dy = None if dtype_of_target is None else empty((n, n_cols), (n_cols, 1), dtype_of_target)
        return empty((n,), (1,), torch.float32), empty((n, n_cols), (n_cols, 1), dtype), dy

    def arranged(pair, dvalue, value, dx, dy):
        return *pair, dx, dy, dvalue, value

    given = arranged(pair, dvalue, *written(plan.n_rows))
    tensors = dict(zip(names, given, strict=True))
    numbers = *NUMBERS, "share"
    values = dict(zip(numbers, (*asked.numbers, 1.0), strict=True))
    launched = prepare(
        _pair_held, plan, spec, tensors, values, device=device, numbers=numbers,
        besides=BESIDES, turns=IN_TURN_TWICE if spec.twice else IN_TURN,
    )  # fmt: skip
    order = [names.index(name[:-4]) for name in _pair_held.arg_names if name.endswith("_ptr") and name != "slots_ptr"]
    places = itemgetter(*[i for i in order if given[i] is not None])

    def build(n, launch):
        def call(pair, dvalue, numbers):
            found = written(n)
            launch(*places(arranged(pair, dvalue, *found)), *numbers)
            return found

        return call

    return compose(build, launched, n=plan.n_rows, by_row=True)


def gradient_of_rows(dvalue: Tensor) -> Tensor:
    """An incoming gradient as kernels take it, which no guard looks at: float32, contiguous, from 16 bytes on."""
    dvalue = dvalue.to(torch.float32).contiguous()
    return dvalue.clone() if dvalue.data_ptr() % 16 else dvalue


def backward(
    pair: Pair, rows: PairRows, dvalue: Tensor, asked: Divergence, of_target: bool = False, dx: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """(the gradient by the student's rows, that of "cross" by the teacher's probabilities, if it is wanted).

    dx: where the first is written; it may be these rows, and is new if not given.
    """
    x, y = pair.x, pair.y
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device) if dx is None else dx
    dy = torch.empty(y.shape, dtype=y.dtype, device=y.device) if of_target else None
    dvalue = gradient_of_rows(dvalue)
    given = (*pair, dx, dy)
    call = kept(GRADIENT, asked.key, given, _prepare_gradient, pair, rows, dvalue, dx, dy, asked)
    call(pair, rows, dvalue, dx, dy, asked.numbers)
    return dx, dy


def _prepare_gradient(
    pair: Pair, rows: PairRows, dvalue: Tensor, dx: Tensor, dy: Tensor | None, asked: Divergence
) -> Launched:  # fmt: skip
    """What writes gradients: call(pair, rows, dvalue, dx, dy, numbers)."""
    from fused_softmax.ops.losses.kernels.divergence import _pair_gradient

    x, y, device = pair.x, pair.y, pair.x.get_device()
    n_rows, n_cols = x.shape
    vector = 16 // _itemsize(pair)  # of the wider one of both, and of dx, more than 16 bytes
    alike = n_cols % vector == 0 and all(_even(each, vector) for each in (x, y, dx))
    plan = plan_reduction(
        n_rows, n_cols, _itemsize(pair), device_of(device), alignment="even" if alike else "scalar", writes=True,
        capped=asked.softcap is not None,
    )  # fmt: skip
    spec = replace(_spec(pair, asked, plan), tile=True)
    names = (*Pair._fields, "dx", "dy", "m", "ls", "m_t", "ls_t", "total", "dvalue")

    def arranged(pair, rows, dvalue, dx, dy):
        return *pair, dx, dy, rows.m, rows.ls, rows.m_t, rows.ls_t, rows.total, dvalue

    given = arranged(pair, rows, dvalue, dx, dy)
    tensors = dict(zip(names, given, strict=True))
    values = dict(zip(NUMBERS, asked.numbers, strict=True))
    launched = prepare(_pair_gradient, plan, spec, tensors, values, device=device, numbers=NUMBERS)
    order = [names.index(name[:-4]) for name in _pair_gradient.arg_names if name.endswith("_ptr")]
    picked = picked_of([given[i] for i in order])

    def build(_, launch):
        def call(pair, rows, dvalue, dx, dy, numbers):
            tensors = arranged(pair, rows, dvalue, dx, dy)
            launch(*picked([tensors[i] for i in order]), *numbers)

        return call

    return compose(build, launched, n=n_rows, by_row=True)


def shard_sums(pair: Pair, rows: PairRows, asked: Divergence) -> Tensor:
    """[2, n]: what a shard adds to jsd or tvd, and to what their gradient takes, given the states of whole rows.

    The shard's rows lie `in_vectors`.
    """
    tensors = *pair, *rows[:4]
    call = kept("divergences of shards", asked.key, tensors, _prepare_sums, pair, rows, asked)
    return call(pair, rows, asked.numbers)


def _prepare_sums(pair: Pair, rows: PairRows, asked: Divergence) -> Launched:
    """call(pair, rows, numbers) -> [2, n]"""
    from fused_softmax.ops.losses.kernels.divergence import _merge_sums, _pair_sums

    x, device = pair.x, pair.x.get_device()
    n_rows, n_cols = x.shape
    empty = allocator(x.device)
    plan = plan_alone(n_rows, n_cols, _itemsize(pair), device_of(device))
    spec, parts = _spec(pair, asked, plan), plan.parts
    found = empty((2, n_rows), (n_rows, 1), torch.float32)
    sums = empty((2, n_rows, parts), (n_rows * parts, parts, 1), torch.float32)
    tensors = {**pair._asdict(), **rows._asdict(), "sums": sums, "value": found[0], "total": found[1]}
    values = dict(zip(NUMBERS, asked.numbers, strict=True))
    names = [name[:-4] for name in _pair_sums.arg_names if name.endswith("_ptr")]
    picked = picked_of([tensors[name] for name in names])
    merging = replace(spec, block_rows=_MERGED, block_cols=1)
    programs = partial(blocks_of, _MERGED)
    add, merge = together(
        partial(prepare, _pair_sums, plan, spec, tensors, values, device=device, numbers=NUMBERS),
        partial(prepare, _merge_sums, plan, merging, tensors, {}, device=device, programs=programs, num_warps=1),
    )

    def call(pair, rows, numbers):
        sums = empty((2, n_rows, parts), (n_rows * parts, parts, 1), torch.float32)
        found = empty((2, n_rows), (n_rows, 1), torch.float32)
        add(*picked((pair.x, pair.y, *pair[3:], *rows[:4], sums)), *numbers)
        merge(sums, found[0], found[1])
        return found

    return Launched(call)
