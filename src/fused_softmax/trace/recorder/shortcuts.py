"""What Triton's interpreter works out anew at every operation, worked out once: it computes the same, 3 times as fast.

SHORTCUTS: (holder, name of its attribute, function from the old attribute to the new one), as CORRECTIONS are. They are
in place while a recording is made, and in the tests from the start.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import triton.language as tl
from triton.language import core
from triton.runtime import interpreter

_PLAIN = frozenset((int, float, bool, str, type(None), tl.tensor))


def _no_overflow_checks(options: Any) -> Any:
    """Every sum of integers is computed again in 64 bits, for an assertion that the interpreter leaves out."""
    return replace(options, sanitize_overflow=False)


def _by_name(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """NumPy's dtypes come from a table that is built at each look."""
    known: dict[str, Any] = {}

    def dtype_of(type: Any) -> Any:
        name = type.scalar.name
        if name not in known:
            known[name] = plain(type)
        return known[name]

    return dtype_of


def _block_type(plain: Callable[..., None]) -> Callable[..., None]:
    """A shape is validated once."""
    known: dict[tuple[int, ...], tuple[Any, int]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(shape)
        if sizes in known:
            self.element_ty = element_ty
            self.shape, self.numel = known[sizes]
            self.name = f"<{self.shape}, {element_ty}>"
        else:
            plain(self, element_ty, shape)
            known[sizes] = self.shape, self.numel

    return init


def _tensor(plain: Callable[..., None]) -> Callable[..., None]:
    """Tensors of one shape share the constexprs that describe it."""
    known: dict[tuple[int, ...], tuple[Any, Any]] = {}

    def init(self: Any, handle: Any, type: Any) -> None:
        sizes = tuple(type.shape) if type.is_block() else ()
        if sizes in known:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            self.numel, self.shape = known[sizes]
        else:
            plain(self, handle, type)
            known[sizes] = self.numel, self.shape

    return init


def _unwrap(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Most of what is asked for the value in its constexpr has none."""

    def unwrap(value: Any) -> Any:
        kind = value.__class__
        if kind is tl.constexpr:
            return value.value
        return value if kind in _PLAIN else plain(value)

    return unwrap


SHORTCUTS: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (interpreter.interpreter_builder, "options", _no_overflow_checks),
    (interpreter, "_get_np_dtype", _by_name),
    (core.block_type, "__init__", _block_type),
    (core.tensor, "__init__", _tensor),
    (core, "_unwrap_if_constexpr", _unwrap),
)
