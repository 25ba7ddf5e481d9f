"""How messages name things: a tensor by its shape, dtype and device, because it may have many values."""

import reprlib
from typing import Any

_MOST = 120  # characters of a string, or of what has a repr of its own


class _Repr(reprlib.Repr):
    """repr, with few elements of containers."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = _MOST

    def repr1(self, x: Any, level: int) -> str:
        if not isinstance(x, type) and hasattr(x, "shape") and hasattr(x, "dtype"):  # of torch, NumPy and others
            shape = shape_said(x)
            on = f" on {x.device}" if hasattr(x, "device") else ""
            return f"{type(x).__name__} of shape {shape}, {x.dtype}{on}"
        return super().repr1(x, level)


def shape_said(x: Any) -> str:
    """The shape of a tensor, as errors say it; a nested one of layout strided has none."""
    has_none = getattr(x, "is_nested", False) and str(x.layout) == "torch.strided"
    return "(nested)" if has_none else str(tuple(x.shape))


_repr = _Repr().repr


def described(value: Any) -> str:
    """What an error says of an argument, without a tensor's values.

    >>> described(0.5), described(torch.ones(2, 3))
    ('0.5', 'Tensor of shape (2, 3), torch.float32 on cpu')
    """
    return _repr(value)


def typed(value: Any) -> str:
    """The same after "must be a ..., not": its type too.

    >>> typed(0.5), typed(torch.ones(2, 3))
    ('float (0.5)', 'Tensor of shape (2, 3), torch.float32 on cpu')
    """
    said, kind = described(value), type(value).__name__
    return said if said.startswith(f"{kind} of shape") else f"{kind} ({said})"


def number_of(n: int, one: str, several: str = "") -> str:
    """A number of things: "1 row", "2 rows".

    >>> number_of(1, "row"), number_of(2, "row"), number_of(0, "is", "are")
    ('1 row', '2 rows', '0 are')
    """
    return f"{n} {one if n == 1 else several or one + 's'}"


def shape_of(*sizes: int | str) -> str:
    """A shape of which some sizes are any.

    >>> shape_of(2, "k"), shape_of("n")
    ('(2, k)', '(n,)')
    """
    return f"({', '.join(map(str, sizes))}{'' if sizes[1:] else ','})"
