"""What a fault is; tests/faults_of_kernels.py, and of help, calls and sampling, list them."""

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
