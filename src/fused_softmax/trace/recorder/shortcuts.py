"""What Triton's interpreter works out anew at every operation, worked out once: the same results in half the time.

SHORTCUTS: (holder, name of its attribute, function from the old attribute to the new one), as CORRECTIONS are. They are
in place while a recording is made, and in the tests from the start.
"""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import triton.language as tl
from triton.language import core
from triton.language.semantic import TritonSemantic
from triton.runtime import interpreter

_PLAIN = frozenset((int, float, bool, str, type(None), tl.tensor))
_NUMBERS = frozenset((int, float))
_MADE = 500  # tensors of numbers that are kept


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
    known: dict[tuple[int, ...], tuple[Any, int, str]] = {}

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = tuple(shape)
        if sizes in known:
            self.element_ty = element_ty
            self.shape, self.numel, named = known[sizes]
            self.name = f"<{named}, {element_ty}>"
        else:
            plain(self, element_ty, shape)
            known[sizes] = self.shape, self.numel, str(self.shape)

    return init


def _tensor(plain: Callable[..., None]) -> Callable[..., None]:
    """Tensors of one shape share the constexprs that describe it."""
    known: dict[int, tuple[Any, Any, Any]] = {}  # by the identity of a shape, which types share and which lives on here

    def init(self: Any, handle: Any, type: Any) -> None:
        shape = type.shape if type.is_block() else ()
        found = known.get(id(shape))
        if found is not None and found[0] is shape:
            self.handle, self.type, self.dtype = handle, type, type.scalar
            _, self.numel, self.shape = found
        else:
            plain(self, handle, type)
            known[id(shape)] = shape, self.numel, self.shape

    return init


def _unwrap(plain: Callable[[Any], Any]) -> Callable[[Any], Any]:
    """Most of what is asked for the value in its constexpr has none."""

    def unwrap(value: Any) -> Any:
        kind = value.__class__
        if kind is tl.constexpr:
            return value.value
        return value if kind in _PLAIN else plain(value)

    return unwrap


def _operands(plain: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """Tensors of two types are brought to the types that they were brought to before.

    A number is the tensor that was made of it before.
    """
    known: dict[tuple[Any, ...], tuple[Any, Any]] = {}
    made: dict[tuple[Any, ...], Any] = {}

    def operands(self: Any, lhs: Any, rhs: Any, *flags: bool, **named: bool) -> tuple[Any, Any]:
        left, right = lhs.__class__, rhs.__class__
        if named:
            return plain(self, lhs, rhs, *flags, **named)
        if left is right is tl.tensor:
            types = lhs.type.name, rhs.type.name, flags
            if types in known:
                first, second = known[types]
                return lhs if first is None else first(self, lhs), rhs if second is None else second(self, rhs)
            found = plain(self, lhs, rhs, *flags)
            if all(map(_has_its_dims, (lhs, rhs), found)):
                known[types] = _bringing(lhs, found[0]), _bringing(rhs, found[1])
            return found
        number: Any = lhs if right is tl.tensor else rhs
        tensor = rhs if number is lhs else lhs
        if number.__class__ not in _NUMBERS or tensor.__class__ is not tl.tensor:
            return plain(self, lhs, rhs, *flags)
        key = tensor.type.name, number.__class__, repr(number), right is tl.tensor, flags  # 0.0 and -0.0 are equal
        if key in made:
            return (lhs, made[key]) if number is rhs else (made[key], rhs)
        found = plain(self, lhs, rhs, *flags)
        if found[number is lhs] is tensor:
            if len(made) >= _MADE:
                made.clear()
            made[key] = found[number is rhs]
        return found

    return operands


def _has_its_dims(given: Any, found: Any) -> bool:
    """Whether no dim was added to a tensor that had some."""
    return not given.type.is_block() or len(given.shape) == len(found.shape)


def _bringing(given: Any, found: Any) -> Callable[[Any, Any], Any] | None:
    """What casts tensors of one type to another, splats and broadcasts them; None if there is nothing to do."""
    if found is given:
        return None
    type = found.type
    casts, shape = given.type.scalar != type.scalar, [*type.shape] if type.is_block() else []

    def bring(semantic: Any, tensor: Any) -> Any:
        if casts:
            tensor = semantic.cast(tensor, type.scalar)
        if tensor.type.is_block():
            if tensor.type.name == type.name:
                return tensor
            handle = semantic.builder.create_broadcast(tensor.handle, shape)
        elif type.is_block():
            handle = semantic.builder.create_splat(type.to_ir(semantic.builder), tensor.handle)
        else:
            return tensor
        return semantic.tensor(handle, type)

    return bring


def _broadcast(plain: Callable[..., tuple[Any, Any]]) -> Callable[..., tuple[Any, Any]]:
    """Tensors that share the description of their shape have one shape."""

    def broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        return (lhs, rhs) if lhs.shape is rhs.shape else plain(self, lhs, rhs)

    return broadcast


def _patched(plain: Callable[..., None]) -> Callable[..., None]:
    """A function of the language is given who computes, without a copy of its arguments."""
    semantic = interpreter.interpreter_semantic

    def patch(obj: Any, name: str, member: Any, builder: Any, scope: Any) -> None:
        def called(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = semantic
            return member(*args, **kwargs)

        scope.set_attr(obj, name, called)

    return patch


SHORTCUTS: tuple[tuple[Any, str, Callable[[Any], Any]], ...] = (
    (interpreter.interpreter_builder, "options", _no_overflow_checks),
    (interpreter, "_get_np_dtype", _by_name),
    (core.block_type, "__init__", _block_type),
    (core.tensor, "__init__", _tensor),
    (core, "_unwrap_if_constexpr", _unwrap),
    (interpreter, "_patch_attr", _patched),
    (TritonSemantic, "binary_op_type_checking_impl", _operands),
    (TritonSemantic, "broadcast_impl_value", _broadcast),
)
