"""Triton's cache of kernels, which is found again after its folder has moved.

Triton notes the files of a kernel by the paths that they had when they were written. After a move it would compile the
kernel again; where the old folder has some of the files, Triton 3.6 would fail for want of the others.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from triton import knobs
from triton.runtime.cache import FileCacheManager


class Beside(FileCacheManager):
    """Takes the files of a kernel from beside the note that names them. If one is missing, the kernel is not there."""

    def get_group(self, filename: str) -> dict[str, str] | None:
        try:
            names = list(json.loads(Path(self.cache_dir, f"__grp__{filename}").read_bytes())["child_paths"])
        except (OSError, ValueError, KeyError, TypeError):
            return None
        found = {name: path for name in names if (path := self.get_file(name))}
        return found if len(found) == len(names) else None


@contextmanager
def wherever_it_lies() -> Iterator[None]:
    """In here Triton reads its folder by `Beside`, unless the user has set another kind of cache."""
    if knobs.cache.manager_class is not None:
        yield
        return
    knobs.cache.manager_class = Beside
    try:
        yield
    finally:
        del knobs.cache.manager_class
