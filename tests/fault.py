"""What a fault is. The files of faults_of/ list them, a file a layer:

    in core/calls.py
    guard-without-dtype: test_calls.py::test_a_call_is_found_for_tensors_like_its_own_alone
    - tensor.stride(), tensor.dtype, tensor.device
    + tensor.stride(), tensor.device

A fault is in the file that was named last. After its name stand the nearest tests; ", compiles" before the colon says
that they compile kernels. More tests follow after "; " or in lines of their own, indented. Several lines of - or of +
are one text: all that stands after the sign and one space, trailing spaces included.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

FOLDER = Path(__file__).with_name("faults_of")


class Fault(NamedTuple):
    """`new` in the place of `old`, which stands once in src/fused_softmax/`file`.

    nearest: the tests that should fail by it, below tests/. compiles: whether those compile kernels.
    """

    layer: str
    name: str
    file: str
    old: str
    new: str
    nearest: tuple[str, ...]
    compiles: bool


def read(path: Path) -> Iterator[Fault]:
    """The faults of one layer's file. ValueError where a line is none of a fault's."""
    file, blocks = "", []
    for number, line in enumerate(path.read_text().splitlines(), 1):
        kind, _, rest = line.partition(" ")
        if kind == "in":
            file = rest
        elif kind in ("-", "+") and blocks:
            blocks[-1][kind].append(rest)
        elif line.startswith("  ") and blocks:
            blocks[-1]["tests"] += line.strip().split("; ")
        elif ":" in line and file:
            name, _, tests = line.partition(":")
            name, _, compiles = name.partition(", ")
            given = {"name": name, "file": file, "compiles": compiles == "compiles"}
            blocks.append(given | {"tests": tests.strip().split("; ") if tests else [], "-": [], "+": []})
        elif line:
            raise ValueError(f"{path.name}:{number}: {line!r} is no line of a fault")
    for each in blocks:
        old, new = ("\n".join(each[sign]) for sign in "-+")
        yield Fault(path.stem, each["name"], each["file"], old, new, tuple(each["tests"]), each["compiles"])


FAULTS = tuple(fault for path in sorted(FOLDER.glob("*.diff")) for fault in read(path))
