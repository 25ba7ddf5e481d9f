"""Which way each call goes, and why: `explain()`, which listens while it is open and leaves nothing behind.

While nobody listens, no line of this file runs. While somebody does, the functions that a first call goes through have
listeners in their place, and no call is found or kept, so that every call is a first one: it is routed, planned and
prepared in the open. What was compiled stays compiled.
"""

import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from itertools import groupby
from typing import Any, NamedTuple

import torch
from torch import Tensor
from triton import knobs

from fused_softmax.core import calls, launch, no_gradient, route
from fused_softmax.core.route import Decision, Route
from fused_softmax.ops.attention import attention
from fused_softmax.ops.attention import ways as attention_ways
from fused_softmax.ops.losses import (
    cross_entropy,
    divergence,
    linear_cross_entropy,
    linear_divergence,
    linear_log_prob,
    linear_pairs,
    log_prob,
)
from fused_softmax.ops.routing import dtensor as routing_of_shards
from fused_softmax.ops.routing import route as routing
from fused_softmax.ops.sampling import filters as sampling_filters
from fused_softmax.ops.sampling import sample as sampling
from fused_softmax.ops.sampling import speculative
from fused_softmax.ops.segments import segments
from fused_softmax.ops.softmax import logsumexp, softmax
from fused_softmax.register import library, patch
from fused_softmax.register import pyg as of_pyg
from fused_softmax.register import trl as of_trl
from fused_softmax.register.table import OPERATORS

KERNEL, OPERATOR, SHARDED, COMPOSED, CUDNN, ATEN, PYG, TRL, NONE = (
    "kernel", "operator", "sharded", "composed", "cuDNN", "ATen", "PyG", "TRL", "none"
)  # fmt: skip
_NAMES = {Route.KERNEL: KERNEL, Route.OPERATOR: OPERATOR, Route.SHARDS: SHARDED, Route.COMPOSED: COMPOSED}

_OVER_A_GROUP = SHARDED, "group= is given: each rank has columns of its own"
_DRAWN = COMPOSED, "sample draws: no kernel of drafts takes this call"

# What a call goes through that is not kept: where it is, the function's name (None: its first argument), and its route
# where that is settled by then.
_CALLS: tuple[tuple[Any, str, str | None, tuple[str, str] | None], ...] = (
    (softmax, "_softmax", None, None),
    (softmax, "_over_group", None, _OVER_A_GROUP),
    (logsumexp, "_logsumexp", "logsumexp", None),
    (logsumexp, "_over_group", "logsumexp", _OVER_A_GROUP),
    (cross_entropy, "_cross_entropy", "cross_entropy", None),
    (cross_entropy, "_of_shards", "cross_entropy", _OVER_A_GROUP),
    (linear_cross_entropy, "_linear_cross_entropy", "linear_cross_entropy", None),
    (linear_cross_entropy, "_of_shards", "linear_cross_entropy", _OVER_A_GROUP),
    (log_prob, "_log_prob", "log_prob", None),
    (log_prob, "_of_shards", "log_prob", _OVER_A_GROUP),
    (linear_log_prob, "_linear_log_prob", "linear_log_prob", None),
    (linear_log_prob, "_of_shards", "linear_log_prob", _OVER_A_GROUP),
    (divergence, "_divergence", "divergence", None),
    (divergence, "_of_shards", "divergence", _OVER_A_GROUP),
    (linear_divergence, "_linear_divergence", "linear_divergence", None),
    (linear_divergence, "_of_shards", "linear_divergence", _OVER_A_GROUP),
    (attention, "_attention", "attention", None),
    (routing, "_route", "route", None),
    (routing_of_shards, "rows_of_rank", "route", None),
    (sampling, "_sample", "sample", None),
    (sampling, "sample_of_shards", "sample", _OVER_A_GROUP),
    (speculative, "_speculative", "speculative_sample", None),
    (sampling_filters, "_kept", None, None),
    (sampling_filters, "_penalize", "penalize", None),
    (segments, "_of_segments", None, None),
)
_OPERATORS = {each.name for each in OPERATORS}
_OF_ROOMS = {"losses": "cross_entropy", "sampling": "sample"}  # whose files are not all of their operator's name
_OF_DTENSORS = SHARDED, "an argument is a DTensor"
# What settles the route of the call that it is in, unless it returns None.
_SETTLING: tuple[tuple[Any, str, tuple[str, str]], ...] = (
    (attention, "attention_on_shards", _OF_DTENSORS),
    (cross_entropy, "loss_on_shards", (SHARDED, "the input is a DTensor")),
    (cross_entropy, "loss_of_whole_rows", (SHARDED, "the input is a DTensor")),
    (linear_cross_entropy, "loss_of_whole_rows", _OF_DTENSORS),
    (linear_cross_entropy, "linear_loss_on_shards", _OF_DTENSORS),
    (linear_cross_entropy, "linear_loss_of_probabilities", _OF_DTENSORS),
    (linear_divergence, "linear_divergence_on_shards", _OF_DTENSORS),
    (log_prob, "log_prob_on_shards", (SHARDED, "the input is a DTensor")),
    (linear_log_prob, "linear_log_prob_on_shards", _OF_DTENSORS),
    (divergence, "divergence_on_shards", _OF_DTENSORS),
    (sampling, "draws_on_shards", _OF_DTENSORS),
    (speculative, "draws_on_shards", _OF_DTENSORS),
    (speculative, "_own_tokens", _DRAWN),
    (sampling_filters, "rows_on_shards", _OF_DTENSORS),
    (patch, "loss_as_aten", (SHARDED, "the input is a DTensor")),
)
# What a call goes through whose result has a `reason` to add.
_TELLING: tuple[tuple[Any, str], ...] = ((linear_log_prob, "way_of"), (linear_pairs, "way_of"))


class Taken(NamedTuple):
    """The way that takes a pass of attention, or a part of it.

    of: the pass. name: of the way. refused: of each way that stands before it, by name, why it does not take the pass.
    """

    of: str
    name: str
    refused: dict[str, str]


@dataclass
class Record:
    """One call, or one backward pass.

    function: its name; of a backward pass with "backward" after it, of a call of torch's that `enable()` took with
        "aten::" before it, and of a call of TRL's its name there with all modules.
    shapes: of its tensors, in the order of its arguments; none of a call that a compiler traced.
    route: "kernel", "operator" (of torch.ops.fused_softmax), "sharded", "cuDNN", "composed" (of torch's operations), or
        "ATen" or "PyG" (a call that `enable()` left to it), or "TRL" (one that `trl.apply()` left to it); "none" of a
        call that raised before it had one.
    reason: why it went there.
    ways: of a pass of attention, which way of its table takes it, and why the ones before it do not: in the order in
        which they were asked, each with `of`, `name` and `refused`.
    plan: the frozen records by which its kernels were launched, in the order of their first launch. batch_invariant
        of a RowPlan says whether a row has the same bits in any batch by it.
    kernels: names of this package's kernels in the order of their launches.
    compile_seconds: how long Triton compiled for it; 0.0 if it compiled nothing.
    depth: how many calls it is within.
    """

    function: str
    shapes: tuple[tuple[int, ...], ...] = ()
    route: str = ""
    reason: str = ""
    ways: tuple[Taken, ...] = ()
    plan: tuple[Any, ...] = ()
    kernels: list[str] = field(default_factory=list)
    compile_seconds: float = 0.0
    depth: int = 0

    def __str__(self) -> str:
        indent = "    " * self.depth
        shapes = ", ".join(" x ".join(map(str, shape)) or "one element" for shape in self.shapes)
        lines = [f"{indent}{self.function}{f' ({shapes})' if shapes else ''}: {self.route}, {self.reason}"]
        for each in self.ways:
            lines.append(f"{indent}  {each.of}: by {each.name}")
            lines += [f"{indent}    not by {name}: {why}" for name, why in each.refused.items()]
        for each in self.plan:
            alone = ", by which a row has the same bits in any batch" if getattr(each, "batch_invariant", False) else ""
            lines.append(f"{indent}  plan: {each}{alone}")
        runs = [(name, len(list(run))) for name, run in groupby(self.kernels)]
        if runs:
            lines.append(f"{indent}  kernels: {', '.join(f'{name} x {n}' if n > 1 else name for name, n in runs)}")
        if self.compile_seconds:
            lines.append(f"{indent}  compiled for {self.compile_seconds:.2f} s")
        return "\n".join(lines)


class Explanation(Sequence[Record]):
    """The records of the calls within a `with explain()` block, in the order in which they began."""

    def __init__(self) -> None:
        self.records: list[Record] = []

    def __enter__(self) -> "Explanation":
        _begin(self)
        return self

    def __exit__(self, *_: Any) -> None:
        _end(self)

    def __getitem__(self, index: Any) -> Any:
        return self.records[index]

    def __len__(self) -> int:
        return len(self.records)

    def __str__(self) -> str:
        return "\n".join(map(str, self.records)) or "no call of fused_softmax"


def explain() -> Explanation:
    """List which way each call of this package goes, and why: for the length of a with block, in all threads.

    What it gives is printable, and a sequence of records: function, shapes, route, reason, plan, kernels and
    compile_seconds. Backward passes have records of their own, on whatever thread they run; so have calls of torch's
    that `enable()` took, and the operators that compiled code runs. A call within another follows it, with a depth.

    Within the block no call is found among earlier ones, and each takes the host as long as a first one. A function of
    torch.compile may be traced once more there, which lists how its calls were traced. Outside of
    the block nothing is slower.

    >>> with explain() as calls:
    ...     softmax(torch.randn(64, 1000, device="cuda"))
    >>> print(calls)
    softmax (64 x 1000): kernel, plain tensors, with nothing watching
      plan: RowPlan(strategy='row', n_rows=64, n_cols=1000, ...)
      kernels: _part_forward
    """
    return Explanation()


class _Open:
    """A record that is not over, with what may settle its route in the end."""

    def __init__(self, record: Record, standing_in: bool, forward: Record | None):
        self.record, self.standing_in, self.forward = record, standing_in, forward
        self.watcher: Any = None
        self.first_within: Record | None = None

    def settle(self, way: tuple[str, str]) -> None:
        self.record.route, self.record.reason = way

    def close(self) -> None:
        record = self.record
        if record.route:
            return
        if self.forward is not None and self.forward.route == SHARDED:
            self.settle((SHARDED, self.forward.reason))
        elif record.kernels:
            of_enable = "enable() has the kernels in the place of ATen's"
            self.settle((KERNEL, of_enable if self.standing_in else "plain tensors, with nothing watching"))
        elif self.first_within is not None:
            self.settle((self.first_within.route, f"as {self.first_within.function}, which it calls"))
        elif self.watcher is not None:
            self.settle((COMPOSED, self.watcher.reason))
        elif record.function.endswith("backward") and torch.is_grad_enabled():
            self.settle((COMPOSED, "a gradient of the gradient is asked for"))
        elif self.forward is _UNHEARD:
            self.settle((KERNEL, "its forward pass, which came before the block, has prepared it"))
        else:
            self.settle((COMPOSED, "no kernel has a part in it"))


_UNHEARD = Record("")  # of a forward pass before the block, of which no launch that it prepared is heard


class _Of(threading.local):
    """What a thread is in."""

    def __init__(self) -> None:
        self.traced: Record | None = None


_here = _Of()
_within: ContextVar[tuple[_Open, ...]] = ContextVar("within", default=())  # also of threads that compile for a call
_listening: list[Explanation] = []
_replaced: list[tuple[Any, str, Any]] = []  # (where, name, what was there)
_lock = threading.Lock()


def _now() -> _Open | None:
    within = _within.get()
    return within[-1] if within and _listening else None


def _add(record: Record) -> None:
    for each in tuple(_listening):
        each.records.append(record)


@contextmanager
def _opened(
    function: str, args: Any, settled: tuple[str, str] | None = None, standing_in: bool = False,
    forward: Record | None = None,
) -> Iterator[_Open]:  # fmt: skip
    opened = _within.get()
    around = opened[-1] if opened else None
    record = Record(function, _shapes(args), depth=len(opened))
    this = _Open(record, standing_in, forward)
    if settled is not None:
        this.settle(settled)
    if around is not None and around.first_within is None:
        around.first_within = record
    _add(record)
    token = _within.set((*opened, this))
    try:
        yield this
    except BaseException as error:
        this.settle((record.route or NONE, f"{type(error).__name__} was raised"))
        raise
    finally:
        _within.reset(token)
        this.close()


def _shapes(args: Any) -> tuple[tuple[int, ...], ...]:
    """Of tensors among arguments, and of those in tuples of them that are no argument of their own."""
    found = [each for each in args if isinstance(each, Tensor)]
    seen = set(map(id, found))
    for several in args:
        for each in several if isinstance(several, tuple) else ():
            if isinstance(each, Tensor) and id(each) not in seen:
                seen.add(id(each))
                found.append(each)
    with torch._C.DisableTorchFunction():
        return tuple(tuple(each.shape) for each in found)


# What is told while a compiler traces a call: it runs these once, as it meets them.


def _trace_begins(function: str) -> None:
    _here.traced = Record(function)
    _add(_here.traced)


def _trace_goes(way: str, reason: str) -> None:
    if _here.traced is not None and not _here.traced.route:
        _here.traced.route, _here.traced.reason = way, reason


_trace_begins._dynamo_marked_constant = True  # type: ignore[attr-defined]
_trace_goes._dynamo_marked_constant = True  # type: ignore[attr-defined]


# What stands in place of a function `real` while somebody listens.


def _calling(real: Callable, function: str | None, settled: tuple[str, str] | None) -> Callable:
    def listened(*args, **kwargs):
        name = args[0] if function is None else function
        if torch.compiler.is_compiling():
            _trace_begins(name)
            return real(*args, **kwargs)
        with _opened(name, args, settled):
            return real(*args, **kwargs)

    return listened


def _settling(real: Callable, way: tuple[str, str]) -> Callable:
    def listened(*args, **kwargs):
        found = real(*args, **kwargs)
        if not torch.compiler.is_compiling():
            now = _now()
            if now is not None and found is not None:
                now.settle(way)
        return found

    return listened


def _telling(real: Callable) -> Callable:
    def listened(*args, **kwargs):
        found, now = real(*args, **kwargs), _now()
        if now is not None and found.reason and not torch.compiler.is_compiling():
            now.record.reason += f"; {found.reason}"
        return found

    return listened


def _deciding(real: Callable[..., Decision]) -> Callable[..., Decision]:
    def listened(*tensors, **options):
        decision = real(*tensors, **options)
        if torch.compiler.is_compiling():
            _trace_goes(_NAMES[decision.route], decision.reason)
            return decision
        now = _now()
        if now is not None and not now.record.route:
            now.settle((_NAMES[decision.route], decision.reason))
        return decision

    return listened


def _watching(real: Callable) -> Callable:
    def listened(*tensors):
        watcher = real(*tensors)
        if not torch.compiler.is_compiling():
            now = _now()
            if now is not None:
                now.watcher = watcher
        return watcher

    return listened


def _leaving(real: Callable, whose: str) -> Callable:
    def listened(own, refused):
        now = _now()
        if now is not None:
            now.settle((whose, refused))
        return real(own, refused)

    return listened


def _choosing(real: Callable) -> Callable:
    def listened(of, table, asked):
        choice, now = real(of, table, asked), _now()
        if now is not None:
            now.record.ways = *now.record.ways, Taken(of, choice.way.name, choice.refused)
            if choice.way.name == CUDNN:
                now.settle((CUDNN, f"cuDNN was measured to be faster at {of}"))
                now.record.plan = choice.plan, *now.record.plan
        return choice

    return listened


def _preparing(real: Callable) -> Callable:
    def listened(kernel, *rest, plan=None, **options):
        launched, of = real(kernel, *rest, plan=plan, **options), _now()
        inner = launched.__call__
        if getattr(inner, "listened", False):  # one that was prepared for another
            return launched
        name = getattr(kernel, "__name__", None) or kernel.fn.__name__
        function = name if of is None else of.record.function

        def launching(*arguments):
            if _listening:
                now = _now()
                if now is None:  # what was prepared in a call, and is launched after it
                    with _opened(function, arguments) as now:
                        _note(now.record, name, plan)
                else:
                    _note(now.record, name, plan)
            return inner(*arguments)

        launching.listened = True  # type: ignore[attr-defined]
        launched.__call__ = launching
        return launched

    return listened


def _note(record: Record, name: str, plan: Any) -> None:
    record.kernels.append(name)
    if plan is not None and plan not in record.plan:
        record.plan = *record.plan, plan


def _going_forward(real: Callable) -> Callable:
    def listened(ctx, *args):
        now = _now()
        if now is not None:
            ctx.forward_record = now.record
        return real(ctx, *args)

    return listened


def _going_back(real: Callable, home: str) -> Callable:
    def listened(ctx, *gradients):
        forward = getattr(ctx, "forward_record", _UNHEARD)
        with _opened(f"{forward.function or home} backward", gradients, forward=forward):
            return real(ctx, *gradients)

    return listened


def _compiling(real: Callable | None) -> Callable:
    def listened(*, times: Any, cache_hit: bool, **told: Any) -> None:
        now = _now()
        if now is not None and not cache_hit:
            now.record.compile_seconds += times.total / 1e6  # of microseconds
        if real is not None:
            real(times=times, cache_hit=cache_hit, **told)

    return listened


def _running(name: str, run: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """An operator of torch.ops.fused_softmax."""
    now = _now()
    if now is not None:  # that of a call, which says why
        if not now.record.route:
            now.settle((OPERATOR, f"torch.ops.fused_softmax.{name} runs in it"))
        return run(*args, **kwargs)
    with _opened(name, args, (OPERATOR, f"torch.ops.fused_softmax.{name} runs in what was compiled or transformed")):
        return run(*args, **kwargs)


def _standing_in(name: str, kernel: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call of torch's that `enable()` has taken."""
    with _opened(f"aten::{name}", args, standing_in=True):
        return kernel(*args, **kwargs)


def _standing_in_elsewhere(name: str, run: Callable, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A call of a function of PyG or TRL."""
    with _opened(name, (*args, *kwargs.values())):
        return run(*args, **kwargs)


def _found_nothing() -> bool:
    return True


def _begin(explanation: Explanation) -> None:
    with _lock:
        if not _listening:
            _replace_all()
        _listening.append(explanation)


def _end(explanation: Explanation) -> None:
    with _lock:
        _listening.remove(explanation)
        while _replaced and not _listening:
            setattr(*_replaced.pop())


def _replace(where: Any, name: str, new: Any) -> None:
    _replaced.append((where, name, where.__dict__[name] if isinstance(where, type) else getattr(where, name)))
    setattr(where, name, new)


def _replace_all() -> None:
    for where, name, function, settled in _CALLS:
        _replace(where, name, _calling(getattr(where, name), function, settled))
    for where, name, way in _SETTLING:
        _replace(where, name, _settling(getattr(where, name), way))
    for where, name in _TELLING:
        _replace(where, name, _telling(getattr(where, name)))
    for each in _functions():
        _, _, room, *_, home = each.__module__.removesuffix("_rows").split(".")
        home = _OF_ROOMS.get(room, room) if home not in _OPERATORS else home
        _replace(each, "forward", staticmethod(_going_forward(each.forward)))
        _replace(each, "backward", staticmethod(_going_back(each.backward, home)))
    _replace(attention_ways, "chosen", _choosing(attention_ways.chosen))
    _replace(route, "decide", _deciding(route.decide))
    _replace(route, "watcher_of", _watching(route.watcher_of))
    _replace(patch, "watcher_of", route.watcher_of)
    _replace(patch, "left_to_aten", _leaving(patch.left_to_aten, ATEN))
    _replace(of_pyg, "left_to_pyg", _leaving(of_pyg.left_to_pyg, PYG))
    _replace(of_pyg, "listener", _standing_in_elsewhere)
    _replace(of_trl, "left_to_trl", _leaving(of_trl.left_to_trl, TRL))
    _replace(of_trl, "listener", _standing_in_elsewhere)
    _replace(patch, "listener", _standing_in)
    _replace(library, "listener", _running)
    _replace(launch, "prepare", _preparing(launch.prepare))
    _replace(knobs.compilation, "listener", _compiling(knobs.compilation.listener))
    _replace(calls, "_is_compiling", _found_nothing)


def _functions() -> list[type[torch.autograd.Function]]:
    """The autograd functions of this package's operators: not of references, nor those that only refuse a gradient."""
    return [
        each
        for each in torch.autograd.Function.__subclasses__()
        if each.__module__.startswith(f"{__package__}.ops.")
        and each.__module__ != no_gradient.__name__
        and not each.__module__.endswith(".reference")
    ]
