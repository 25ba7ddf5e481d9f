"""The committed results: what makes each file of benchmarks/results, and whether a file is of this source.

`fused-softmax bench all` makes them anew, in the order of this table.
"""

from collections.abc import Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, NamedTuple

from fused_softmax.bench.cases import Case
from fused_softmax.bench.measure import sweeps
from fused_softmax.bench.results import fingerprint, record
from fused_softmax.core.described import number_of

GPUS = {"h200": "NVIDIA H200", "h100": "NVIDIA H100 80GB HBM3"}  # after which files are named
ALONE = "--provider fused_softmax"
BESIDE_TORCH = "--provider fused_softmax,torch"
BESIDE_PEERS = f"{BESIDE_TORCH},liger,quack"
COLS = ",".join(map(str, (*sweeps.WIDTHS, 2097152)))
LONG_COLS = "50257,65536,100003,128256,131072,151936,262144,524288,1048576,2097152"
LONG_SHAPES = "4185x128256,4096x131072,2048x262144,1024x524288,512x1048576,256x2097152"


class Row(NamedTuple):
    """A file: what a report calls it, and the arguments of `fused-softmax bench` that make it, without --out."""

    title: str
    arguments: str


_FILES = {
    "softmax": Row(
        "softmax, 128 to 2 Mi columns, beside torch.compile",
        f"tutorial --cols {COLS} --dtype float32,bfloat16 {BESIDE_PEERS},torch.compile,hybrid",
    ),
    "cross_entropy": Row("Cross entropy and its gradient", f"cross-entropy {BESIDE_TORCH},quack"),
    "linear_cross_entropy": Row(
        "Cross entropy of a linear layer",
        "linear-cross-entropy --quick --provider "
        "'fused_softmax,torch,liger,cce,in one chunk,chunks of 256,summed in place,32 in place'",
    ),
    "log_prob": Row("Log-probabilities with the entropy, and their gradient", f"log-prob {BESIDE_TORCH}"),
    "divergence": Row("Divergences from a teacher, and their gradient", f"divergence --quick {BESIDE_TORCH},liger"),
    "tutorial": Row("softmax of 4096 rows, 256 to 12672 columns", "tutorial --provider fused_softmax,torch,naive"),
    "backward": Row("Gradients of softmax and log_softmax", f"backward {BESIDE_PEERS}"),
    "logsumexp": Row("logsumexp", f"logsumexp {BESIDE_TORCH}"),
    "masked": Row("softmax of attention scores: causal, masked, biased", f"masked {BESIDE_TORCH}"),
    "dims": Row("softmax over strided dims", f"dims {BESIDE_TORCH}"),
    "few_rows": Row("softmax of 1 to 132 rows", f"few-rows {BESIDE_PEERS}"),
    "batch": Row("softmax of 4096 columns, few to many rows", f"batch {BESIDE_TORCH} --quick"),
    "small": Row("softmax of short rows and of few rows", f"small {BESIDE_TORCH} --quick"),
    "vocab": Row("softmax of real vocabularies, also to float32", f"vocab {BESIDE_PEERS} --quick"),
    "float16": Row(
        "softmax in float16, 128 to 2 Mi columns",
        f"custom --cols {COLS} --elements 134217728 --dtype float16 {BESIDE_TORCH}",
    ),
    "long_bf16": Row(
        "softmax of long bfloat16 rows",
        f"custom --cols {LONG_COLS} --elements 134217728 --dtype bfloat16 {BESIDE_TORCH}",
    ),
    "long_rows": Row(
        "softmax of 512 Mi bfloat16 elements", f"custom --shape {LONG_SHAPES} --dtype bfloat16 {BESIDE_TORCH}"
    ),
    "sweep_fp32": Row(
        "softmax of float32, every 256 columns",
        f"tutorial --quick --cols 256:40961:256 --elements 128Mi --dtype float32 {ALONE}",
    ),
    "sweep_bf16": Row(
        "softmax of bfloat16, every 128 columns",
        f"tutorial --quick --cols 128:40961:128 --elements 128Mi --dtype bfloat16 {ALONE}",
    ),
    "sweep_fp16": Row(
        "softmax of float16, every 1024 columns",
        f"tutorial --quick --cols 512:40961:1024 --elements 128Mi --dtype float16 {ALONE}",
    ),
    "peaks": Row("Widths around each of the planner's thresholds", f"peaks {ALONE}"),
    "sampling": Row("Tokens drawn from logits, by filter", f"sampling --quick {BESIDE_TORCH}"),
    "router": Row("Tokens to experts, and the gradient of their weights and losses", f"router {BESIDE_TORCH}"),
    "router_losses": Row("Tokens to experts with counts and losses, and of groups", f"router-losses {BESIDE_TORCH}"),
    "segments": Row(
        "softmax of segments and its gradient: graphs, texts, hubs",
        "segments --provider 'fused_softmax,torch,torch.compile,pyg,torch_scatter,padded,padded compiled'",
    ),
    "attention": Row(
        "Attention and its gradient, also with a bias, softcap or sinks",
        "attention --quick --provider 'fused_softmax,torch,sdpa cudnn,flex,own kernels'",
    ),
    "step": Row("Steps of training a Llama, and of GRPO", "step"),
    "cold": Row("First calls, with an empty cache of kernels", "cold --at-once 6"),
}
COMMITTED = {f"{gpu}_{name}": row for gpu in GPUS for name, row in _FILES.items()}
# Made by torchrun, which starts as many ranks: `bench all` leaves them out.
OVER_RANKS = {
    f"{gpu}_shards_{ranks}": Row(f"Rows in shards over {ranks} GPUs", "shards") for gpu in GPUS for ranks in (2, 4, 8)
}


def of_gpu(gpu: str) -> list[str]:
    """The files named after a GPU of this name; all where none are."""
    return [each for each in COMMITTED if GPUS.get(each.partition("_")[0]) == gpu] or list(COMMITTED)


@dataclass(frozen=True)
class State:
    """Whether a file is of this source and machine, and why not. failed: how many points of a current one failed."""

    word: Literal["current", "stale", "missing"]
    why: str = ""
    failed: int = 0

    def __str__(self) -> str:
        return ": ".join(filter(None, (self.word, self.why))) + (f", {self.failed} failed" if self.failed else "")


def state(
    path: Path, environment: Mapping[str, Any], wanted: Collection[tuple[Case, str] | str], effort: Mapping[str, Any]
) -> State:
    """Compare a file with what would be measured now.

    environment: the present one; without a GPU in it, kernels are compared and no GPU or version.
    wanted: each case and provider that the file's arguments ask for, or each first call by its name. effort: rounds
        and others, as a run records them.
    """
    if not path.exists():
        return State("missing")
    try:
        run = record.read(path)
    except (OSError, ValueError) as error:
        return State("stale", record.one_line(str(error)))
    operations = {each[0].operation for each in wanted if not isinstance(each, str)}
    if why := fingerprint.difference(run.environment, environment, operations):
        return State("stale", why)
    facts = _facts(run, environment, effort)
    changes = [f"{name} {then} then, {now} now" for name, then, now in facts if then != now]
    if not run.complete:
        changes.append("its run stopped early")
    there = {(point.case, point.provider) for point in run.points} | {each.name for each in run.first_calls}
    if lacking := len(set(wanted) - there):
        changes.append(f"lacks {lacking} of its {number_of(len(wanted), 'point')}")
    if changes:
        return State("stale", "; ".join(changes))
    return State("current", "of the kernels of this source", len(record.failures(run)))


def _facts(
    run: record.Run, environment: Mapping[str, Any], effort: Mapping[str, Any]
) -> list[tuple[str, object, object]]:
    """What a file's figures depend on beside the kernels: each fact then and now."""
    pairs = [(name, run.options.get(name), now) for name, now in effort.items()]
    if not environment["gpu"]:
        return pairs
    pairs += [(name, run.environment.get(name), environment[name]) for name in ("torch", "triton")]
    then, now = run.environment.get("gpu") or {}, environment["gpu"]
    return [*pairs, *((f"GPU {name}", then.get(name), now.get(name)) for name in ("name", "plans"))]
