"""Lets the package be imported where Triton is not installed: torch's path works, and a kernel says what it needs.

Modules that write or launch kernels import Triton as if it were always there. Where it is not, `install` gives these
modules alone a stand-in that takes their decorators and constants, and the package's other modules a message. For
everyone else, PyTorch first, Triton is still missing.
"""

import builtins
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec, PathFinder, SourceFileLoader
from types import ModuleType
from typing import Any, NoReturn

MESSAGE = (
    "the kernels of fused_softmax need Triton, which is not installed: pip install triton (on Linux). "
    "Tensors on the CPU need none: torch computes them"
)
PACKAGE = __name__.partition(".")[0]
STANDS_IN = ("core", "ranks", "ops", "explanation")  # parts that are imported on torch's path too
_TAKEN = frozenset({"jit", "constexpr", "constexpr_function"})  # what a module calls while it is imported


def install() -> None:
    """Stand in for Triton in the modules of this package that are imported from now on."""
    sys.meta_path.insert(0, _Finder())


def refuse(*_: Any, **__: Any) -> NoReturn:
    """Raises ModuleNotFoundError, whatever it is called with."""
    raise ModuleNotFoundError(MESSAGE, name="triton")


class StandIn:
    """A name of Triton: what it decorates or wraps is a stand-in too; whoever calls or reads another is told."""

    def __init__(self, name: str) -> None:
        self._name = name

    def __getattr__(self, name: str) -> "StandIn":
        if name.startswith("__"):
            raise AttributeError(name)
        return StandIn(f"{self._name}.{name}")

    def __call__(self, *args: Any, **kwargs: Any) -> "StandIn":
        if self._name.rpartition(".")[2] not in _TAKEN:
            refuse()
        # Of `@jit(...)`, what it returns is the decorator.
        return self if kwargs and not args else StandIn(f"{self._name}()")

    def __mro_entries__(self, bases: tuple[Any, ...]) -> tuple[()]:
        return ()  # of a class that would inherit from it

    def __iter__(self) -> NoReturn:
        refuse()

    def __repr__(self) -> str:
        return f"<{self._name}, without Triton>"


def _stand_in(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    """`__import__` with stand-ins for Triton's modules."""
    if level or name.partition(".")[0] != "triton":
        return builtins.__import__(name, globals, locals, fromlist, level)
    return StandIn(name if fromlist else "triton")


def _say(name: str, globals: Any = None, locals: Any = None, fromlist: Any = (), level: int = 0) -> Any:
    """`__import__` that says why Triton's modules are needed."""
    if level or name.partition(".")[0] != "triton":
        return builtins.__import__(name, globals, locals, fromlist, level)
    refuse()


class _Loader(SourceFileLoader):
    def exec_module(self, module: ModuleType) -> None:
        part = module.__name__.split(".")[1]
        # An import statement asks its own module's builtins.
        vars(module)["__builtins__"] = vars(builtins) | {"__import__": _stand_in if part in STANDS_IN else _say}
        super().exec_module(module)
        vars(module).update(_INSTEAD.get(module.__name__, {}))


# Launches are refused before they ask a stand-in anything. No C can be built, which is nothing to warn of here.
_INSTEAD: dict[str, dict[str, Any]] = {
    f"{PACKAGE}.core.launch": {"prepare": refuse},
    f"{PACKAGE}.core.native": {"build": lambda name, libraries=(): None},
}


class _Finder(MetaPathFinder):
    def find_spec(
        self, name: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        if not name.startswith(f"{PACKAGE}."):
            return None
        spec = PathFinder.find_spec(name, path, target)
        if spec is not None and isinstance(spec.loader, SourceFileLoader):
            spec.loader = _Loader(spec.loader.name, spec.loader.path)
        return spec
