"""Makes the committed results anew, one file after another. What is current stays, and what was stopped continues."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from fused_softmax.bench.committed import State, state
from fused_softmax.bench.measure import cold, run, saving, steps
from fused_softmax.bench.measure.timing import ContextLost
from fused_softmax.bench.results import record
from fused_softmax.bench.results.record import CannotResume
from fused_softmax.bench.show.report import duration
from fused_softmax.core.described import number_of

Say = Callable[[str], object]


@dataclass(frozen=True)
class Renewal:
    """A committed file and the measurement that makes it."""

    name: str
    asked: run.Asked | cold.Asked | steps.Asked
    folder: Path

    @property
    def out(self) -> Path:
        return self.folder / f"{self.name}.json"

    def state(self, environment: Mapping[str, Any]) -> State:
        return state(self.out, environment, self.asked.points, self.asked.recorded)


def renew(
    renewals: Sequence[Renewal], environment: Mapping[str, Any], progress: Console, say: Say, anew: bool = False
) -> int:
    """Measure every file that is not current, or with `anew` every file. Each is written as soon as it is measured.

    environment: the present one, with a GPU. The exit code: 1 if a file or one of its points failed, 130 if
    interrupted, which keeps what was measured.
    """
    failed = False
    try:
        for renewal in renewals:
            found = renewal.state(environment)
            say(f"{renewal.name}: {found}")
            if anew or found.word != "current":
                failed |= not _renewed(renewal, progress, say, anew)
            else:
                failed |= bool(found.failed)
    except KeyboardInterrupt:
        say("Interrupted: what was measured is kept. --resume continues from here.")
        return 130
    except ContextLost as error:  # nothing more can be measured in this process
        say(f"Stopped: {error}. What was measured is kept. --resume continues from here.")
        return 1
    except saving.NotSaved as error:  # nor could another file be written
        say(f"Stopped: {error.message}. --resume continues from the files that were written.")
        return 1
    return int(failed)


def _renewed(renewal: Renewal, progress: Console, say: Say, anew: bool) -> bool:
    """Whether the file was measured and none of its points failed."""
    start = time.monotonic()
    try:
        measured, stopped = _measured(renewal, progress, say, resume=not anew)
    except saving.NotSaved:
        raise
    except Exception as error:
        say(f"{renewal.name}: failed: {record.one_line(error)}")
        return False
    if stopped == run.INTERRUPTED:
        raise KeyboardInterrupt
    if stopped:
        say(f"{renewal.name}: failed")
        raise ContextLost(stopped)
    failures = record.failures(measured)
    calls = measured.first_calls
    count = number_of(len(calls), "first call") if calls else number_of(len(measured.points), "point")
    words = f"{count} in {duration(time.monotonic() - start)}"
    say(f"{renewal.name}: measured now: {words}" + (f", {len(failures)} failed" if failures else ""))
    for line in record.without_figure(point for point in measured.points if not point.kernel):
        say(f"  {line}")
    return not failures


def _measured(renewal: Renewal, progress: Console, say: Say, resume: bool) -> tuple[record.Run, str]:
    """The run, and why it ended early or "". It goes on from a partial file, if that is of this source and machine."""
    if resume and record.partial_path(renewal.out).exists():
        try:
            return _measured_by(renewal, progress, resume=True)
        except CannotResume as error:
            say(f"{renewal.name}: its partial file is left out: {error}")
    return _measured_by(renewal, progress, resume=False)


def _measured_by(renewal: Renewal, progress: Console, resume: bool) -> tuple[record.Run, str]:
    asked, quiet = renewal.asked, Console(quiet=True)
    if isinstance(asked, cold.Asked):
        measured, stopped, _ = cold.measured(asked, quiet, progress, renewal.out, resume=resume)
    elif isinstance(asked, steps.Asked):
        measured, stopped, _ = steps.measured(asked, quiet, progress, renewal.out, resume=resume)
    else:
        measured, stopped, _ = run.measured(asked, quiet, progress, renewal.out, resume=resume)
    return measured, stopped
