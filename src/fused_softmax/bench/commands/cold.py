"""`fused-softmax bench cold`: which first calls its arguments ask for."""

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import click

from fused_softmax.bench import cases
from fused_softmax.bench.commands.arguments import (
    Recorded,
    force_option,
    list_option,
    listed,
    new_console,
    out_option,
    say_interrupted,
    values_of,
)
from fused_softmax.bench.commands.front import Whole
from fused_softmax.bench.commands.sweep import require_files, require_resumable
from fused_softmax.bench.entries.first_calls import CALLS
from fused_softmax.bench.show.progress import importing
from fused_softmax.interrupt import INTERRUPTED

if TYPE_CHECKING:
    from fused_softmax.bench.measure.cold import Asked


class _Cold(Recorded):
    def facts(self) -> dict[str, dict[str, str]]:
        return {"First calls": {name: each.about for name, each in CALLS.items()}}


def _parse(text: str) -> str:
    return cases.find("first call", text, CALLS)


@click.command(cls=_Cold, short_help="Time first calls and what they compile, in a new process for each row.")
@click.option(
    "--only", "names", metavar="NAME", multiple=True, callback=values_of(listed(_parse)),
    help="Only these; --list names them.",
)  # fmt: skip
@click.option(
    "--at-once", type=Whole(1), default=1, show_default=True, metavar="N",
    help="Processes at a time. Several share the cores' clocks and caches.",
)  # fmt: skip
@out_option(".json", "the results")
@click.option(
    "--resume", is_flag=True,
    help="Measure what --out does not contain yet. Refused if GPU, processor, versions or source differ.",
)  # fmt: skip
@force_option
@list_option
@click.pass_context
def cold(ctx: click.Context, names: list[str], at_once: int, out: Path | None, resume: bool, force: bool) -> None:
    """Time first calls on this GPU. Each row is a new process, which finds no compiled kernel.

    A row has the seconds of its calls until the GPU is idle, the number of kernels that they compile, and the seconds
    of each stage of the compiler. Importing PyTorch and making CUDA's context are timed separately. Some rows make
    several calls, one for each of a server's batch sizes from 1 to 512, or for each length of context. Ctrl-C keeps
    the rows that were measured.
    """
    require_resumable(out, resume=resume, force=force)
    require_files(out, replace=resume or force)
    with importing():
        from rich.console import Console

        from fused_softmax.bench.measure import cold as measuring
        from fused_softmax.bench.measure import measure, saving, verify
        from fused_softmax.bench.results.record import CannotResume
        from fused_softmax.bench.show import report
    if not measure.on_gpu():
        interpreted = "kernels are interpreted in this process (FUSED_SOFTMAX_INTERPRET=1), so they cannot be timed"
        raise click.ClickException(interpreted if verify.interpreting() else "no GPU: nothing was measured")
    console = new_console()
    try:
        run, stopped, written = measuring.measured(
            _asked(ctx, names, at_once), console, Console(stderr=True), out, resume
        )
    except CannotResume as error:
        raise click.UsageError(str(error)) from None
    except measuring.Failed as error:
        raise click.ClickException(str(error)) from None
    except saving.NotSaved as error:
        if error.run:
            report.print_run(error.run, console)
        raise
    report.print_run(run, console)
    report.print_end(run, console, stopped, [written] if written else [])
    if stopped:
        say_interrupted(ctx)
    ctx.exit(INTERRUPTED if stopped else 0)


def asked(arguments: Sequence[str], out: str) -> "Asked":
    """The first calls that arguments of `fused-softmax bench cold` ask for. out: the name of the file for them."""
    ctx = cold.make_context("cold", list(arguments))
    ctx.meta["typed"] += ["--out", out]
    return _asked(ctx, ctx.params["names"], ctx.params["at_once"])


def _asked(ctx: click.Context, names: Sequence[str], at_once: int) -> "Asked":
    from fused_softmax.bench.measure.cold import Asked
    from fused_softmax.bench.results import record

    command = record.command_line(["bench", "cold", *ctx.meta["typed"]])
    return Asked(command, [name for name in CALLS if name in names or not names], at_once)
