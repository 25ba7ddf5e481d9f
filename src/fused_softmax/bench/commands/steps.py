"""`fused-softmax bench step`: which steps its arguments ask for, by which providers."""

import importlib.util
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from fused_softmax.bench import cases, catalog
from fused_softmax.bench.commands.arguments import (
    Recorded,
    force_option,
    list_option,
    listed,
    new_console,
    out_option,
    providers_option,
    say_interrupted,
    values_of,
)
from fused_softmax.bench.commands.front import Whole
from fused_softmax.bench.commands.sweep import require_files, require_resumable
from fused_softmax.bench.show.progress import importing
from fused_softmax.interrupt import INTERRUPTED

if TYPE_CHECKING:
    from fused_softmax.bench.measure.steps import Asked

DTYPE = "bfloat16"
# The shapes of each step: batch x length x vocabulary. By default torch.compile gets only the first of these.
CASES = {"step_llama": "4x2048x128256,1x8192x128256", "step_grpo": "8x1024x128256"}
STEPS, QUICK_STEPS = 10, 3


class _Steps(Recorded):
    def facts(self) -> dict[str, dict[str, str]]:
        of = {name: ", ".join(names) for name, names in catalog.PEERS_OF_STEPS.items()}
        return {
            "Steps": {name: step.title for name, step in catalog.STEPS.items()},
            "Their providers": of,
            "Providers": {catalog.OWN: f"also {', '.join(catalog.NAMED[catalog.OWN].aliases)}"},
        }


def _step(text: str) -> str:
    return cases.find("step", text, catalog.STEPS)


def _provider(text: str) -> str:
    known = dict.fromkeys(name for names in catalog.PEERS_OF_STEPS.values() for name in names)
    return cases.find("provider", text, known, catalog.PROVIDER_ALIASES)


def chosen(
    steps: Sequence[str], shapes: Sequence[cases.Case], names: Sequence[str], quick: bool
) -> list[tuple[cases.Case, list[str]]]:
    """The cases that options ask for, each with its providers, and at the end those that take longest.

    UsageError for a shape that is no step's.
    """
    for case in shapes:
        if (len(case.shape), case.dim) != (3, -1) or case.shape[1] < 2:
            raise click.UsageError(f"a shape is batch x length x vocabulary, the length at least 2; not {case.size}")
    found: list[tuple[cases.Case, list[str]]] = []
    last: list[tuple[cases.Case, list[str]]] = []
    for step, text in CASES.items():
        if steps and step not in steps:
            continue
        for i, case in enumerate(shapes or cases.parse_shapes(text)):
            if quick and i and not shapes:
                continue
            case = replace(case, dtype=DTYPE, operation=step)
            mine = [name for name in catalog.PEERS_OF_STEPS[step] if name in names or not names]
            found.append((case, [name for name in mine if name not in catalog.COMPILING]))
            if names or shapes or not (quick or i):
                last.append((case, [name for name in mine if name in catalog.COMPILING]))
    return [each for each in (*found, *last) if each[1]]


@click.command(cls=_Steps, short_help="Time steps of training a Llama, beside torch, torch.compile, Liger and TRL.")
@click.option(
    "--op", "steps_asked", metavar="NAME", multiple=True, callback=values_of(listed(_step)),
    help="Only these; --list names them.",
)  # fmt: skip
@click.option(
    "--shape", "shapes", metavar="BATCHxLENGTHxVOCABULARY", multiple=True, callback=values_of(cases.parse_shapes),
    help="Another batch, length and vocabulary.",
)  # fmt: skip
@providers_option("Repeat, or separate by commas; --list names them.  [default: all]", listed(_provider))
@click.option("--quick", is_flag=True, help="Measure the first shape of each, in few steps, and compile nothing.")
@click.option("--reps", type=Whole(1, 100), help=f"Timed steps.  [default: {STEPS}]")
@click.option("--seed", type=Whole(0, 2**63 - 1), default=0, show_default=True, help="Seed of weights and tokens.")
@out_option(".json", "the results")
@click.option(
    "--resume", is_flag=True,
    help="Measure what --out does not contain yet. Refused if GPU, versions, source, --reps or --seed differ.",
)  # fmt: skip
@force_option
@list_option
@click.pass_context
def step(ctx: click.Context, /, **options: Any) -> None:
    """Time training steps of a model with the sizes of Llama 3.2 1B and random weights, and of GRPO with it.

    A step is a forward and a backward pass, without an optimizer. A provider gets a figure only if its loss and its
    gradients are about as close to those of float32 as torch's or TRL's own. Needs transformers, and the packages of
    the other projects that it measures. Without a GPU the model is a small one. Ctrl-C keeps what was measured.
    """
    out: Path | None = options.pop("out")
    resume, force = options.pop("resume"), options.pop("force")
    require_resumable(out, resume=resume, force=force)
    require_files(out, replace=resume or force)
    wanted = _wanted(options)
    if importlib.util.find_spec("transformers") is None:
        raise click.ClickException("transformers is missing: pip install 'fused-softmax[hf]'")
    with importing():
        from rich.console import Console

        from fused_softmax.bench.measure import run, saving
        from fused_softmax.bench.measure import steps as measuring
        from fused_softmax.bench.results.record import CannotResume
        from fused_softmax.bench.show import report
    console, progress = new_console(), Console(stderr=True)
    try:
        found, stopped, written = measuring.measured(_asked(ctx.meta["typed"], wanted), console, progress, out, resume)
    except CannotResume as error:
        raise click.UsageError(str(error)) from None
    except saving.NotSaved as error:
        if error.run:
            report.print_run(error.run, console)
        raise
    report.print_run(found, console)
    report.print_end(found, console, stopped, [written] if written else [])
    report.say_if_nothing(found, progress, stopped)
    code = run.exit_code(found, stopped)
    if code == INTERRUPTED:
        say_interrupted(ctx)
    ctx.exit(code)


def asked(arguments: Sequence[str], out: str) -> "Asked":
    """The measurement that arguments of `fused-softmax bench step` ask for. out: the name of the file for it."""
    ctx = step.make_context("step", list(arguments))
    files = ("out", "resume", "force")
    return _asked([*ctx.meta["typed"], "--out", out], _wanted({k: v for k, v in ctx.params.items() if k not in files}))


def _wanted(options: dict[str, Any]) -> dict[str, Any]:
    """The fields of an `Asked` but its command, or a UsageError."""
    shapes, names, quick = options["shapes"], options["names"], options["quick"]
    found = chosen(options["steps_asked"], shapes, names, quick)
    if not found:
        raise click.UsageError(f"none of these steps has the provider {names[0]!r}; --list names them")
    steps = options["reps"] or (QUICK_STEPS if quick else STEPS)
    facts = {"standing": not shapes, "named": bool(names), "steps": steps, "seed": options["seed"]}
    return {"chosen": found, **facts}


def _asked(typed: list[str], wanted: dict[str, Any]) -> "Asked":
    from fused_softmax.bench.measure.steps import Asked
    from fused_softmax.bench.results import record

    return Asked(record.command_line(["bench", "step", *typed]), **wanted)
