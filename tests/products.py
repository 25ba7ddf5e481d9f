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
from collections import Counter, defaultdict
from itertools import combinations

import pytest
import torch
from fault import FAULTS

# Whether this run leaves out what is exhaustive: conftest.py sets it before any test is imported. gradcheck is then in
# fast mode, which looks at a projection of the Jacobian instead of every element.
QUICK = False


# By file: what takes long and stands apart, with one of how many cases of a test CI takes; the others are exhaustive.
GUARDS = {
    "attention_vmap": 16, "batch_invariant": 1, "bench_shards": 24, "cold": 1, "compiled_options": 12, "docs": 1,
    "examples": 1, "family_compiles": 1, "fingerprint": 1, "fp8_compiles": 1, "front_door": 1, "fuzz": 1, "hf": 16,
    "hf_generate": 4, "hf_sweep": 64, "host": 1, "imports": 1, "interrupts": 1, "layouts_compile": 1, "library": 16,
    "library_losses": 16, "library_sampling": 8, "losses_compile": 1, "losses_fuzz": 1, "multihead": 16, "names": 1,
    "opinfo": 16, "opinfo_losses": 16, "page": 12, "peers": 48, "peers_gathered": 8, "peers_runner": 1,
    "peers_waits": 1, "plan_spans": 1, "profile": 1, "report": 1, "report_page": 1, "sampling_turns": 8,
    "sampling_verification": 1, "sanitize": 2, "serve": 1, "serve_hostile": 12, "shards": 16, "shards_by_kernels": 16,
    "shards_divergence": 24, "shards_dtensor": 16, "shards_fsdp": 24, "shards_in_disorder": 4, "shards_kept": 4,
    "shards_linear": 16, "shards_linear_log_prob": 24, "shards_linear_pairs": 24, "shards_log_prob": 24,
    "shards_log_prob_kept": 24, "shards_losses": 16, "shards_misuse": 1, "shards_of_calls": 24, "shards_of_eight": 4,
    "shards_route": 8, "shards_sampling": 24, "shards_seams": 16, "trace_attention": 1, "trace_notes": 8,
    "verify_kernels": 2, "warm": 1, "without_triton": 1,
}  # fmt: skip
# And files of which one case of a test in so many says enough for `make test`; CI takes an eighth as many again.
ONE_IN = {
    "alone": 12, "attention": 6, "attention_decode": 6, "attention_hidden": 6, "attention_hopper_bias": 6,
    "attention_large_scores": 5, "attention_short": 6, "autocast": 6, "backward": 5, "bench": 3, "calls": 6,
    "classic": 3, "column_scores": 4, "cross_entropy": 4, "divergence": 5, "exact": 5, "flops": 3, "fp8": 12,
    "layouts": 8, "linear_by_classes": 16, "linear_outputs": 4, "log_prob": 4, "log_prob_kept": 6,
    "logsumexp_gradients": 4, "loss_defects": 3, "loss_given_lse": 5, "losses_seams": 6, "modes": 6, "neg_bit": 4,
    "no_gradient": 6, "no_room": 3, "operators": 5, "out_overlaps": 4, "route": 10, "route_kernels": 24,
    "sample_kernels": 18, "sampling": 4, "sampling_boundaries": 4, "sampling_first": 4, "sampling_gradients": 4,
    "sampling_options": 5, "sampling_penalties": 5, "scores": 8, "shelf": 2, "sink": 3, "softmax": 8, "whole_losses": 5,
}  # fmt: skip

# Of the cases that compile kernels for sm_90, one in so many; by the newest Triton half as many, for other GPUs a
# fourth. By version, which one is first.
COMPILED_IN = 20
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


def mark_exhaustive(items) -> None:
    """Mark the cases of tests that are `pairwise` that the quick suite leaves out."""
    tests = defaultdict(list)
    for item in items:
        if item.get_closest_marker("pairwise"):
            tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        marker = cases[0].get_closest_marker("pairwise")
        possible = [case for case in cases if not _skips(case) and not case.get_closest_marker("exhaustive")]
        chosen = cover([_places(case) for case in possible], *marker.args, **marker.kwargs)
        quick = {possible[i].nodeid for i in chosen}
        for case in cases:
            if case.nodeid not in quick and not _is_named(case):
                case.add_marker(pytest.mark.exhaustive)


def mark_guard(items) -> None:
    """Mark what `make test` leaves to CI, and of what compiles kernels what CI leaves to `make test-all`."""
    tests = defaultdict(list)
    for item in items:
        tests[item.nodeid.partition("[")[0]].append(item)
    for cases in tests.values():
        file = cases[0].path.stem.removeprefix("test_")
        compiles = bool(cases[0].get_closest_marker("compiles"))
        if compiles:
            _mark_compiled(cases)
        possible = [case for case in cases if not _is_left_out(case)]
        if compiles:
            chosen, guards = [] if file in GUARDS else possible[-1:], cases
        elif file in GUARDS:
            chosen, guards = [], possible[:: GUARDS[file]]
        else:
            chosen, guards = possible[:: ONE_IN.get(file, 1)], possible[1 :: 8 * ONE_IN.get(file, 1)]
        for case in set(cases) - set(chosen):
            case.add_marker(pytest.mark.guard if case in guards or _is_named(case) else pytest.mark.exhaustive)


def _mark_compiled(cases) -> None:
    """Every Triton compiles one case in so many of each GPU, each version others; what is left is exhaustive."""
    of_target = defaultdict(list)
    for case in cases:
        if _target(case) != "sm_90":
            case.add_marker(pytest.mark.other_gpus)
        if not case.get_closest_marker("exhaustive"):
            of_target[_target(case)].append(case)
    for target, quick in of_target.items():
        step = COMPILED_IN * (4 if target != "sm_90" else 2 if _first_compiled() == FIRST_COMPILED["3.9"] else 1)
        first = _first_compiled() % min(step, len(quick))
        for i, case in enumerate(quick):
            if i % step != first and not _is_named(case):
                case.add_marker(pytest.mark.exhaustive)


def _first_compiled() -> int:
    return FIRST_COMPILED.get(importlib.metadata.version("triton")[:3], 0)


def share(values) -> list:
    """Of what one case compiles, one in so many, each version others; all for `make test-all`."""
    values = list(values)
    return values[_first_compiled() % len(values) :: COMPILED_IN] if QUICK and values else values


def _is_left_out(case) -> bool:
    marked = case.get_closest_marker("exhaustive") or case.get_closest_marker("guard")
    return bool(marked) or _target(case) != "sm_90"


def _is_named(case) -> bool:
    return f"{case.path.name}::{case.nodeid.partition('::')[2]}" in NAMED


def _target(case) -> str:
    """The GPU that a case compiles for; a loss's targets are none."""
    return _parameters(case).get("target", "sm_90") if case.get_closest_marker("compiles") else "sm_90"


def cover(cases: list[dict[str, int]], *whole: tuple[str, ...], strength: int = 2) -> list[int]:
    """Places of cases that hold every combination of values of `strength` parameters, and of each group of `whole`.

    The cases may be less than a product: what no case holds is not asked for.
    """
    names = sorted(cases[0]) if cases else []
    groups = [*combinations(names, min(strength, len(names))), *whole]
    holds = [[(group, *[case[name] for name in group]) for group in groups] for case in cases]
    # What few cases hold decides between them, so take it first.
    number = Counter(combination for held in holds for combination in held)
    missing, chosen, used = dict.fromkeys(number), [], Counter()
    while missing:
        rarest = min(missing, key=number.__getitem__)
        candidates = [i for i, held in enumerate(holds) if rarest in held]
        # Of equals the one whose values have been taken least, so that no value stands in all cases but one.
        best = max(candidates, key=lambda i: (sum(each in missing for each in holds[i]), -_uses(cases[i], used), -i))
        chosen.append(best)
        used.update(cases[best].items())
        for combination in holds[best]:
            missing.pop(combination, None)
    return sorted(chosen)


def _uses(case: dict[str, int], used: Counter) -> int:
    return sum(used[value] for value in case.items())


def _places(case) -> dict[str, int]:
    """The parameters' values by identity, which every case of a test shares: they need not be hashable."""
    return {name: id(value) for name, value in _parameters(case).items()}


def _parameters(item) -> dict:
    return item.callspec.params if hasattr(item, "callspec") else {}


def _skips(case) -> bool:
    """Programs exchange fp32 states, so tests skip rows of fp64 that are split."""
    values = _parameters(case).values()
    return any(value is torch.float64 for value in values) and any(
        isinstance(value, str) and value == "split" for value in values
    )
