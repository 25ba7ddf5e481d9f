"""Which tests `make test` runs, so that it takes minutes.

What is marked `guard` is left to CI: `make test-guard`, and `make test-compiles` for what compiles kernels, of which
`make test` runs one case a test, for sm_90. What is marked `exhaustive` is left to `make test-all`.

A test that is marked `pairwise` keeps the whole product of its parameters. Of these cases the quick suite takes a few
in which every two values of two parameters meet, the same few every time:

    @pairwise(("strategy", "alignment", "dtype"))
    @pytest.mark.parametrize("strategy", STRATEGIES)
    ...
"""

import importlib.metadata
import random
from collections import Counter, defaultdict
from dataclasses import dataclass, replace
from itertools import combinations

import pytest
import torch
from fault import FAULTS

# Whether this run leaves out what is exhaustive: conftest.py sets it before any test is imported. gradcheck is then in
# fast mode, which looks at a projection of the Jacobian instead of every element.
QUICK = False


# By file: what takes long and stands apart, with one of how many cases of a test CI takes; the others are exhaustive.
GUARDS = {
    "attention_hidden": 6, "attention_vmap": 16, "batch_invariant": 4, "bench": 8, "bench_shards": 24,
    "bench_steps": 1, "bench_warm": 1, "checks_of_values": 4, "cold": 1, "compiled_options": 12,
    "divergence_at_once": 4, "docs": 1, "examples": 1, "explanation": 1, "exported_losses": 1, "family_compiles": 1,
    "fingerprint": 3, "fp8_compiles": 1, "front_door": 1, "fuzz": 1, "hf": 16, "hf_apply": 1, "hf_apply_sweep": 64,
    "hf_generate": 4, "hf_routers": 6, "hf_sweep": 96, "hf_training": 1, "host": 1, "imports": 1, "interrupts": 1,
    "kernel_counts": 1, "layouts_compile": 1, "library": 36, "library_losses": 36, "library_sampling": 8,
    "log_prob_kept": 12, "loss_given_lse": 5, "losses_compile": 1, "losses_fuzz": 1, "modes": 6, "multihead": 16,
    "names": 1, "opinfo": 36, "opinfo_losses": 16, "page": 16, "peers": 64, "peers_gathered": 8, "peers_runner": 1,
    "peers_waits": 1, "plan_spans": 1, "profile": 2, "pyg": 1, "report": 1, "report_page": 1, "route_vmap": 8,
    "sampling_batches": 6, "sampling_filters": 3, "sampling_first": 6, "sampling_gradients": 4, "sampling_rank": 4,
    "sampling_speculative": 4, "sampling_turns": 8, "sampling_verification": 4, "sanitize": 16, "saved_tensors": 1,
    "segments_kernels": 4, "serve": 1, "serve_hostile": 12, "shards": 16, "shards_by_kernels": 24,
    "shards_divergence": 36, "shards_dtensor": 24, "shards_fsdp": 36, "shards_in_disorder": 4, "shards_kept": 4,
    "shards_linear": 24, "shards_linear_log_prob": 36, "shards_linear_pairs": 36, "shards_log_prob": 36,
    "shards_log_prob_kept": 24, "shards_losses": 24, "shards_misuse": 1, "shards_of_calls": 36, "shards_of_eight": 4,
    "shards_route": 8, "shards_sampling": 24, "shards_seams": 24, "shuffled_rows": 6, "site": 1, "trace": 2,
    "trace_attention": 1, "trace_notes": 8, "trl": 3, "verify_kernels": 4, "warm": 1, "whole_losses": 5,
    "without_triton": 1,
}  # fmt: skip
# And files of which one case of a test in so many says enough for `make test`; CI takes an eighth as many again.
ONE_IN = {
    "alone": 16, "attention": 10, "attention_decode": 6, "attention_hopper_bias": 6, "attention_large_scores": 10,
    "attention_short": 6, "autocast": 6, "backward": 5, "calls": 6, "classic": 3, "column_scores": 4, "contract": 2,
    "cross_entropy": 4, "divergence": 8, "exact": 5, "flops": 3, "fp8": 12, "layouts": 8, "linear_by_classes": 16,
    "linear_log_prob": 3, "linear_log_prob_by_classes": 3, "linear_outputs": 4, "linear_probabilities": 3,
    "log_prob": 8, "logsumexp_gradients": 4, "loss_defects": 3, "losses_seams": 6, "neg_bit": 4, "no_gradient": 6,
    "no_room": 3, "operators": 5, "out_overlaps": 4, "probabilities_beside": 3, "route": 10, "route_kernels": 24,
    "sample_kernels": 18, "sampling": 4, "sampling_boundaries": 4, "sampling_options": 8, "sampling_penalties": 5,
    "scores": 8, "shelf": 2, "sink": 3, "softmax": 8,
}  # fmt: skip

# A product of more cases than these is sampled first.
MANY = 8192
# Of the cases that compile kernels for sm_90, one in so many; by the newest Triton half as many, for other GPUs a
# fourth. By version, which one is first.
COMPILED_IN = 28
# Cases that a fault names, since the others of their test do not notice it: CI takes them whatever stands above.
NAMED = {test for fault in FAULTS for test in fault.nearest if "[" in test}
FIRST_COMPILED = {"3.6": 0, "3.7": 1, "3.9": 2}


def pairwise(*whole: tuple[str, ...], strength: int = 2):
    """The marker. whole: names of parameters whose product stays whole; strength: how many of the others meet."""
    return pytest.mark.pairwise(*whole, strength=strength)


def one_in(number: int, values) -> list:
    """The values, all but one in so many of them exhaustive: of what takes the same path whatever its value."""
    return [
        value if i % number == 0 else pytest.param(value, marks=pytest.mark.exhaustive)
        for i, value in enumerate(values)
    ]


@dataclass
class Case:
    """One set of parameters of a test, before pytest makes an item of it."""

    name: str  # file::test[id]
    parameters: dict
    marks: set[str]

    @property
    def named(self) -> bool:
        return self.name in NAMED

    @property
    def target(self) -> str:
        """The GPU that it compiles for; a loss's targets are none."""
        return self.parameters.get("target", "sm_90") if "compiles" in self.marks else "sm_90"

    @property
    def left_out(self) -> bool:
        return bool(self.marks & {"exhaustive", "guard"}) or self.target != "sm_90"


def choose(metafunc) -> None:
    """Mark a test's cases, and drop those that a quick run leaves out.

    An item takes pytest a tenth of a millisecond, and whole products have 300000 cases.
    """
    calls, definition = metafunc._calls, metafunc.definition
    if not calls:  # `mark_item` marks the item that pytest makes of a test without parameters
        return
    name, marks = _name(definition), _marks(definition)
    cases = [Case(f"{name}[{call.id}]", call.params, marks.union(each.name for each in call.marks)) for call in calls]
    mark(cases, definition.get_closest_marker("pairwise"), definition.path.stem)
    pairs = list(zip(calls, cases, strict=True))
    kept = [(call, case) for call, case in pairs if not (QUICK and "exhaustive" in case.marks)]
    calls[:] = [
        replace(call, marks=[*call.marks, *(getattr(pytest.mark, each).mark for each in sorted(case.marks - marks))])
        for call, case in kept or pairs[:1]  # of an empty list pytest makes an item without parameters
    ]


def mark_item(item) -> None:
    """The same for a test without parameters."""
    if not hasattr(item, "callspec"):
        case = Case(_name(item), {}, _marks(item))
        mark([case], None, item.path.stem)
        for name in sorted(case.marks - _marks(item)):
            item.add_marker(getattr(pytest.mark, name))


def mark(cases: list[Case], pairwise, file: str) -> None:
    """Add to the cases of one test what `make test` leaves to CI, and CI to `make test-all`."""
    if pairwise:
        _mark_pairwise(cases, pairwise)
    file = file.removeprefix("test_")
    compiles = "compiles" in cases[0].marks
    if compiles:
        _mark_compiled(cases)
    possible = [i for i, case in enumerate(cases) if not case.left_out]
    if compiles:
        chosen, guards = [] if file in GUARDS else possible[-1:], range(len(cases))
    elif file in GUARDS:
        chosen, guards = [], possible[:: GUARDS[file]]
    else:
        chosen, guards = possible[:: ONE_IN.get(file, 1)], possible[1 :: 8 * ONE_IN.get(file, 1)]
    chosen, guards = set(chosen), set(guards)
    for i, case in enumerate(cases):
        if i not in chosen and "guard" not in case.marks:
            case.marks.add("guard" if i in guards or case.named else "exhaustive")


def _mark_pairwise(cases: list[Case], marker) -> None:
    possible = [case for case in cases if not _skips(case) and "exhaustive" not in case.marks]
    if len(possible) > MANY:  # whose every two values a sample holds too
        possible = random.Random(0).sample(possible, MANY)
    chosen = cover([_places(case) for case in possible], *marker.args, **marker.kwargs)
    quick = {possible[i].name for i in chosen}
    for case in cases:
        if case.name not in quick and not case.named:
            case.marks.add("exhaustive")


def _mark_compiled(cases: list[Case]) -> None:
    """Every Triton compiles one case in so many of each GPU, each version others; what is left is exhaustive."""
    of_target = defaultdict(list)
    for case in cases:
        if case.target != "sm_90":
            case.marks.add("other_gpus")
        if "exhaustive" not in case.marks:
            of_target[case.target].append(case)
    for target, quick in of_target.items():
        step = COMPILED_IN * (4 if target != "sm_90" else 2 if _first_compiled() == FIRST_COMPILED["3.9"] else 1)
        first = _first_compiled() % min(step, len(quick))
        for i, case in enumerate(quick):
            if i % step != first and not case.named:
                case.marks.add("exhaustive")


def _name(node) -> str:
    return f"{node.path.name}::{node.nodeid.partition('::')[2]}"


def _marks(node) -> set[str]:
    return {mark.name for mark in node.iter_markers()}


def _first_compiled() -> int:
    return FIRST_COMPILED.get(importlib.metadata.version("triton")[:3], 0)


def share(values) -> list:
    """Of what one case compiles, one in so many, each version others; all for `make test-all`."""
    values = list(values)
    return values[_first_compiled() % len(values) :: COMPILED_IN] if QUICK and values else values


def cover(cases: list[dict[str, int]], *whole: tuple[str, ...], strength: int = 2) -> list[int]:
    """Places of cases that hold every combination of values of `strength` parameters, and of each group of `whole`.

    The cases may be less than a product: what no case holds is not asked for.
    """
    names = sorted(cases[0]) if cases else []
    groups = dict.fromkeys([*combinations(names, min(strength, len(names))), *whole])
    columns = {name: [case[name] for case in cases] for name in names}
    holders, holds = defaultdict(list), [[] for _ in cases]
    for at, group in enumerate(groups):
        for i, values in enumerate(zip(*(columns[name] for name in group), strict=True)):
            holders[at, values].append(i)
            holds[i].append((at, values))
    left, chosen, used = set(holders), [], Counter()
    # What few cases hold decides between them, so take it first.
    for rarest in sorted(holders, key=lambda each: (len(holders[each]), holders[each][0], each[0])):
        if rarest not in left:
            continue
        # Of equals the one whose values have been taken least, so that no value stands in all cases but one.
        best = max(holders[rarest], key=lambda i: (sum(map(left.__contains__, holds[i])), -_uses(cases[i], used), -i))
        chosen.append(best)
        used.update(cases[best].items())
        left.difference_update(holds[best])
    return sorted(chosen)


def _uses(case: dict[str, int], used: Counter) -> int:
    return sum(used[value] for value in case.items())


def _places(case: Case) -> dict[str, int]:
    """The parameters' values by identity, which every case of a test shares: they need not be hashable."""
    return {name: id(value) for name, value in case.parameters.items()}


def _skips(case: Case) -> bool:
    """Programs exchange fp32 states, so tests skip rows of fp64 that are split."""
    values = case.parameters.values()
    return any(value is torch.float64 for value in values) and any(
        isinstance(value, str) and value == "split" for value in values
    )
