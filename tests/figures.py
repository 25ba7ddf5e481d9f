"""Where each figure in the prose of README and docs comes from, and in the model of measured/ranks.md.

A figure is a number with a unit of time, speed, memory or ratio, a decimal number, or a number in a right-aligned
column of a table. What a command writes between two markers is checked elsewhere; versions and code are no figures.

A page is read by blocks: a paragraph, an item of a list, a row of a table. Each block with figures has an entry in
SOURCES, under words that only this block has. Its figures are numbers of its sources, in the same order, rounded to the
decimals that the page gives.
"""

import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import cache, partial
from pathlib import Path
from statistics import geometric_mean
from typing import NamedTuple

import torch

from fused_softmax.bench import simulated
from fused_softmax.bench.catalog import OWN
from fused_softmax.bench.results import record
from fused_softmax.core.plan import H200, plan_rows
from fused_softmax.ops.attention.hopper_bias import _DS_BYTES
from fused_softmax.ops.losses import linear_by_rows
from fused_softmax.ops.sampling import turns
from fused_softmax.ops.sampling.launches import spec_of
from fused_softmax.ops.sampling.options import Sampling
from fused_softmax.ops.sampling.plan import plan_draws
from fused_softmax.ranks import groups as distributed
from fused_softmax.ranks.plan import plan_peers

ROOT = Path(__file__).parents[1]
RANKS = ROOT / "measured/ranks.md"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md")), RANKS]
MI = 2**20

_NAMED = re.compile(
    r"(?:torch|Triton|Python|transformers|NumPy|Inference|capability|top-[kp]|min-p)\W+(?:older than )?"
    r"\d[\d.]*(?: to \d[\d.]*)?"
)
_UNIT = r"(?:us|ms|s|[GT]B/s|TFLOP/s|Gb/s|%|[KMG]i?B|Mi|times|seconds|minutes)(?![\w/])"
_FIGURE = re.compile(
    r"(?<![\w.])\d+(?:\.\d+(?:e-?\d+)?(?![\w.]*\d)"
    rf"|(?=,? (?:(?:to|and|or|instead of) \d+ )?{_UNIT}))"
)
_NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e-?\d+)?")


class Block(NamedTuple):
    words: str
    figures: list[str]


def blocks(page: Path) -> Iterator[Block]:
    """Those of a page that have figures."""
    text = page.read_text()
    if page == RANKS:  # the rest of it is a source
        text = text.partition("## How many ranks\n")[2]
        assert text, "the model is there"
    text = re.sub(r"<!-- results[^>]*:begin -->.*?:end -->|^```.*?^```$", "", text, flags=re.M | re.S)
    for paragraph in re.split(r"\n\s*\n", text):
        right: list[bool] = []  # of a table's columns, whether they have figures
        for item in re.split(r"\n(?=\s*- |\s*\d+\. |\|)", paragraph):
            words = " ".join(item.split())
            cells = words.strip("|").split("|") if words.startswith("|") else []
            if cells and not set(words) - set("|:- "):
                right = [cell.strip().endswith("-:") for cell in cells]
                continue
            if any(right):
                figures = [each for cell, is_right in zip(cells, right, strict=True) if is_right
                           for each in _NUMBER.findall(_bare(cell))]  # fmt: skip
            else:
                figures = _FIGURE.findall(_bare(words))
            if figures:
                yield Block(words, figures)


def _bare(words: str) -> str:
    """Without code, the targets of links, and the numbers of versions and options."""
    return _NAMED.sub("", re.sub(r"\]\([^)]*\)", "]", re.sub(r"`[^`]*`", "", words)))


class Source(NamedTuple):
    """Numbers of a file of the repository: those of a text that stands in it, or what `values` computes."""

    path: str
    text: str = ""
    values: Callable[[], Sequence[float]] | None = None

    def numbers(self) -> list[str]:
        if self.values is not None:
            return [repr(float(value)) for value in self.values()]
        assert self.text in _words_of(self.path), f"{self.path} does not have {self.text!r}"
        return _NUMBER.findall(self.text)


def agree(figures: Sequence[str], sources: Sequence[Source]) -> bool:
    """Whether the figures are numbers of the sources, one after another."""
    numbers = iter([number for source in sources for number in source.numbers()])
    return all(any(_is(figure, number) for number in numbers) for figure in figures)


def _is(figure: str, number: str) -> bool:
    if "e" in figure or "." not in number:
        return float(figure) == float(number)
    decimals = len(figure.partition(".")[2])
    return decimals <= len(number.partition(".")[2]) and f"{float(number):.{decimals}f}" == figure


@cache
def _words_of(path: str) -> str:
    return " ".join((ROOT / path).read_text().split())


def measured(room: str, *texts: str) -> list[Source]:
    return [Source(f"measured/{room}.md", text) for text in texts]


def source(path: str, text: str) -> Source:
    return Source(f"src/fused_softmax/{path}", text)


def computed(path: str, *values: Callable[[], float]) -> Source:
    return Source(path, values=lambda: [value() for value in values])


def ratios(name: str, dtype: str, of: Callable[..., bool], *which: Callable[..., float]) -> Source:
    """Of `fused_softmax` at the points of a results file: min, max, or both. dtype: "" for any."""
    path = f"benchmarks/results/h200_{name}.json"

    def values():
        points = [each for each in _points(path) if dtype in ("", each.dtype) and each.provider == "fused_softmax"]
        found = [each.ratio for each in points if each.ratio and of(each)]
        assert found, path
        return [each(found) for each in which]

    return Source(path, values=values)


def slower(name: str, operation: str, *providers: str) -> Source:
    """How many times as long as `fused_softmax` each takes: the geometric mean of what both have in a results file."""
    path = f"benchmarks/results/h200_{name}.json"

    def mean(provider: str) -> float:
        points = [each for each in _points(path) if each.operation == operation and each.kernel]
        ours, theirs = ({each.case: each.kernel.p50_us for each in points if each.provider == who}
                        for who in ("fused_softmax", provider))  # fmt: skip
        return geometric_mean(theirs[case] / ours[case] for case in theirs if case in ours)

    return computed(path, *[partial(mean, each) for each in providers])


def draws(which: Iterable[tuple[str, int, int]]) -> list[Source]:
    """us of `fused_softmax` for bf16 logits: (operation, rows, vocabulary) of each."""
    path = "benchmarks/results/h200_sampling.json"

    def us(wanted: tuple[str, int, int]) -> float:
        own = [each for each in _points(path) if each.dtype == "bfloat16" and each.provider == "fused_softmax"]
        (point,) = (each for each in own if (each.operation, each.n_rows, each.n_cols) == wanted)
        return point.kernel.p50_us

    return [computed(path, *[partial(us, each) for each in which])]


def attended(operation: str, *sizes: int) -> list[Source]:
    """us of our own kernels, the fastest of torch's ways where it has one, and FlexAttention; then with gradients."""
    path = "benchmarks/results/h200_attention.json"

    def values():
        for wanted in (operation, f"{operation}_gradient"):
            of_case = [each for each in _points(path) if each.operation == wanted and shape(*sizes)(each)]
            us = {each.provider: each.kernel.p50_us for each in of_case if each.kernel}
            torchs = [us[name] for name in ("torch", "sdpa cudnn") if name in us]
            composed = operation in ("attention_softcap", "attention_sinks")
            if us:
                yield from (us["own kernels"], *([] if composed else [min(torchs)]), us["flex"])

    return [Source(path, values=lambda: list(values()))]


def took(name: str, operation: str, sizes: Sequence[int], *wanted: str, dtype: str = "bfloat16") -> Source:
    """Of points of a results file, as "torch ms": a provider, and us, ms, MiB, GiB, or one of these beside the result.

    The result of "MiB beside" is as large as the input, as a gradient is.
    """
    path = f"benchmarks/results/h200_{name}.json"

    def value(each: str) -> float:
        provider, fact = each.removesuffix(" beside").rsplit(" ", 1)
        of_case = [p for p in _points(path) if (p.operation, p.provider, p.dtype) == (operation, provider, dtype)]
        (point,) = (p for p in of_case if p.case.shape == tuple(sizes))
        if fact in ("us", "ms"):
            return (point.kernel or point.call).p50_us / {"us": 1, "ms": 1e3}[fact]
        result = point.case.tensor_bytes if each.endswith(" beside") else 0
        return (point.memory_bytes - result) / {"MiB": MI, "GiB": 1024 * MI}[fact]

    return computed(path, *[partial(value, each) for each in wanted])


def capped() -> float:
    """A forward pass with a softcap, over what it took by a plain kernel."""
    (found,) = attended("attention_softcap", 2, 16, 4096, 256)
    (before,) = measured("attention", "a softcap took 873 forward")
    return float(found.numbers()[0]) / float(before.numbers()[0])


def more_notes() -> float:
    """KiB that a row of top-p has for kept columns."""
    plan, options = plan_draws(8, 128256, 4, H200), Sampling(top_p=0.9)
    alone, more = (spec_of(plan, options, -1, True, torch.float32, reports).scratch for reports in (False, True))
    return (more - alone) * 8 / 2**10


def gradients_beyond_cudnn(*operations: str) -> Source:
    """By how many % our kernels' gradients of 4 x 32 x 4096 x 128, less the forward pass, take longer at most."""
    path = "benchmarks/results/h200_attention.json"

    def us(operation: str, provider: str) -> float:
        (found,) = (each for each in _points(path) if (each.operation, each.provider) == (operation, provider)
                    and shape(4, 32, 4096, 128)(each))  # fmt: skip
        return found.kernel.p50_us

    def percent() -> float:
        ours, theirs = ({each: us(f"{each}_gradient", name) - us(each, name) for each in operations}
                        for name in ("own kernels", "sdpa cudnn"))  # fmt: skip
        return 100 * (max(ours[each] / theirs[each] for each in operations) - 1)

    return computed(path, percent)


FILTERS = "sample", "sample_greedy", "sample_top_k", "sample_min_p", "sample_top_p"
DRAWS = (8, 128256), (512, 128256), (512, 262144)


def elements(name: str) -> Source:
    path = f"benchmarks/results/h200_{name}.json"
    return computed(path, lambda: max(each.n_rows * each.n_cols for each in _points(path)) / MI)


@cache
def _points(path: str) -> list[record.Point]:
    return record.read(ROOT / path).points


def shape(*sizes: int) -> Callable[[record.Point], bool]:
    return lambda point: point.parameters.get("shape") == list(sizes)


def once(itemsize: int) -> Callable[[], float]:
    """How many Mi columns of a row are read once, whatever their number."""
    columns = range(MI, 8 * MI, 4000)
    return lambda: next(n for n in columns if plan_rows(1, n, itemsize, H200).strategy == "stream") / MI


def peered(inputs: int = 1) -> float:
    """How many Mi columns of a shard go by peers; 2 inputs: of both shards of a divergence."""
    columns = range(4096, 8 * MI, 4096)
    return next(n for n in columns if plan_peers(1, n + 1, n + 1, 2, 2, H200, inputs=inputs) is None) / MI


def failed(provider: str) -> Source:
    path = "benchmarks/results/h200_backward.json"
    points = [each for each in _points(path) if (each.provider, each.status) == (provider, "wrong")]
    return Source(path, values=lambda: [float(each) for each in re.findall(r"\d\.\d+e-\d+", points[0].message)])


PREFETCH = [
    source("core/plan/ladders.py", "(UNBOUNDED, 6 << 20)"),
    source("core/plan/ladders.py", "(UNBOUNDED, 12 << 20)"),
]
TOLERANCE = [
    source("bench/commands/commands.py", 'default=2, show_default=True, help="Percent by which a median must change')
]
MODEL = "src/fused_softmax/bench/simulated.py"
DS = computed("src/fused_softmax/ops/attention/hopper_bias.py", lambda: _DS_BYTES / 2**30)
ACROSS = "| bf16 8192 x 128256 | 561 | 519 |"

SOURCES: dict[str, dict[str, list[Source]]] = {
    "README.md": {
        "`make demo` took": measured("bench", "| little | 34 |", "pip downloaded 234 MB.", "| 24 | 1.7 |"),
        "| softmax over any dim": [took("vocab", "softmax", (4096, 128256), f"{OWN} ms", "torch ms")],
        "| train a language model": [
            took("cross_entropy", "cross_entropy_gradient", (4096, 128256), f"{OWN} ms", f"{OWN} MiB beside",
                 "torch ms", "torch MiB beside"),
        ],
        "| train from hidden states": [
            took("linear_cross_entropy", "linear_cross_entropy", (8192, 4096, 128256), f"{OWN} ms", f"{OWN} MiB",
                 "32 in place ms", "32 in place MiB", "torch ms", "torch MiB", "liger ms", "liger MiB"),
        ],
        "| log-probabilities and entropy": [
            took("log_prob", "log_prob_gradient", (8192, 151936), f"{OWN} ms", f"{OWN} MiB beside", "torch ms",
                 "torch GiB beside"),
            took("step", "step_grpo", (8, 1024, 128256), f"{OWN} ms", "trl ms"),
        ],
        "| draw tokens": [took("sampling", "sample_top_p", (512, 128256), f"{OWN} us", "torch ms")],
        "| attention with a bias": [
            took("attention", "attention_biased_gradient", (4, 32, 2048, 128), f"{OWN} ms", "flex ms", "torch ms"),
        ],
        "| route tokens": [took("router", "route", (16384, 256), f"{OWN} us", "torch us")],
        "| softmax of segments": measured("segments", "14 M of 8 heads | 250 | 325 | 0.77", "of 8 heads | 250 |"),
        "| a vocabulary over": measured("ranks", ACROSS),
        "| train a Hugging Face model": [
            took("step", "step_llama", (4, 2048, 128256), *[f"{each} {fact}" for each in
                 ("own compiled", "torch.compile", "liger", OWN, "torch") for fact in ("ms", "GiB")]),
        ],
        "In other runs on an H200": [
            *measured("losses", "50.6 ms where all logits", "25.1.1 | 154.6 | 1068 |"),
            *measured("losses", "128256 | 25.3 | 23.9 | 1.81 | 1.56 |", "25.3 | 23.9 | 1.81 | 1.56 |", "1.56 |"),
            *measured("sampling", "396, 573 |"),
        ],
        "Rows longer than the chip can hold": [computed("src/fused_softmax/plan", once(2))],
    },
    "index.md": {
        "A Python package of Triton kernels": [
            took("cross_entropy", "cross_entropy_gradient", (4096, 128256), f"{OWN} ms", "torch ms"),
        ],
    },
    "attention.md": {
        "`attention` computes what": [DS],
        "| backward | if a bias has": [DS],
        "Backward, one kernel computes": [DS],
        "- **Kernels in Gluon**": [gradients_beyond_cudnn("attention", "attention_causal")],
        "| causal 4 x 32 x 4096 x 128": attended("attention_causal", 4, 32, 4096, 128),
        "| full 4 x 32 x 4096 x 128": attended("attention", 4, 32, 4096, 128),
        "| full 8 x 16 x 4096 x 64": attended("attention", 8, 16, 4096, 64),
        "| causal 2 x 16 x 16384 x 64": attended("attention_causal", 2, 16, 16384, 64),
        "| causal 8 x 16 x 1001 x 96": attended("attention_causal", 8, 16, 1001, 96),
        "| full 64 x 12 x 197 x 64": attended("attention", 64, 12, 197, 64),
        "| bias for each head, with its gradient": attended("attention_biased", 4, 32, 2048, 128),
        "| triangle: bias": attended("attention_biased", 384, 4, 384, 32),
        "| Swin: bias": attended("attention_biased", 4096, 4, 49, 32),
        "| softcap, causal": attended("attention_softcap", 2, 16, 4096, 256),
        "| sinks and a window": attended("attention_sinks", 2, 64, 8192, 64),
        "| one query of 16 x 32": attended("attention_decode", 16, 8, 32768, 128),
        "with 8192 keys": attended("attention_decode", 1, 8, 8192, 128),
        "the same with 65536 keys": attended("attention_decode", 1, 8, 65536, 128),
    },
    "commands.md": {
        "`fused-softmax bench compare A.json": TOLERANCE,
        "`fused-softmax serve` listens": [source("trace/server/serve.py", "SECONDS = 5.0")],
    },
    "design.md": {"it asks the L2 cache": PREFETCH},
    "examples.md": {
        f"[{name}.py](#{name}py)": measured("bench", f"| {name}.py | {seconds} |")
        for name, seconds in {
            "train_tiny": 7.3, "apply_llama": 4.4, "grpo_tiny": 9.0, "generate": 6.0, "server_step": 4.0,
            "attention_bias": 5.0, "graph_attention": 3.4, "two_ranks": 8.9,
        }.items()
    },
    "limits.md": {
        "bf16 rows of 262144 to 2097152": [
            elements("softmax"), ratios("softmax", "bfloat16", lambda p: p.n_cols >= 262144, max, min),
        ],
        "the same, 512 Mi": [
            elements("long_rows"), ratios("long_rows", "bfloat16", lambda p: p.n_cols >= 262144, max, min),
        ],
        "| fp32 rows of 2097152": [ratios("softmax", "float32", lambda p: p.n_cols == 2097152, min)],
        "gradients of bf16 rows": [ratios("backward", "bfloat16", lambda p: p.n_cols >= 524288, min, max)],
        "gradients of fp32 rows": [ratios("backward", "float32", lambda p: p.n_cols == 1048576, min)],
        "softmax's gradient of bf16 rows": [
            ratios("backward", "bfloat16", lambda p: (p.operation, p.n_cols) == ("softmax_backward", 100003), min)
        ],
        "64 x 4096 x 512 over dim 1": [
            ratios("dims", "float32", shape(64, 4096, 512), min), ratios("dims", "bfloat16", shape(64, 4096, 512), min),
        ],
        "4096 x 32768 over dim 0": [
            ratios("dims", "float32", shape(4096, 32768), min), ratios("dims", "bfloat16", shape(4096, 32768), min),
        ],
        "logsumexp of 1024 x 131072": [ratios("logsumexp", "bfloat16", lambda p: p.n_cols == 131072, min)],
        "logsumexp over strided dims, fp32": [
            ratios("logsumexp", "float32", lambda p: "shape" in p.parameters, min, max)
        ],
        "logsumexp over strided dims, bf16": [
            ratios("logsumexp", "bfloat16", lambda p: "shape" in p.parameters, min, max)
        ],
        "256 x 1024 x 77": measured("softmax", "16 by 32, 4 parts | 44.5 | 0.52 |"),
        "an added mask for each head": [ratios("masked", "bfloat16", lambda p: p.operation == "softmax_biased", min)],
        "with a bool mask |": [ratios("masked", "bfloat16", lambda p: p.operation == "softmax_masked", min)],
        "with causal scores": [ratios("masked", "bfloat16", lambda p: p.operation == "softmax_causal", min)],
        "| bf16 rows of 33, 49": measured(
            "softmax", "| 1.5 -> 3.1 | 2.1 -> 2.5 |", "| 3.1 -> 3.3 |", "| 2.7 -> 3.7 | 3.8 |",
            "127 columns ran at 4.03",
        ),
        "logsumexp of bf16 rows of 33, 77": measured(
            "softmax", "| 0.6 -> 2.9 |", "| 1.2 -> 2.7 |", "| 1.9 -> 3.4 | 3.4 -> 3.7 |", "which only reads, at 3.95"
        ),
        "**Long rows.**": [computed("src/fused_softmax/plan", once(2), once(4))],
        "| forward, of an input that requires": measured("core", "Function 0.88 to 1.02) | 1.42 to 1.45 |"),
        "| softmax, forward and backward": measured("core", "softmax, log_softmax | 1.10 to 1.17,"),
        "| log_softmax, forward and backward": measured("core", "1.23 to 1.33 | | cross_entropy"),
        "| cross_entropy, forward alone": measured("core", "without gradient, with it | 1.13 to 1.20,"),
        "| cross_entropy, forward and backward": measured("core", "1.09 to 1.18 | | a scale never seen"),
        "under `enable()`, forward |": measured("core", "cross_entropy | 1.23 to 1.31,", "1.27 to 1.39 |"),
        "under `enable()`, forward and backward": measured("core", "cross_entropy | 1.06 to 1.10, 1.19 to 1.31"),
        "| softmax of a number of rows": measured("core", "1.06; 3.4 to 4.1,"),
        "| cross_entropy of a number of rows": measured("core", "4.1, 4.2 to 4.3 |"),
    },
    "measure.md": {
        "The speed of a copy itself": measured("bench", "The same copy is up to 10 % slower on other buffers"),
        "This lists the changes that are": TOLERANCE,
    },
    "results.md": {
        "**[Softmax](#softmax)** runs": [
            ratios("softmax", "", lambda p: True, min, max),
            slower("softmax", "softmax", "torch", "torch.compile", "liger"),
        ],
        "**[Losses with their gradient]": [
            ratios("cross_entropy", "", lambda p: p.operation == "cross_entropy_gradient" and p.n_rows > 8, min, max),
            ratios("cross_entropy", "", lambda p: p.operation == "cross_entropy_gradient" and p.n_rows == 8, min, max),
            slower("cross_entropy", "cross_entropy_gradient", "torch"),
        ],
        "**[A linear layer's loss]": [
            ratios("linear_cross_entropy", "", lambda p: True, min, max),
            slower("linear_cross_entropy", "linear_cross_entropy", "torch", "liger"),
        ],
        "**Log-probabilities with the entropy**": [
            slower("log_prob", each, "torch") for each in ("log_prob", "log_prob_gradient")
        ],
        "**[Divergences](#divergences)** with": [
            slower("divergence", f"divergence{each}_gradient", provider)
            for provider in ("torch", "liger") for each in ("", "_reverse_kl", "_jsd", "_tvd")
        ],
        "**[Tokens](#sampling)**": [
            slower("sampling", each, "torch") for each in ("sample", "sample_top_k", "sample_top_p")
        ],
        "**Routing**": [slower("router", each, "torch") for each in ("route", "route_gradient")],
        "**[Attention](#attention)** that is": [
            slower("attention", "attention_causal", "sdpa cudnn"),
            slower("attention", "attention_causal_gradient", "sdpa cudnn"),
            *[slower("attention", f"attention_{each}_gradient", "flex") for each in ("biased", "sinks", "softcap")],
            slower("attention", "attention_decode", "sdpa cudnn"),
        ],
        "For bf16 rows that several programs share": [
            computed("measured/losses.md", lambda: 100 * (1 - 510 / 537), lambda: 100 * (1 - 531 / 580)),
            *measured(
                "losses", "262144 580 -> 531", "262144 580", "128256 537 -> 510", "128256 537", "226 -> 209.",
                "50257 226",
            ),
        ],
        "| beside its inputs |": measured(
            "losses", "45.5, 1074 |", "the gradients are 1066.", '"fp32" | 38.3, 3070 |',
            "| Liger | 53.6 to 55.0 | 1129 |", "| torch | 40.6 | 6012 |",
        ),
        "A call now also copies": measured("losses", "3070 -> 3134 MiB"),
        "long bf16 rows of 512 Mi": [elements("long_rows")],
        "runs each provider for": measured("bench", "runs untimed for 100 ms first.", "is 0.99 to 1.06 in the last"),
        "one point of `h200_backward.json`": [failed("fused_softmax")],
    },
    "route.md": {
        "**Counts and losses** come from the same": measured(
            "routing", "k 8 | 8.8 |", "| 16.1 | 13 |", "| 16.7 | 13 |"
        ),
    },
    "sample.md": {
        **{f"| {n} x {vocab} |": draws((each, n, vocab) for each in FILTERS) for n, vocab in DRAWS},
        "**The memory of the kernels** beside": [
            computed("src/fused_softmax/ops/sampling/turns.py", more_notes, lambda: turns._MOST_BYTES / MI),
            *measured("sampling", "as have 16 MiB of notes.", "four drafts take 12.4 MiB", "by top-p 40.6"),
            computed("src/fused_softmax/ops/sampling/turns.py", lambda: turns._MOST_BYTES / MI),
            computed("src/fused_softmax/ops/sampling/turns.py", lambda: turns._MOST_BYTES / MI),
        ],
        "top-p is the slowest": draws(("sample_top_p_peaked", n, 128256) for n in (8, 512)),
    },
    "softmax.md": {
        "It costs nothing with thousands of rows": measured(
            "softmax", "1.00, 1.05, 0.99 |", "| 1.34, 1.31, 1.20 |", "1.36, 3.88, 1.82 |"
        ),
    },
    "segments.md": {
        "On an H200 the forward pass takes": [
            computed("measured/segments.md", lambda: 325 / 250, lambda: 187 / 73.1),
            *measured("segments", "bf16 | 8.6 | 39.6 |"),
        ],
    },
    "post-training.md": {
        "both passes of GRPO's head": measured(
            "losses", "128256 | 25.3 | 23.9 |", "| 64.0 | 51.6 |", "| 45.6 | 47.5 |", "| 88.8 | 6.6 | 29.4 | 1.96 |",
            "| 19.1 | 18.5 | 0.34 | 1.01 |",
        ),
        "The ranks tell each other 3 numbers": measured("ranks", "where they are kept (0.94)", "651): 0.97 of half"),
    },
    "shards.md": {
        "With `peer`, one launch does": [computed("src/fused_softmax/ranks/plan.py", peered, partial(peered, 2))],
        "loss of 8192 x 128256 | 2 H200s | 575": measured("ranks", "| bf16, 2 ranks | 494 | 575 (1.16) | 824 | 1015 |"),
        "fp32 loss of 8192 x 128256 | 2": measured("ranks", "| fp32, 2 ranks | 998 | 1060 (1.06) | 1505 | 1993 |"),
        "loss of 8192 x 128256 | 4 H200s": measured("ranks", "| bf16, 4 ranks | 249 | 305 (1.22) | 440 | 1009 |"),
        "softmax of 1024 x 262144 | 4 H200s": measured("ranks", "262144, 4 ranks | 66 | 77 (1.16) | 171 | 260 |"),
        "8192 x 4096 to 128256 | 4 H200s": measured("ranks", "128256, 4 ranks | 10018 | 11317 | 11135 | 38750 |"),
        "loss of 8192 x 128256 | 2 H100s": measured("ranks", "8192 x 128256 bf16 | 704 | 747 | 1094 | 1438 | 12333 |"),
        "loss of 64 x 128256 | 2 H100s": measured("ranks", "64 x 128256 fp32 | | 17.8 | 37.9 | 28.6 | 215 |"),
        "softmax of 1024 x 262144 | 2": measured("ranks", "1024 x 262144 bf16 | 182 | 186 | | 364 | 2494 (DTensor) |"),
        "8192 x 4096 to 128256 | 2 H100s": measured("ranks", "to 128256 bf16 | | 21209 | 21563 | 39211 | 31019 |"),
        "In an earlier run on two H200s": measured("ranks", ACROSS),
    },
    "groups.md": {
        "For these comparisons each rank": [
            computed("src/fused_softmax/ranks/groups.py", lambda: distributed._SAID / 2**10)
        ],
    },
    "ranks.md": {
        "a copy on an H200 |": [computed(MODEL, lambda: simulated.MEMORY / 1e12)],
        "a round of messages": [source("bench/simulated.py", "MESSAGE_US = 0.66")],
        "an all_gather of 3 numbers": [
            *measured("ranks", "| 31 to 38 |"), source("bench/simulated.py", "GATHER_US = 38.0"),
        ],
        "NVLink has": [computed(MODEL, lambda: 2 * simulated.NVLINK / 1e9, lambda: simulated.NVLINK / 1e9)],
        "InfiniBand adapters": [computed(MODEL, lambda: 8 * simulated.NETWORK / 1e9, lambda: simulated.NETWORK / 1e9)],
        "the first loss takes 305": measured("ranks", "| 305 (1.22) | 440 |"),
    },
    "story.md": {"it asks the L2 cache": PREFETCH},
    "train.md": {
        "Memory limits the loss": [computed("docs/train.md", lambda: 8192 * 128256 * 2 / 2**30)],
        "It computes the logits in chunks": [
            computed("src/fused_softmax/ops/losses/linear_by_rows.py", lambda: linear_by_rows._CHUNK_BYTES / 2**30)
        ],
    },
}  # fmt: skip
