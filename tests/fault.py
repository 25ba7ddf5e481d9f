"""What a fault is. The files faults_of_*.py list them, each of one part of the package."""

from typing import NamedTuple


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
    compiles: bool = False


def of(layer, name, file, old, new, *nearest, compiles=False):
    return Fault(layer, name, file, old, new, nearest, compiles)
