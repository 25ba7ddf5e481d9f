"""An operator's options as the fields of a dataclass, each declared once: its name, type, default and check.

Whatever lists options follows from them: the checks, and the schema and the arguments of the registered operator.
"""

import os
import sys
from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, Field, dataclass, field
from numbers import Integral, Real
from typing import Any, ClassVar, NoReturn, Self

from torch import Tensor

from fused_softmax.core.described import typed

BATCH_INVARIANT = "FUSED_SOFTMAX_BATCH_INVARIANT"
_asked = os.environ.get(BATCH_INVARIANT) == "1"


def by_environment() -> bool:
    """What batch_invariant=None means: whether the variable was 1 when this was imported."""
    return _asked


def is_bool(name: str, argument: str, value: Any) -> None:
    if not isinstance(value, bool):
        raise TypeError(f"{name}: {argument} must be a bool, not {typed(value)}")


def is_finite(value: Any) -> bool:
    """Whether a number is finite as a float. A very large int is not."""
    return -sys.float_info.max <= value <= sys.float_info.max


def plain_number(value: Any) -> Any:
    """A number of another library, such as NumPy, as a number of Python, which kernels take; all else as it is."""
    if type(value) in (int, float, bool) or not isinstance(value, Real):
        return value
    return int(value) if isinstance(value, Integral) else float(value)


def refuse_batch_invariant(name: str, why: str) -> NoReturn:
    """NotImplementedError for a call that would give a row other bits in another batch."""
    raise NotImplementedError(
        f"{name}: batch_invariant is not for this call, since {why}; batch_invariant=False stands against it, and "
        f"against {BATCH_INVARIANT}=1 in the environment"
    )


@dataclass(frozen=True)
class Option:
    """What an option is besides its name and default, which are the field's.

    type: as torch.library writes it.
    check: raises an error that names the function and the argument, if a value is not allowed. None if a room checks it
        with what it knows of the input.
    by_row: whether it is a number for all rows or a tensor of one a row. A registered operator takes two arguments for
        it.
    whole_rows: of a loss, whether it needs more of a row than its lse and its target's logit.
    of_kernels: whether it says how kernels compute, and nothing of the formula. The reference does not take it, and a
        registered operator takes it after all other arguments.
    """

    type: str
    check: Callable[[str, str, Any], None] | None = None
    by_row: bool = False
    whole_rows: bool = False
    of_kernels: bool = False


def option(default: Any, *given: Any, **named: Any) -> Any:
    """A field that is an option: its default, or MISSING, and an Option's arguments."""
    return field(default=default, metadata={"option": Option(*given, **named)})


class Options:
    """A dataclass whose fields are options, or some of them. names: of some options, where not the formula's."""

    OPTIONS: ClassVar[dict[str, Option]]
    FORMULA: ClassVar[tuple[str, ...]]
    DEFAULTS: ClassVar[dict[str, Any]]

    def __init_subclass__(cls):
        declared = {name: each for name, each in vars(cls).items() if isinstance(each, Field) and each.metadata}
        cls.OPTIONS = {name: each.metadata["option"] for name, each in declared.items()}
        cls.FORMULA = tuple(name for name, each in cls.OPTIONS.items() if not each.of_kernels)
        cls.DEFAULTS = {name: each.default for name, each in declared.items()}

    def options(self) -> dict[str, Any]:
        """As the public functions take them."""
        return {name: getattr(self, name) for name in self.OPTIONS}

    def formula(self) -> dict[str, Any]:
        """As the reference takes them."""
        return {name: getattr(self, name) for name in self.FORMULA}

    @classmethod
    def schema(cls, names: Iterable[str] | None = None) -> str:
        """As arguments of a registered operator, as torch.library writes them."""
        written = []
        for name in cls.FORMULA if names is None else names:
            default = cls.DEFAULTS[name]
            default = f'"{default}"' if isinstance(default, str) else default
            written.append(f"{cls.OPTIONS[name].type} {name}" + ("" if default is MISSING else f"={default}"))
            if cls.OPTIONS[name].by_row:
                written.append(f"Tensor? row_{name}=None")
        return ", ".join(written)

    def traced(self, names: Iterable[str] | None = None) -> tuple[Any, ...]:
        """As the registered operator takes them."""
        arguments: list[Any] = []
        for name in self.FORMULA if names is None else names:
            value, option = getattr(self, name), self.OPTIONS[name]
            if option.by_row and isinstance(value, Tensor):
                arguments += [self.DEFAULTS[name], value]
                continue
            is_number = option.type.startswith("float") and isinstance(value, Real)  # and none that a compiler traces
            arguments.append(float(value) if is_number else value)
            if option.by_row:
                arguments.append(None)
        return tuple(arguments)

    @classmethod
    def of_traced(cls, given: Sequence[Any], names: Iterable[str] | None = None, **more: Any) -> Self:
        """From such arguments, of which the last may be left out, and from other fields, which may overrule them."""
        rest, values = iter(given), {}
        for name in cls.FORMULA if names is None else names:
            number = next(rest, cls.DEFAULTS[name])
            by_row = next(rest, None) if cls.OPTIONS[name].by_row else None
            values[name] = number if by_row is None else by_row
        return cls(**values | more)
