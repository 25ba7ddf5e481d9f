"""Files that are written whole: no reader finds a part of one, and an interrupt leaves what was there."""

import contextlib
import os
import tempfile
from pathlib import Path
from typing import Any

TEXT: dict[str, Any] = {"encoding": "utf-8", "errors": "replace"}  # of what others print, whatever the locale


def write_whole(path: Path, content: str | bytes, *, force: bool = True) -> None:
    """Write beside the target, then into its place. An interrupt leaves the target as it was and no other file.

    Raises FileExistsError for a file that exists, unless forced. Any other OSError names the target too.
    """
    if path.exists() and not force:
        raise FileExistsError(f"{path} exists")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        descriptor, name = tempfile.mkstemp(dir=path.parent, prefix=".", suffix=".tmp")
        try:
            with os.fdopen(descriptor, "wb") as temporary:
                temporary.write(content.encode() if isinstance(content, str) else content)
            mask = os.umask(0)
            os.umask(mask)
            os.chmod(name, 0o666 & ~mask)  # mkstemp's file is its owner's alone
            if force:
                os.replace(name, path)
            else:
                os.link(name, path)  # fails if the file has appeared in the meantime
                os.unlink(name)
        except BaseException:
            with contextlib.suppress(FileNotFoundError):
                os.unlink(name)
            raise
    except OSError as error:
        raise OSError(error.errno, error.strerror or str(error), str(path)) from error
