"""TRL's trainers on this package, from apply() until undo(). The import needs neither TRL nor transformers."""

import fused_softmax.register.library  # noqa: F401  # registers the operators, as the first public name does
from fused_softmax.register.trl import apply, undo

__all__ = ["apply", "undo"]
