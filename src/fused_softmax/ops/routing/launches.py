"""Prepared launches of routing and of its gradient: one each, whatever is asked for."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from fused_softmax.core import launch, workspace
from fused_softmax.core.calls import allocator, kept
from fused_softmax.core.device import device_of
from fused_softmax.core.launched import Launched, compose, of_rows
from fused_softmax.core.runner import has_ptx
from fused_softmax.ops.routing.kernels.spec import BESIDE, LANES, RouteSpec
from fused_softmax.ops.routing.options import Routing
from fused_softmax.ops.routing.plan import RoutePlan, plan_route

MOST_EXPERTS, MOST_K = 4096, 64
MOST_ROWS = 2**30  # kernels number rows in 32 bits
MOST_GROUPS, MOST_GROUP_TILES = LANES, 64  # each group has a lane, and its experts begin with a tile of their own
HELD = 16  # tiles of experts up to which registers hold the sums of a program; with more it reads its rows again
COPIES = 4  # of the slots of all rows: 16384 x 256 with losses 17.5 us, by one copy 18.7, by 16 19.3
_SUMS = 3  # the use of slots
_UNIT_BITS = 40  # binary places of a sum of probabilities, for up to 2 ** 22 rows


class RouteRows(NamedTuple):
    """Rows of a router as kernels read them: [n_rows, n_experts] with a row's experts side by side, [n_experts], ..."""

    x: Tensor
    bias: Tensor | None
    noise: Tensor | None
    indices: Tensor | None
    row_mask: Tensor | None


class RoutedRows(NamedTuple):
    """What kernels find of rows; None for what is not asked for.

    states: float32 [n_rows, 2 or 3]: m and s of each row, and the sum of its scores, if these are not softmax's. s is 0
        in a row that is not routed.
    of_sequences: int32 [n_sequences, n_experts], the counts of each.
    shares: float32: 1 / rows, 1 / sequences, and for each sequence n_experts / (rows ** 2 * k). With examples they have
        a row for each.
    """

    weights: Tensor
    indices: Tensor
    counts: Tensor | None
    prob_sums: Tensor | None
    aux_loss: Tensor | None
    z_loss: Tensor | None
    dense: Tensor | None
    states: Tensor | None
    of_sequences: Tensor | None
    shares: Tensor | None


class OfResults(NamedTuple):
    """The gradients of results; None where there is none."""

    weights: Tensor | None
    prob_sums: Tensor | None
    aux_loss: Tensor | None
    z_loss: Tensor | None
    dense: Tensor | None


def refused_sizes(n_rows: int, n_experts: int, options: Routing) -> str:
    """Why kernels do not take rows; "" if they do."""
    if not n_rows:
        return "there are no rows"
    if n_rows > MOST_ROWS:
        return f"no kernel has more than {MOST_ROWS} rows"
    if n_experts > MOST_EXPERTS or options.k > MOST_K:
        return f"no kernel has more than {MOST_EXPERTS} experts, or a k of more than {MOST_K}"
    size = n_experts // options.n_groups
    if options.grouped and (options.n_groups > MOST_GROUPS or options.n_groups * -(-size // LANES) > MOST_GROUP_TILES):
        return f"no kernel has {options.n_groups} groups of {size} experts"
    return ""


def rows_of_call(logits: Tensor, options: Routing) -> RouteRows:
    """The tensors of a call as kernels read them."""
    return read(logits, options.bias, options.noise, options.indices, options.row_mask)


def read(
    logits: Tensor, bias: Tensor | None, noise: Tensor | None, indices: Tensor | None, row_mask: Tensor | None
) -> RouteRows:
    return RouteRows(
        _rows(logits),
        None if bias is None else bias.contiguous(),
        None if noise is None else _rows(noise),
        None if indices is None else indices.reshape(-1, indices.shape[-1]).contiguous(),
        None if row_mask is None else row_mask.reshape(-1).contiguous(),
    )


def _rows(x: Tensor) -> Tensor:
    rows = x if x.ndim == 2 else x.reshape(-1, x.shape[-1])
    return rows if rows.shape[1] == 1 or rows.stride(1) == 1 else rows.contiguous()


def forward(given: RouteRows, options: Routing, states: bool) -> RoutedRows:
    """Route rows. states: whether a gradient may need those of every row."""
    return kept("routed", (*options.key, states), given, prepare_route, given, options, states)(*given)


def prepare_route(given: RouteRows, options: Routing, states: bool, plan: RoutePlan | None = None) -> Launched:
    """What routes rows like these: call(*given) -> RoutedRows."""
    from fused_softmax.ops.routing.kernels.forward import _route

    (n_rows, n_experts), device = given.x.shape, given.x.get_device()
    asked = replace(options, bias=None, noise=None, indices=None, row_mask=None)  # a kept call holds no tensor
    planned = _planning(n_experts, device, asked)
    plan = plan or planned(n_rows)
    spec = _spec(given, options, plan, options.sums)
    keeps = (options.sums and not spec.held) or (states and spec.totals)
    outputs = _Outputs(asked, spec, keeps, given.x.device, allocator(given.x.device))
    like = _arranged(given, *outputs.of(plan))
    names = [name for name in _route.arg_names if name != "K" and not name.endswith("_ptr")]
    scalars = _scalars(plan) | {
        "x_row_stride": given.x.stride(0), "noise_row_stride": 0 if given.noise is None else given.noise.stride(0),
        "dense_row_stride": n_experts, "n_turns": options.k, "scale": float(options.scale), "unit": _unit(n_rows),
    }  # fmt: skip
    launched = launch.prepare(
        _route, plan.programs, like, [scalars[name] for name in names], {"K": spec}, device=device,
        num_warps=plan.num_warps, plan=plan,
        **({"most_registers": plan.registers} if plan.registers and has_ptx(device) else {}),
    )  # fmt: skip
    there = [i for i, each in enumerate(like) if each is not None]

    def for_rows(m: int, of: int) -> Any:
        n = n_rows // of * m
        if n > MOST_ROWS:
            return None
        other = planned(n)
        if other.rows != plan.rows or _unit(n) != _unit(n_rows) or n % other.length:
            return None
        again = launched.again(
            other.programs, {names.index(name): value for name, value in _scalars(other).items() if name in names}
        )
        return again and _calling(outputs, other, again, there)

    return Launched(_calling(outputs, plan, launched.__call__, there), for_rows, by_row=True)


def _planning(n_experts: int, device: int, asked: Routing) -> Callable[[int], RoutePlan]:
    """plan(n_rows), for calls like one."""
    facts, length, sums = device_of(device), asked.length, asked.sums
    held = _held_tiles(n_experts, asked) if sums else 0
    return lambda n_rows: plan_route(n_rows, n_experts, length(n_rows), facts, sums, held)


def _calling(outputs: "_Outputs", plan: RoutePlan, launch: Callable[..., None], there: list[int]) -> Any:
    """call(*given) of a plan. there: the places of the tensors that the launch takes."""
    asked, unit = outputs.asked, _unit(plan.n_rows)

    def call(*given):
        rows, between = outputs.of(plan)
        tensors = _arranged(given, rows, between)
        launch(*[tensors[i] for i in there])
        return _of_examples(rows, between, asked.examples, unit) if asked.sums and asked.examples else rows

    return call


class Between(NamedTuple):
    """What programs leave for each other, as `Sums` has it."""

    slots: Tensor | None
    all: Tensor | None
    squares: Tensor | None
    balances: Tensor | None


@dataclass(frozen=True)
class _Outputs:
    """Allocates what a launch writes. keeps: whether the states of rows are among it."""

    asked: Routing
    spec: RouteSpec
    keeps: bool
    where: torch.device
    empty: Callable[..., Tensor]

    def of(self, plan: RoutePlan) -> tuple[RoutedRows, Between]:
        asked, spec, empty, n = self.asked, self.spec, self.empty, plan.n_rows
        k, n_experts, n_sequences = spec.k, spec.n_experts, plan.n_rows // plan.length
        rows = RoutedRows(
            empty((n, k), (k, 1), torch.float32),
            empty((n, k), (k, 1), torch.int32),
            empty((n_experts,), (1,), torch.int32) if spec.sums else None,
            empty((n_experts,), (1,), torch.float32) if spec.sums else None,
            empty((), (), torch.float32) if asked.return_aux_loss else None,
            empty((), (), torch.float32) if asked.return_z_loss else None,
            empty((n, n_experts), (n_experts, 1), torch.float32) if asked.dense else None,
            empty((n, spec.states), (spec.states, 1), torch.float32) if self.keeps else None,
            empty((n_sequences, n_experts), (n_experts, 1), torch.int32) if spec.sequences else None,
            empty((2 + n_sequences,), (1,), torch.float32) if spec.sums else None,
        )
        return rows, self._between(plan, n_sequences) if spec.sums else Between(None, None, None, None)

    def _between(self, plan: RoutePlan, n_sequences: int) -> Between:
        stride = 2 * self.spec.n_experts + BESIDE
        of_all = _slots(self.where, self.spec.copies * stride)
        squares = self.empty((plan.programs,), (1,), torch.float32) if self.asked.return_z_loss else None
        if not self.spec.sequences:
            return Between(of_all, None, squares, None)
        of_each = torch.zeros(n_sequences * stride, dtype=torch.int64, device=self.where)
        return Between(of_each, of_all, squares, self.empty((n_sequences,), (1,), torch.float64))


def _arranged(given: tuple, rows: RoutedRows, between: Between) -> tuple[Tensor | None, ...]:
    """The tensors of a launch, in the kernel's order."""
    return (
        *given, rows.weights, rows.indices, rows.dense, rows.states, *between, rows.shares, rows.of_sequences,
        rows.counts, rows.prob_sums, rows.aux_loss, rows.z_loss,
    )  # fmt: skip


def _of_examples(rows: Any, between: Any, n: int, unit: float) -> RoutedRows:
    """With the sums of each of n examples, of what programs left of their sequences."""
    slots, _, squares, balances = between
    n_experts = len(rows.counts)
    slots = slots.view(n, -1, 2 * n_experts + BESIDE)
    routed = slots[..., 2 * n_experts]
    shares = torch.stack([1 / each.sum(1).clamp(min=1).double() for each in (routed, routed > 0)], 1)
    return rows._replace(
        counts=slots[..., n_experts : 2 * n_experts].sum(1, dtype=torch.int32),
        prob_sums=slots[..., :n_experts].sum(1).float() / unit,
        aux_loss=None if rows.aux_loss is None else (balances.view(n, -1).sum(1) * shares[:, 1]).float(),
        z_loss=None if squares is None else (squares.view(n, -1).sum(1, dtype=torch.float64) * shares[:, 0]).float(),
        shares=torch.cat((shares.float(), rows.shares[2:].view(n, -1)), 1),
    )


def _scalars(plan: RoutePlan) -> dict[str, int]:
    return {
        "length": plan.length, "n_parts": plan.parts, "part_rows": plan.part_rows,
        "n_sequences": plan.n_rows // plan.length,
    }  # fmt: skip


def _unit(n_rows: int) -> float:
    """The factor of a probability before it is added as an integer: the sum over n_rows rows does not overflow."""
    return 2.0 ** min(_UNIT_BITS, 62 - n_rows.bit_length())


def _slots(where: torch.device, size: int) -> Tensor:
    if where.type == "cuda":
        return workspace.slots(where.index, 1, size, _SUMS)
    return torch.zeros(size, dtype=torch.int64, device=where)


def _held_tiles(n_experts: int, options: Routing) -> int:
    """The tiles of experts whose sums registers hold; 0 if these are too many."""
    n_groups = options.n_groups if options.grouped else 1
    n_tiles = n_groups * -(-n_experts // n_groups // LANES)
    return n_tiles if n_tiles <= HELD else 0


def _spec(given: RouteRows, options: Routing, plan: RoutePlan, sums: bool) -> RouteSpec:
    compares_scores = options.score_first and (given.bias is not None or options.grouped)
    by_itself = given.bias is None and given.indices is None and not options.grouped
    return RouteSpec(
        n_experts=plan.n_experts, k=options.k, rows=plan.rows, score=options.score, score_first=options.score_first,
        renormalize=options.renormalize, stacks=plan.alone, n_groups=options.n_groups if options.grouped else 1,
        groups_kept=options.groups_kept or 1, top2=options.group_score == "top2",
        packed=given.x.element_size() == 2 and given.noise is None and by_itself,
        of_scores=compares_scores and given.indices is None, elsewhere=not by_itself, totals=options.totals, sums=sums,
        held=sums and _held_tiles(plan.n_experts, options) > 0, sequences=options.in_sequences,
        copies=1 if options.in_sequences else COPIES, sum_rows=plan.sum_rows, sum_cols=plan.sum_cols,
        sum_ids=LANES * plan.num_warps, aligned=given.x.stride(0) % 8 == 0,
    )  # fmt: skip


def backward(given: RouteRows, rows: RoutedRows, of_results: OfResults, options: Routing) -> Tensor:
    """The gradient of the logits [n_rows, n_experts]. rows: what `forward` found, less what it does not need."""
    if options.examples is None or not options.sums:
        return _backward(given, rows, of_results, options)
    shares, counts, states = (cast("Tensor", each) for each in (rows.shares, rows.counts, rows.states))
    d = of_results._replace(z_loss=None)
    if d.prob_sums is not None or d.aux_loss is not None:  # each sequence's prices, as if they were its counts
        counts = counts.view(len(shares), -1, counts.shape[-1])
        of_counts = 0 if d.aux_loss is None else (d.aux_loss[:, None] * shares[:, 1:2] * shares[:, 2:])[..., None]
        prices = of_counts * counts + (0.0 if d.prob_sums is None else d.prob_sums[:, None])
        ones = shares.new_ones(2 + counts.shape[:2].numel())
        rows, d = rows._replace(counts=prices, shares=ones), d._replace(prob_sums=None, aux_loss=ones[0])
    dx = _backward(given, rows, d, options)
    if of_results.z_loss is None:
        return dx
    # The kernel takes one gradient of the z-loss for all rows.
    x = given.x.float() + (0.0 if given.noise is None else given.noise.float())
    m, total = states[:, :1], states[:, 1:2]
    lse = m + torch.where(total > 0, total, 1.0).log()
    slope = (2 * of_results.z_loss * shares[:, 0]).repeat_interleave(len(x) // len(shares))[:, None] * lse
    return torch.where(total > 0, dx + slope * (x - lse).exp(), dx).to(dx.dtype)


def _backward(given: RouteRows, rows: RoutedRows, of_results: OfResults, options: Routing) -> Tensor:
    of_results = OfResults(*[each if each is None else each.contiguous() for each in of_results])
    tensors = given.x, given.noise, *of_results, rows.weights, rows.states
    call = kept("route_gradient", options.key, tensors, prepare_gradient, given, rows, of_results, options)
    return call(given, rows, of_results)


def prepare_gradient(
    given: RouteRows, rows: RoutedRows, of_results: OfResults, options: Routing, plan: RoutePlan | None = None
) -> Launched:
    """What writes the gradient of rows like these: call(given, rows, of_results) -> dx."""
    from fused_softmax.ops.routing.kernels.gradient import _route_gradient

    x, noise = given.x, given.noise
    (n_rows, n_experts), device, empty, dtype = x.shape, x.get_device(), allocator(x.device), x.dtype
    of_sums = of_results.prob_sums, of_results.aux_loss, of_results.z_loss
    of_weights = of_results.weights is not None or of_results.dense is not None
    everywhere = of_weights and options.score == "softmax" and options.score_first and not options.renormalize
    full = everywhere or any(each is not None for each in of_sums)
    plan = plan or plan_route(n_rows, n_experts, options.length(n_rows), device_of(device), sums=full, gradient=True)
    spec = RouteSpec(
        n_experts=n_experts, k=options.k, rows=plan.rows, score=options.score, score_first=options.score_first,
        renormalize=options.renormalize, stacks=plan.alone, full=full, priced=of_results.aux_loss is not None,
        sequences=options.in_sequences,
    )  # fmt: skip

    def arranged(given: RouteRows, rows: RoutedRows, d: OfResults) -> tuple[Tensor | None, ...]:
        counts = rows.counts if rows.of_sequences is None else rows.of_sequences
        n = len(given.x)
        return (
            given.x, given.noise, rows.weights, rows.indices, rows.states, counts, rows.shares, d.weights, d.dense,
            d.prob_sums, d.aux_loss, d.z_loss, empty((n, n_experts), (n_experts, 1), dtype),
        )  # fmt: skip

    like = arranged(given, rows, of_results)
    names = [name for name in _route_gradient.arg_names if name != "K" and not name.endswith("_ptr")]
    scalars = _scalars(plan) | {
        "x_row_stride": x.stride(0), "noise_row_stride": 0 if noise is None else noise.stride(0),
        "dx_row_stride": n_experts, "scale": float(options.scale),
    }  # fmt: skip
    launched = launch.prepare(
        _route_gradient, plan.programs, like, [scalars[name] for name in names], {"K": spec}, device=device,
        num_warps=plan.num_warps, plan=plan,
    )  # fmt: skip
    there = [i for i, each in enumerate(like) if each is not None]

    def for_rows(n: int) -> Any:
        other = plan_route(n, n_experts, options.length(n), device_of(device), sums=full, gradient=True)
        if other.rows != plan.rows or n % other.length:
            return None
        return launched.again(
            other.programs, {names.index(name): value for name, value in _scalars(other).items() if name in names}
        )

    def build(_, launch):
        def call(given, rows, of_results):
            tensors = arranged(given, rows, of_results)
            launch(*[tensors[i] for i in there])
            return tensors[-1]

        return call

    return compose(build, of_rows(launched, for_rows, n_rows), n=n_rows, by_row=True)
