"""The few lines of C of this package, built by Triton's own build utility when they are first asked for."""

import warnings
from functools import cache
from pathlib import Path
from typing import Any


@cache
def build(name: str, libraries: tuple[str, ...] = ()) -> Any:
    """The module in `name`.c, built once and kept in Triton's cache; None, and a warning, where it cannot be."""
    try:
        from triton.runtime.build import compile_module_from_src

        source = Path(__file__).with_name(f"{name}.c").read_text()
        return compile_module_from_src(source, f"fused_softmax_{name}", libraries=list(libraries))
    except Exception as error:
        warnings.warn(
            f"calls take more of host time, launches about 10 us each: {name}.c could not be built ({error})",
            RuntimeWarning,
            stacklevel=2,
        )
        return None
