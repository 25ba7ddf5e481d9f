"""Tables on pages: each stands between two markers, and a command fills it or says that it is stale.

What a table shows is the affair of `readme`, `overview` and `simulated`. Standard library only.
"""

import argparse
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from fused_softmax.bench.results import record
from fused_softmax.core import files


def markers(place: str = "") -> tuple[str, str]:
    """The markers at the beginning and the end of a table."""
    name = f"results {place}".strip()
    return f"<!-- {name}:begin -->", f"<!-- {name}:end -->"


def table_row(cells: Sequence[str]) -> str:
    return f"| {' | '.join(cells)} |"


def replace(text: str, table: str, place: str = "") -> str:
    """`text` with `table` between the markers. Each marker must occur once, in order."""
    begin, end = markers(place)
    if text.count(begin) != 1 or text.count(end) != 1 or text.index(begin) > text.index(end):
        raise ValueError(f"needs {begin} and, after it, {end}, once each")
    before, rest = text.split(begin)
    return f"{before}{begin}\n{table}\n{end}{rest.split(end)[1]}"


def fill(page: Path, table: str, place: str, *, check: bool) -> list[Path]:
    """Puts the table on the page, or with `check` leaves the page as it is. Returns the page if it was stale."""
    record.require_regular(page)
    with naming(page):
        old = page.read_text(encoding="utf-8")
        new = replace(old, table, place)
    if new != old and not check:
        files.write_whole(page, new.encode())
    return [page] if new != old else []


@contextmanager
def naming(path: Path) -> Iterator[None]:
    """A wrong or missing value within is a ValueError that names the file."""
    try:
        yield
    except (KeyError, ValueError) as error:
        said = f"no {error}" if isinstance(error, KeyError) else str(error).removeprefix(f"{path.name} ")
        said = "it is not text in UTF-8" if isinstance(error, UnicodeError) else said
        raise ValueError(f"{path}: {said}") from error


def command(module: str, description: str) -> argparse.ArgumentParser:
    """The parser of a command that `run` runs. What it takes before the page is added before `run`."""
    return argparse.ArgumentParser(f"python -m fused_softmax.bench.{module}", description=description)


def run(
    parser: argparse.ArgumentParser,
    arguments: Sequence[str] | None,
    update: Callable[[argparse.Namespace], Iterable[Path]],
) -> int:
    """The exit code of a command: 2 for what cannot be read, and 1 if --check finds a stale file.

    update: brings files up to date, or with `check` leaves them, and returns those that were stale.
    """
    parser.add_argument("page", type=Path, help="Markdown file with the two markers")
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if something is stale")
    options = parser.parse_args(arguments)
    try:
        stale = list(update(options))
    except OSError as error:
        parser.error(f"{error.filename}: {error.strerror or error}")
    except ValueError as error:
        parser.error(str(error))
    if options.check:
        for path in stale:
            print(f"{path} is stale: run this again without --check", file=sys.stderr)
    return int(options.check and bool(stale))
