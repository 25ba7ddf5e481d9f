"""Random calls on one group, of changing functions, sizes, options and dtypes, some of them wrong on one rank alone."""

import random
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

import fused_softmax

SOFTMAXES = ("softmax", "log_softmax", "logsumexp")
LOSSES = ("cross_entropy", "linear_cross_entropy", "log_prob", "linear_log_prob")
LINEAR = ("linear_cross_entropy", "linear_log_prob")
WRONG = ("sizes", "columns", "options", "dtype", "rows", "function", "argument")
FEATURES = 6
TOLERANCE = {torch.float64: 1e-5, torch.float32: 1e-4, torch.bfloat16: 4e-2, torch.float16: 6e-3}
SPOILT = "an earlier call gave NaN, because "


class Case(NamedTuple):
    """A call of all ranks. wrong: how it is wrong on rank `on`, or None. seed: of its numbers."""

    name: str
    dtype: torch.dtype
    rows: int
    sizes: tuple[int, ...]
    n_classes: int | None
    options: dict[str, Any]
    graded: bool
    wrong: str | None
    on: int
    seed: int


def cases(n, n_wrong, names, seed, ranks=2, widest=20):
    """n calls, n_wrong of which are wrong on one rank."""
    draw = random.Random(seed)
    wrong = set(draw.sample(range(n), n_wrong))
    for i in range(n):
        name = draw.choice(names)
        even = draw.random() < 0.4
        width = draw.randint(1, widest)
        sizes = (width,) * ranks if even else tuple(draw.randint(0, widest) for _ in range(ranks))
        sizes = sizes if sum(sizes) > 2 else (2, *sizes[1:-1], 1)
        n_classes = draw.choice([None, None, sum(sizes), max(1, sum(sizes) - draw.randint(1, 3))])
        dtypes = [torch.float32, torch.float32, torch.bfloat16, torch.float16, torch.float64]
        dtype = draw.choice(dtypes[:3] if name in (*LINEAR, "sample") else dtypes)
        how = draw.choice(WRONG) if i in wrong else None
        case = name, dtype, draw.randint(1, 5), sizes, n_classes, _options(name, draw), draw.random() < 0.5
        yield Case(*case, how, draw.randrange(ranks), draw.randrange(2**20))


def _options(name, draw):
    if name in SOFTMAXES:
        return draw.choice([{}, {}, {"scale": 0.5}, {"sink": 0.3}, {"scale": 2.0, "sink": -1.0}])
    if name == "sample":
        return draw.choice([{}, {"temperature": 0.0}, {"top_k": 3}, {"top_p": 0.8}, {"return_logprobs": "raw"}])
    if name in ("log_prob", "linear_log_prob"):
        return draw.choice([{}, {}, {"softcap": 4.0}, {"scale": 0.7}, {"temperature": 0.5}])
    return draw.choice([
        {}, {}, {"reduction": "sum"}, {"reduction": "none"}, {"label_smoothing": 0.1}, {"softcap": 4.0},
        {"scale": 0.7}, {"lse_square_scale": 0.01}, {"ignore_index": 0},
    ])  # fmt: skip


def _other_options(name, options):
    if name in SOFTMAXES:
        return {**options, "scale": 3.0 * options.get("scale", 1.0)}
    if name == "sample":
        return {**options, "temperature": 0.25 + options.get("temperature", 1.0)}
    return {**options, "softcap": 2.0 + options.get("softcap", 0.0)}


def _bad_options(name, options, seed):
    kinds = {
        "softmax": [{"scale": "2"}, {"dtype": torch.int64}], "log_softmax": [{"masked_rows": "some"}, {"dim": 7}],
        "logsumexp": [{"sink": torch.zeros(3, 3, 3)}, {"dim": (0, 1)}], "sample": [{"top_p": -1.0}, {"seed": 1.5}],
        "cross_entropy": [{"label_smoothing": 2.0}, {"reduction": "max"}, {"weight": torch.ones(99)}],
        "linear_cross_entropy": [{"softcap": -1.0}, {"chunk_size": 0}, {"reduction": "max"}],
        "log_prob": [{"temperature": 0.0}, {"return_stats": ("some",)}, {"softcap": -1.0}],
        "linear_log_prob": [{"logits": "some"}, {"chunk_size": 0}, {"temperature": -1.0}],
    }[name] + [{"n_classes": 0}, {"shard_sizes": [1]}, {"n_classes": 10**9}]  # fmt: skip
    return {**options, **kinds[seed % len(kinds)]}


def _numbers(case, device):
    """(logits of whole rows, or the input and the weight that make them; targets, of which one is ignored)"""
    made = torch.Generator().manual_seed(case.seed)
    columns = sum(case.sizes)
    x = 3 * torch.randn(case.rows, columns, generator=made, dtype=torch.float64)
    hidden, w = (torch.randn(n, FEATURES, generator=made, dtype=torch.float64) for n in (case.rows, columns))
    target = torch.randint(case.n_classes or columns, (case.rows,), generator=made)
    moved = [each.to(case.dtype).to(device) for each in (x, hidden, w)]
    return *moved, target.to(device)


def made(case, group, device, transport):
    """(what this rank's call gives, its inputs that require a gradient)."""
    rank = dist.get_rank(group)
    sizes, name, options = case.sizes, case.name, dict(case.options)
    given = None if len(set(sizes)) == 1 and case.seed % 2 else list(sizes)
    wrong = case.wrong if rank == case.on else None
    if wrong == "rows":
        case = case._replace(rows=case.rows + 1)
    if wrong == "dtype":
        case = case._replace(dtype=torch.bfloat16 if case.dtype == torch.float32 else torch.float32)
    if wrong == "function":
        name = {"softmax": "log_softmax", "cross_entropy": "logsumexp", "logsumexp": "softmax"}.get(name, "softmax")
        options = {}
    if wrong == "options":
        options = _other_options(name, options)
    x, hidden, w, target = _numbers(case, device)
    first = sum(sizes[:rank])
    if wrong == "sizes":  # of another rank; at its own end, where they are known to be even
        given = [size + (other != rank) for other, size in enumerate(sizes)]
    of = {"group": group, "n_classes": case.n_classes}
    own = x[:, first : first + sizes[rank]].clone()
    own_weight = w[first : first + sizes[rank]].clone()
    if wrong == "columns":
        own, own_weight = (torch.cat((each, each.new_ones(more)), dim) for each, more, dim in (
            (own, (len(own), 1), 1), (own_weight, (1, FEATURES), 0),
        ))  # fmt: skip
        given = None
    of |= {"shard_sizes": given} | ({} if name == "sample" and transport == "peer" else {"transport": transport})
    if wrong == "argument":
        options = _bad_options(name, options, case.seed)
    function = getattr(fused_softmax, name)
    if name == "sample":
        seeds = torch.arange(len(own), device=device) + case.seed
        return function(own, **{**of, "seed": seeds, "position": 3, **options}), []
    inputs = [hidden, own_weight] if name in LINEAR else [own]
    inputs = [each.requires_grad_(case.graded) for each in inputs]
    if name in SOFTMAXES:
        return function(*inputs, **{"dim": 1, **of, **options}), inputs
    return function(*inputs, target, **{**of, **options}), inputs


def wanted(case, group, device):
    """The same of whole rows in one process, of float64 on a CPU but for tokens; and the gradients."""
    rank = dist.get_rank(group)
    x, hidden, w, target = _numbers(case, device if case.name == "sample" else torch.device("cpu"))
    n = case.n_classes or x.shape[1]
    here = slice(sum(case.sizes[:rank]), sum(case.sizes[: rank + 1]))
    if case.name == "sample":
        seeds = torch.arange(len(x), device=device) + case.seed
        return fused_softmax.sample(x[:, :n], **{"seed": seeds, "position": 3, **case.options}), []
    inputs = [hidden.double(), w.double()] if case.name in LINEAR else [x.double()]
    inputs = [each.requires_grad_(case.graded) for each in inputs]
    function = getattr(fused_softmax, case.name)
    if case.name in LINEAR:
        y = function(inputs[0], inputs[1][:n], target, **case.options)
    else:
        y = function(inputs[0][:, :n], target if case.name in LOSSES else 1, **case.options)
    gradients = list(torch.autograd.grad(y.sum(), inputs)) if case.graded else []
    if gradients and case.name in LINEAR:
        gradients[1] = gradients[1][here]
    elif gradients:
        gradients[0] = gradients[0][:, here]
    if case.name in ("softmax", "log_softmax"):
        padding = 0.0 if case.name == "softmax" else -torch.inf
        y = torch.nn.functional.pad(y, (0, x.shape[1] - n), value=padding)[:, here]
    return y.detach(), gradients


def outcome(case, group, device, transport):
    """("right" or "off", how), ("nan", ""), or ("raised", the error) of one call on this rank."""
    try:
        y, inputs = made(case, group, device, transport)
        if case.name == "sample":
            if case.wrong is None:
                truth, _ = wanted(case, group, device)
                same = y.tokens.equal(truth.tokens) and y.valid.equal(truth.valid)
                return "right" if same else "off", f"{y} {truth}"
            return ("nan", "") if not y.valid.any() else ("off", "tokens")
        gradients = list(torch.autograd.grad(y.sum(), inputs)) if case.graded and y.requires_grad else []
        if case.wrong is not None:
            padding = {"softmax": 0.0, "log_softmax": -torch.inf}.get(case.name, torch.nan)
            return ("nan", "") if (y.isnan() | (y == padding)).all() else ("off", f"{y}")
        truth, of_inputs = wanted(case, group, device)
        for ours, true in zip((y.detach(), *gradients), (truth, *of_inputs), strict=True):
            tolerance = TOLERANCE[case.dtype]
            torch.testing.assert_close(ours.double().cpu(), true, rtol=tolerance, atol=tolerance, equal_nan=True)
        return "right", ""
    except AssertionError as error:
        return "off", str(error)
    except Exception as error:
        return "raised", f"{type(error).__name__}: {error}"


def outcomes(group, device, transport, asked, settled, recovers):
    """[(the case, its outcome)] of calls in turn.

    settled: waits for the device, after a call that may fail. recovers: whether a call after one that was wrong raises
    once. Its outcome is then "recovered" and what the same call gives, or what it gave if it did not raise.
    """
    found, spoilt = [], False
    for case in asked:
        now = outcome(case, group, device, transport)
        if spoilt:
            raised = now[0] == "raised" and SPOILT in now[1]
            now = outcome(case, group, device, transport) if raised else ("not recovered", str(now))
        spoilt = recovers and case.wrong is not None
        if case.wrong is not None:
            settled()
        found.append((case, now))
    return found


def check(of_ranks, n, n_wrong):
    """That calls were right on all ranks, and those that were wrong on one an error on all."""
    wrong = 0
    for of_case in zip(*of_ranks, strict=True):
        case = of_case[0][0]
        kinds = {now[0] for _, now in of_case}
        if case.wrong is None:
            assert kinds == {"right"}, of_case
        else:
            wrong += 1
            assert kinds <= {"raised", "nan"}, of_case
    assert (len(of_ranks[0]), wrong) == (n, n_wrong)
