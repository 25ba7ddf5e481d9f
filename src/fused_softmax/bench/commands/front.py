"""The front door: a group of commands whose errors and interrupts are one line, and what shows that work goes on."""

import contextlib
import errno
import io
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

import click

from fused_softmax.interrupt import INTERRUPTED

NO_ROOM = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


class Front(click.Group):
    """A group that ends in one line on stderr: exit code 2 for a wrong value, 1 for a failure, 130 for Ctrl-C."""

    def main(
        self,
        args: Sequence[str] | None = None,
        prog_name: str | None = None,
        complete_var: str | None = None,
        standalone_mode: bool = True,
        **extra: Any,
    ) -> Any:
        call: Callable[[], Any] = partial(super().main, args, prog_name, complete_var, standalone_mode=False, **extra)
        if not standalone_mode:
            return call()
        if getattr(sys.stdout, "errors", None) == "strict" and isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # a name that the locale cannot write is no failure
        try:
            code = call()
        except click.ClickException as error:
            if isinstance(error, getattr(click.exceptions, "NoArgsIsHelpError", ())):  # of click 8.2 and later
                error.show()
            else:
                click.echo(f"Error: {' '.join(error.format_message().split())}", err=True)
            sys.exit(error.exit_code)
        except click.Abort:
            click.echo("interrupted", err=True)
            sys.exit(INTERRUPTED)
        except UnicodeEncodeError as error:
            wrong = ascii(error.object[error.start : error.end])[:80]
            click.echo(f"Error: a name or a text contains {wrong}, which is not valid Unicode", err=True)
            sys.exit(2)
        except OSError as error:
            if error.errno not in NO_ROOM:
                raise
            click.echo(f"Error: cannot write {error.filename or 'standard output'}: {error.strerror}", err=True)
            with contextlib.suppress(OSError):
                sys.stdout.close()  # or Python tries once more to write what is left, and complains
            sys.exit(1)
        sys.exit(code if isinstance(code, int) else 0)

    def invoke(self, ctx: click.Context) -> Any:
        try:
            return super().invoke(ctx)
        except KeyboardInterrupt:
            raise click.Abort from None  # before click prints an empty line of its own
        except ModuleNotFoundError as error:
            if error.name != "triton":
                raise
            raise click.ClickException(str(error)) from None


class Whole(click.IntRange):
    """Integers of a range. Errors and help call a value an integer, where click's own call it an integer range."""

    name = "integer"


class Option(click.Option):
    """An option of which help and errors show one long name: `-o, --out`; other long names are accepted."""

    def get_help_record(self, ctx: click.Context) -> tuple[str, str] | None:
        with self._one_long_name():
            return super().get_help_record(ctx)

    def get_error_hint(self, ctx: click.Context | None) -> str:
        with self._one_long_name():
            return super().get_error_hint(ctx)

    @contextlib.contextmanager
    def _one_long_name(self) -> Iterator[None]:
        names = self.opts
        long = [name for name in names if name.startswith("--")]
        self.opts = [name for name in names if name not in long[1:]]
        try:
            yield
        finally:
            self.opts = names
