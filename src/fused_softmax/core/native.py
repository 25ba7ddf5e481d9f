"""The few lines of C of this package, built by Triton's own build utility when the first kernel is compiled."""

import warnings
from concurrent.futures import Future, ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any


def begin() -> None:
    """Start to build every module, each in a thread, so that Triton can compile the first kernels meanwhile."""
    for name, libraries in (("launcher", ("dl",)), ("lookup", ())):
        _begun(name, libraries)


@cache
def build(name: str, libraries: tuple[str, ...] = ()) -> Any:
    """The module in `name`.c, built once and kept in Triton's cache; None, and a warning, where it cannot be."""
    try:
        return _begun(name, libraries).result()
    except Exception as error:
        warnings.warn(
            f"calls take more of host time, launches about 10 us each: {name}.c could not be built ({error})",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


@cache
def _begun(name: str, libraries: tuple[str, ...]) -> "Future[Any]":
    try:
        return _threads().submit(_built, name, list(libraries))
    except RuntimeError:  # the interpreter is ending, and starts no thread
        done: Future[Any] = Future()
        try:
            done.set_result(_built(name, list(libraries)))
        except Exception as error:
            done.set_exception(error)
        return done


@cache
def _threads() -> ThreadPoolExecutor:
    return ThreadPoolExecutor(2, thread_name_prefix="fused_softmax_build")


def _built(name: str, libraries: list[str]) -> Any:
    from triton.runtime.build import compile_module_from_src

    source = Path(__file__).with_name(f"{name}.c").read_text()
    return compile_module_from_src(source, f"fused_softmax_{name}", libraries=libraries)
