"""The user's own table of plans: ladders that `fused-softmax bench tune` measured, by the GPU's name, in one JSON file.

It is read once in a process, when the first plan for a GPU is needed, never at import. If no planner could follow the
file, a warning says so, and the built-in ladders hold. Standard library only.
"""

import json
import os
import warnings
from pathlib import Path
from typing import Any

from fused_softmax.core import files
from fused_softmax.core.plan.ladders import Table, table_of

VARIABLE = "FUSED_SOFTMAX_PLANS"
SCHEMA = 1


def path() -> Path:
    """The file of the table.

    FUSED_SOFTMAX_PLANS names it; else it is plans.json in the user's folder of configuration, by the XDG rules.
    """
    if named := os.environ.get(VARIABLE):
        return Path(named)
    config = os.environ.get("XDG_CONFIG_HOME", "")
    return (Path(config) if os.path.isabs(config) else Path.home() / ".config") / "fused-softmax" / "plans.json"


def table_for(gpu: str) -> Table | None:
    """The table for a GPU by its name. None if there is no file, if the file has none for it, or if the file is bad."""
    try:
        where = path()
        return load(where).get(gpu) if where.exists() else None
    except (OSError, RuntimeError, ValueError) as error:  # RuntimeError: a user without a home
        told = f"{error.strerror or error}" if isinstance(error, OSError) else error
        warnings.warn(
            f"the table of plans is not used, the built-in ladders are: {told}. `fused-softmax bench tune` writes "
            f"another; {VARIABLE} names the file",
            RuntimeWarning,
            stacklevel=2,
        )
        return None


def load(where: Path) -> dict[str, Table]:
    """Every table of a file, by the GPU's name. ValueError for a file that is none."""
    try:
        data = json.loads(where.read_text())
    except UnicodeDecodeError as error:
        raise ValueError(f"{where.name} is no JSON") from error
    except json.JSONDecodeError as error:
        raise ValueError(f"{where.name} is no JSON: {error}") from error
    if not isinstance(data, dict) or data.get("schema") != SCHEMA or not isinstance(data.get("gpus"), dict):
        raise ValueError(f"{where.name} is not what `fused-softmax bench tune` writes, of schema {SCHEMA}")
    tables = {}
    for gpu, entry in data["gpus"].items():
        try:
            tables[gpu] = table_of(entry.get("ladders") if isinstance(entry, dict) else entry)
        except ValueError as error:
            raise ValueError(f"{where.name}, {gpu}: {error}") from error
    return tables


def save(where: Path, gpu: str, table: Table, environment: dict[str, Any]) -> None:
    """Put a GPU's table into a file, whole, beside those of other GPUs. ValueError for a file that is none."""
    data: dict[str, Any] = {"schema": SCHEMA, "gpus": {}}
    if where.exists():
        load(where)  # nothing that somebody else wrote is lost
        data = json.loads(where.read_text())
    data["gpus"][gpu] = {"environment": environment, "ladders": table.data()}
    files.write_whole(where, json.dumps(data, indent=1))
