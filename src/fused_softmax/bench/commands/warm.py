"""`--warm` of `fused-softmax bench`: what a measurement will launch is compiled before it, or on another machine."""

import time
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

import click

from fused_softmax.bench.show.progress import busy, importing
from fused_softmax.core.described import number_of

if TYPE_CHECKING:
    from fused_softmax.bench.measure.run import Asked


def warm_options(command: Any) -> Any:
    warm = click.option(
        "--warm", is_flag=True,
        help="First compile, on all cores, what this package's calls will launch. Without a GPU, do only that.",
    )  # fmt: skip
    device = click.option(
        "--device", type=click.Choice(["h100", "h200"]),
        help="The card that --warm compiles for.  [default: this machine's GPU]",
    )  # fmt: skip
    return warm(device(command))


def without_options(typed: list[str]) -> list[str]:
    """The arguments without these options, which change no figure."""
    found, rest = [], iter(typed)
    for each in rest:
        if each == "--device":
            next(rest, None)
        elif each != "--warm" and not each.startswith("--device="):
            found.append(each)
    return found


def measures(warm: bool, device: str | None) -> bool:
    """Whether a measurement follows. UsageError for options that make no sense together, or on this machine."""
    if device and not warm:
        raise click.UsageError("--device names the card that --warm compiles for: give --warm too")
    if not warm:
        return True
    with importing():
        import torch

        from fused_softmax.bench.committed import GPUS
        from fused_softmax.bench.measure import verify
    if verify.interpreting():
        interpreted = "kernels are interpreted in this process (FUSED_SOFTMAX_INTERPRET=1)"
        raise click.UsageError(f"{interpreted}, so --warm would compile nothing")
    if not torch.cuda.is_available():
        if device is None:
            raise click.UsageError("there is no GPU here: name the card by --device")
        return False
    here = torch.cuda.get_device_name()
    if device and GPUS[device] != here:
        raise click.UsageError(
            f"--device {device} is no {here}, which would be measured: leave it out, or hide this GPU to compile only"
        )
    return True


def compile_ahead(asked: Iterable["Asked"], device: str | None, measured: bool) -> bool:
    """Compile what measurements will launch, and say so. Returns whether all cases could be planned.

    measured: whether the measurements follow, so that standard output is for their table. UsageError if no case has a
    provider of this package.
    """
    from fused_softmax.bench.measure import ahead

    cases = ahead.ours(asked)
    if not cases:
        raise click.UsageError("--warm has nothing to compile: it is for sweeps with a provider of this package")
    began, left_out = time.perf_counter(), list[str]()

    def failed(case: Any, why: str) -> None:
        left_out.append(f"note: {case} is not compiled ahead: {' '.join(why.split())}")

    try:
        with busy(f"compiling for {number_of(len(cases), 'case')}"):
            kernels = ahead.compiled(cases, device, failed)
    except (RuntimeError, OSError) as error:  # a kernel that does not compile
        raise click.ClickException(" ".join(str(error).removeprefix("warmup: ").split())) from None
    for line in left_out:
        click.echo(line, err=True)
    compiled, seconds = sum(not each.found for each in kernels), time.perf_counter() - began
    of_cases = number_of(len(cases), "case takes", "cases take")
    end = "" if measured else "; no GPU: nothing was measured"
    click.echo(
        f"{of_cases} {number_of(len(kernels), 'kernel')}: {compiled} compiled in {seconds:.1f} s{end}", err=measured
    )
    return not left_out
