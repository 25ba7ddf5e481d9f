"""The host's time of one eager call, ours beside torch's own for the same result, at a shape whose kernels are short.

Small calls cost what the host takes to find out what to launch. Both calls take turns in several rounds, without the
garbage collector; a round's figure is its mean over back-to-back calls, and the result is the median of the rounds.
Calls are counted until they are enqueued: the GPU is idle before a round, and its queue never fills.
"""

import gc
import itertools
import json
import math
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

import torch
from rich.console import Console
from torch import Tensor
from torch.nn import functional

from fused_softmax import cross_entropy, enabled, log_softmax, logsumexp, softmax
from fused_softmax.bench.entries.makers import Call
from fused_softmax.bench.measure.timing import idle
from fused_softmax.bench.show import report

SHAPE = (64, 1024)
DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}
ROUNDS = 15
SECONDS = 3e-3  # of each side in a round, about
MOST_CALLS = 100  # of each side in a round
SCALE = 0.5

Arguments = Iterator[tuple[Any, ...]]


@dataclass(frozen=True)
class Pair:
    """A call of ours and torch's for the same result. arguments: of one call after another, which both are given.

    within: the context of our call, where torch's must run outside of it.
    """

    name: str
    ours: Call
    torchs: Call
    arguments: Arguments
    within: Callable[[], AbstractContextManager[Any]] = nullcontext


@dataclass(frozen=True)
class Row:
    """Medians of the rounds, in us. ratio: ours over torch's. wrong: why there are none."""

    name: str
    ours_us: float | None = None
    torch_us: float | None = None
    ratio: float | None = None
    wrong: str = ""


def pairs(device: str, shape: tuple[int, int] = SHAPE) -> Iterator[Pair]:
    """The rows of the table, on tensors of a shape [n_rows, n_cols]."""
    n_rows, n_cols = shape
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(n_rows, n_cols, device=device, generator=generator)
    target = torch.randint(n_cols, (n_rows,), device=device, generator=generator)
    keep = torch.rand(n_rows, n_cols, device=device, generator=generator) > 0.25
    keep[:, 0] = True
    yield from _plain(x)
    yield from _with_options(x, keep)
    yield from _differentiated(x, target)
    yield from map(_by_torchs_name, [*_plain(x), *_differentiated(x, target)])
    yield from _never_seen(x, target)


def _plain(x: Tensor) -> Iterator[Pair]:
    for name, ours, torchs in _FUNCTIONS:
        for short, dtype in DTYPES.items():
            yield Pair(f"{name} {short}", partial(ours, dim=-1), partial(torchs, dim=-1), _always(x.to(dtype)))


def _with_options(x: Tensor, keep: Tensor) -> Iterator[Pair]:
    hidden = ~keep
    future = torch.ones_like(keep).triu(x.shape[1] - x.shape[0] + 1)
    yield Pair("softmax, scale", partial(softmax, scale=SCALE), lambda x: torch.softmax(x * SCALE, -1), _always(x))
    yield Pair(
        "softmax, bool mask",
        partial(softmax, mask=keep),
        lambda x: torch.softmax(x.masked_fill(hidden, -math.inf), -1),
        _always(x),
    )
    yield Pair(
        "softmax, is_causal",
        partial(softmax, is_causal=True),
        lambda x: torch.softmax(x.masked_fill(future, -math.inf), -1),
        _always(x),
    )
    yield Pair(
        "softmax, dtype=float32 of bf16",
        partial(softmax, dtype=torch.float32),
        partial(torch.softmax, dim=-1, dtype=torch.float32),
        _always(x.bfloat16()),
    )
    out = torch.empty_like(x)
    yield Pair("softmax, out", partial(softmax, out=out), partial(torch.softmax, dim=-1, out=out), _always(x))
    yield Pair("softmax over dim 0", partial(softmax, dim=0), partial(torch.softmax, dim=0), _always(x))


def _differentiated(x: Tensor, target: Tensor) -> Iterator[Pair]:
    leaf, dy = x.clone().requires_grad_(), torch.randn_like(x)
    yield Pair("softmax, input requires grad", softmax, partial(torch.softmax, dim=-1), _always(leaf))
    for name, ours, torchs in _FUNCTIONS[:2]:
        own, others = (_and_backward(partial(function, dim=-1)) for function in (ours, torchs))
        yield Pair(f"{name}, forward and backward", own, others, _always(leaf, dy))
    yield Pair("cross_entropy", cross_entropy, functional.cross_entropy, _always(x, target))
    own, others = (_loss_and_backward(function) for function in (cross_entropy, functional.cross_entropy))
    yield Pair("cross_entropy, forward and backward", own, others, _always(leaf, target))


def _by_torchs_name(pair: Pair) -> Pair:
    """The same call of torch's function, which `enabled` replaces by ours."""
    return replace(pair, name=f"torch's {pair.name}, enabled", ours=pair.torchs, within=enabled)


def _never_seen(x: Tensor, target: Tensor) -> Iterator[Pair]:
    """What changes from call to call, of a kernel that is compiled: a scale, or the number of rows."""
    scales = ((x, 0.5 + i * 2.0**-20) for i in itertools.count(1))
    yield Pair(
        "softmax, a new scale", lambda x, scale: softmax(x, scale=scale), lambda x, scale: torch.softmax(x * scale, -1),
        scales,
    )  # fmt: skip
    most = x.shape[0] + (ROUNDS + 1) * (MOST_CALLS + 1) + 20  # and those before the rounds
    many, targets = x.repeat(-(-most // x.shape[0]), 1), target.repeat(-(-most // x.shape[0]))
    compiled = {min(most, x.shape[0] << power) for power in range(10)}  # for every kernel that some rows take
    for n in compiled:
        softmax(many[:n])
        cross_entropy(many[:n], targets[:n])
    sizes = [n for n in range(x.shape[0] + 1, most) if n not in compiled]
    yield Pair("softmax, a new number of rows", softmax, partial(torch.softmax, dim=-1), ((many[:n],) for n in sizes))
    yield Pair(
        "cross_entropy, a new number of rows", cross_entropy, functional.cross_entropy,
        ((many[:n], targets[:n]) for n in sizes),
    )  # fmt: skip


_FUNCTIONS: tuple[tuple[str, Call, Call], ...] = (
    ("softmax", softmax, torch.softmax),
    ("log_softmax", log_softmax, torch.log_softmax),
    ("logsumexp", logsumexp, torch.logsumexp),
)


def _always(*arguments: Any) -> Arguments:
    return itertools.repeat(arguments)


def _and_backward(function: Call) -> Call:
    return lambda x, dy: torch.autograd.grad(function(x), x, dy)[0]


def _loss_and_backward(function: Call) -> Call:
    return lambda x, target: torch.autograd.grad(function(x, target), x)[0]


def measure(pair: Pair, rounds: int = ROUNDS, most_calls: int = MOST_CALLS) -> Row:
    """The row of a pair. Both results are compared first, and nothing is timed if they differ."""
    first = next(pair.arguments)
    with pair.within():
        found = pair.ours(*first).clone()  # both may write to the same tensor
    try:
        torch.testing.assert_close(found, pair.torchs(*first))
    except AssertionError as error:
        return Row(pair.name, wrong=str(error).splitlines()[0])
    with pair.within():
        one = _seconds_per_call(pair.ours, [next(pair.arguments) for _ in range(4)])
    calls = max(1, min(most_calls, int(SECONDS / one)))
    times: tuple[list[float], list[float]] = [], []
    collecting = gc.isenabled()
    gc.collect()
    gc.disable()
    try:
        for _ in range(rounds):
            arguments = list(itertools.islice(pair.arguments, 1 + calls))
            with pair.within():
                times[0].append(_seconds_per_call(pair.ours, arguments))
            times[1].append(_seconds_per_call(pair.torchs, arguments))
    finally:
        if collecting:
            gc.enable()
    ours, torchs = (1e6 * statistics.median(each) for each in times)
    return Row(pair.name, ours, torchs, ours / torchs)


def _seconds_per_call(call: Call, arguments: Sequence[tuple[Any, ...]]) -> float:
    """The mean over the arguments but the first, whose call finds the caches that the other side has left."""
    call(*arguments[0])
    idle(arguments[0][0])
    start = time.perf_counter()
    for each in arguments[1:]:
        call(*each)
    seconds = (time.perf_counter() - start) / (len(arguments) - 1)
    idle(arguments[0][0])
    return seconds


def measure_all(device: str) -> Iterator[Row]:
    """All rows, one after another."""
    return map(measure, pairs(device))


def text(rows: Sequence[Row], environment: dict[str, Any], command: str) -> str:
    """The rows as JSON, with what they were measured in."""
    options = {"shape": SHAPE, "rounds": ROUNDS, "most_calls": MOST_CALLS}
    found = {"environment": environment, "command": command, "options": options, "rows": [asdict(row) for row in rows]}
    return json.dumps(found, indent=1) + "\n"


def print_rows(rows: Sequence[Row], console: Console) -> None:
    report.say(console, f"us of host time for one eager call at {SHAPE[0]} x {SHAPE[1]}; ratio: ours over torch's")
    table = report.new_table(console, "", "ours", "torch", "ratio")
    for row in rows:
        if row.ours_us is None or row.torch_us is None:
            table.add_row(row.name, "wrong", "", "")
        else:
            table.add_row(row.name, f"{row.ours_us:.2f}", f"{row.torch_us:.2f}", f"{row.ratio:.2f}")
    report.show(console, table)
    for row in rows:
        if row.wrong:
            report.say(console, f"{row.name}: {row.wrong}")
