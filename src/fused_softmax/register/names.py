"""Names of loaded modules that are bound to another package's functions."""

import sys
from collections.abc import Mapping
from typing import Any


def rebind(news: Mapping[int, Any], but: str) -> None:
    """Bind something new to every name of a module that is bound to what has one of these ids, but for one module's."""
    for module in [module for name, module in list(sys.modules.items()) if name != but]:
        for name, value in list(getattr(module, "__dict__", {}).items()):
            if id(value) in news:
                setattr(module, name, news[id(value)])
