"""transformers, which whoever calls this package's functions needs, and whoever imports them does not."""

from importlib.util import find_spec


def need_transformers(name: str) -> None:
    """Raise ImportError, in one line, if the package is not installed."""
    if find_spec("transformers") is None:
        raise ImportError(
            f"{name} needs the transformers package, which is not installed: pip install 'fused-softmax[hf]'"
        )
