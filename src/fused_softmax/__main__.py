"""The command's entry. Before it can answer Ctrl-C, in one line, it imports almost nothing.

Until then Python itself answers, by a traceback: no code of ours runs while the interpreter starts. So this file, what
it imports and the package's `__init__.py` stay as quick as they are.
"""

from fused_softmax.interrupt import Leaving, leave_at_once


def main() -> None:
    with Leaving():
        from fused_softmax.cli import main as command
    try:
        command(prog_name="fused-softmax")
    except SystemExit as end:
        leave_at_once(end.code if isinstance(end.code, int) else int(end.code is not None))
        raise


if __name__ == "__main__":
    main()
