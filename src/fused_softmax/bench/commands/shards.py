"""`fused-softmax bench shards`: which cases its arguments ask for, by which providers, and with what effort."""

import os
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import click

from fused_softmax.bench import cases, catalog
from fused_softmax.bench.commands import paths
from fused_softmax.bench.commands.arguments import (
    Recorded,
    also,
    dtypes_option,
    effort_options,
    force_option,
    list_option,
    new_console,
    out_option,
    providers_option,
    values_of,
)
from fused_softmax.bench.show.progress import importing

LINEAR = "linear_cross_entropy"
TORCHRUN = "torchrun --nproc-per-node 2 --no-python fused-softmax bench shards"
CASES = (
    ("cross_entropy_gradient", "8192x128256", ("bfloat16", "float32")),
    ("cross_entropy_gradient", "4096x152064", ("bfloat16",)),
    ("cross_entropy_gradient", "64x128256,1x128256", ("float32",)),
    (LINEAR, "8192x4096x128256", ("bfloat16",)),
    ("softmax", "1024x262144", ("bfloat16",)),
)  # as sweeps have them: operation, shapes of whole rows, dtypes


class _OverRanks(Recorded):
    def facts(self) -> dict[str, dict[str, str]]:
        of = {name: ", ".join(providers) for name, providers in catalog.PEERS_OF_SHARDS.items()}
        own = f"{' and '.join(catalog.BY_TRANSPORT)}; {also([catalog.OWN])[catalog.OWN]}"
        return {"Operations, and their providers": of, "Providers": {catalog.OWN: own}, "Dtypes": also(cases.ITEMSIZE)}


def _operations(text: str) -> list[str]:
    return [cases.find("operation", part, catalog.PEERS_OF_SHARDS) for part in text.split(",")]


def _providers(text: str) -> list[str]:
    known = dict.fromkeys((catalog.OWN, *(name for names in catalog.PEERS_OF_SHARDS.values() for name in names)))
    found = [cases.find("provider", part, known, catalog.PROVIDER_ALIASES) for part in text.split(",")]
    return [each for name in found for each in (catalog.BY_TRANSPORT if name == catalog.OWN else (name,))]


def chosen(
    operations: Sequence[str], shapes: Sequence[cases.Case], dtypes: Sequence[str], quick: bool
) -> list[cases.Case]:
    """The cases that options ask for. UsageError for a shape that an operation does not take."""
    found = []
    for operation, text, own_dtypes in CASES:
        if operations and operation not in operations:
            continue
        for case in shapes or cases.parse_shapes(text):
            ndim = 3 if operation == LINEAR else 2
            if (len(case.shape), case.dim) != (ndim, -1):
                continue
            found += [replace(case, dtype=dtype, operation=operation) for dtype in dtypes or own_dtypes]
    taken = {(case.shape, case.dim) for case in found}
    if left := [case.size for case in shapes if (case.shape, case.dim) not in taken]:
        takes = {name: "tokens x hidden x classes" if name == LINEAR else "rows x columns" for name in operations}
        what = "; ".join(f"{name} takes shapes of {dims}" for name, dims in takes.items())
        both = f"a shape is rows x columns, or of {LINEAR} tokens x hidden x classes"
        raise click.UsageError(f"{what or both}; not {left[0]}")
    found = cases.unique(found)
    return [found[0], found[-1]] if quick and not shapes else found


@click.command(cls=_OverRanks, short_help="Measure rows whose columns lie in shards over ranks, beside one GPU.")
@click.option("--op", "operations", metavar="NAME", multiple=True, callback=values_of(_operations), help="Only these.")
@click.option(
    "--shape", "shapes", metavar="ROWSxCOLS", multiple=True, callback=values_of(cases.parse_shapes),
    help="A shape of whole rows; of a linear layer, tokens x hidden x classes.",
)  # fmt: skip
@dtypes_option("each shape's")
@providers_option("Repeat, or separate by commas; --list names them.  [default: all]", _providers)
@effort_options("the first and the last shape")
@out_option(".json", "the results")
@force_option
@list_option
@click.pass_context
def shards(ctx: click.Context, /, **options: Any) -> None:
    """Measure rows whose columns lie in shards over ranks, one process each, beside one GPU that has the whole.

    Run it by torchrun, which starts any number of ranks: by NCCL on GPUs, by gloo on CPUs. Rank 0 prints and writes. A
    time is that of the slowest rank, and GB/s count what one rank must read and write of its shard.
    """
    shapes, out, force = options.pop("shapes"), options.pop("out"), options.pop("force")
    found = chosen(options.pop("operations"), shapes, options.pop("dtypes"), options["quick"])
    if out:
        paths.require_outputs([out], replace=force)
    if not {"RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"} <= os.environ.keys():
        raise click.UsageError(f"there are no ranks: run `{TORCHRUN}`")
    with importing():
        from fused_softmax.bench.measure import shards as measuring
        from fused_softmax.bench.measure.run import Asked
        from fused_softmax.bench.results import record

        command = record.command_line(["bench", "shards", *ctx.meta["typed"]])
    ctx.exit(measuring.run(Asked(command, found, standing=not shapes, **options), out, new_console()))
