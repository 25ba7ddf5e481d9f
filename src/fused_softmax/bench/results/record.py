"""The record of a run: one JSON file with its environment, its command and a point for every shape and provider.

It contains no host name, user name or path. Files are replaced whole, so a reader never sees half a run. A run that
stops early leaves the earlier file alone and its own points in NAME.partial.json. A later run takes those of its points
that still hold, or says why it must not.
"""

import contextlib
import dataclasses
import errno
import hashlib
import json
import os
import platform
import re
import shlex
import subprocess
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from fused_softmax.bench.cases import ITEMSIZE, Case
from fused_softmax.bench.catalog import OWN
from fused_softmax.bench.results import fingerprint
from fused_softmax.core import files

SCHEMA = 1
Status = Literal["ok", "wrong", "refused", "absent", "untimed", "skipped"]


@dataclass(frozen=True)
class Figure:
    """The time of one call in us, and the operation's floor bytes over its median in GB/s."""

    p20_us: float
    p50_us: float
    p80_us: float
    gb_per_s: float


@dataclass(frozen=True)
class Ceiling:
    """The fastest plain kernel that moves as many bytes in the same way, in the same rounds."""

    name: str
    p50_us: float
    gb_per_s: float


@dataclass(frozen=True)
class Point:
    """One provider at one case.

    operation, parameters: what is computed; parameters hold what n_rows, n_cols and dtype do not say.
    kernel: time on the GPU over rotating buffers. call: eager wall time. They are different experiments.
    method: "graph" for graph replay, "events" if the provider could not be captured.
    buffers: distinct sets of inputs and outputs in rotation. rotated_bytes: their bytes (cold when above 4 x L2).
    host_us: time to enqueue one call.
    error, row_sum_error: largest distance from float64, of an element and of a row's sum.
    memory_bytes: on a GPU, the most bytes that the call allocated at once, beside its inputs.
    clocks: the GPU's clocks while the case was timed, from `clocks.summary`.
    """

    n_rows: int
    n_cols: int
    dtype: str
    provider: str
    status: Status
    message: str = ""
    kernel: Figure | None = None
    call: Figure | None = None
    host_us: float | None = None
    ratio: float | None = None
    ceiling: Ceiling | None = None
    method: Literal["graph", "events"] | None = None
    buffers: int | None = None
    rotated_bytes: int | None = None
    error: float | None = None
    error_allowed: float | None = None
    row_sum_error: float | None = None
    plan: dict[str, Any] | None = None
    operation: str = "softmax"
    parameters: dict[str, Any] = field(default_factory=dict)
    memory_bytes: int | None = None
    clocks: dict[str, Any] | None = None

    @property
    def case(self) -> Case:
        shape = tuple(self.parameters.get("shape", (self.n_rows, self.n_cols)))
        return Case(shape, self.dtype, self.operation, self.parameters.get("dim", -1))


@dataclass(frozen=True)
class Check:
    """A kernel that ran under Triton's interpreter and was compared, but never timed."""

    kernel: str
    n_rows: int
    n_cols: int
    dtype: str
    status: Literal["ok", "wrong", "failed", "not run"]
    error: float | None = None
    message: str = ""


@dataclass(frozen=True)
class CompiledKernel:
    """A kernel that Triton compiled, with its seconds: of all, and of each stage of the compiler by its name."""

    name: str
    seconds: float
    stages: dict[str, float]


@dataclass(frozen=True)
class FirstCall:
    """The first calls of a process whose cache of kernels was empty.

    call_s: the seconds of each call, until the GPU is idle, with all that it compiles, builds and loads.
    kernels: those that were compiled. module_s: the seconds of building each C module, Triton's and this package's.
    import_s: the seconds of importing PyTorch, Triton and this package. context_s: the seconds of making CUDA's context
    and of a first backward pass, for which PyTorch imports sympy. Neither is part of call_s.
    """

    name: str
    call_s: list[float]
    kernels: list[CompiledKernel]
    module_s: list[float]
    import_s: float
    context_s: float

    @property
    def seconds(self) -> float:
        return sum(self.call_s)

    @property
    def stages(self) -> dict[str, float]:
        """The seconds of each stage of the compiler, over all kernels."""
        found: dict[str, float] = {}
        for kernel in self.kernels:
            for name, seconds in kernel.stages.items():
                found[name] = found.get(name, 0.0) + seconds
        return found


@dataclass
class Run:
    """A run: points and checks, or first calls.

    options: what its points depend on beside their cases: rounds, milliseconds, seed, whether timed.
    """

    environment: dict[str, Any]
    command: str
    points: list[Point] = field(default_factory=list)
    checks: list[Check] = field(default_factory=list)
    complete: bool = False
    schema: int = SCHEMA
    options: dict[str, Any] = field(default_factory=dict)
    first_calls: list[FirstCall] = field(default_factory=list)


def save(run: Run, path: Path) -> None:
    files.write_whole(path, content_of(run))


def content_of(run: Run) -> bytes:
    """What a file of results has."""
    return (json.dumps(dataclasses.asdict(run), indent=1) + "\n").encode()


def require_regular(path: Path) -> None:
    """Raise OSError for an input that is no file, such as a pipe, which may have no writer and then never ends."""
    if path.exists() and not path.is_dir() and not path.is_file():
        raise OSError(errno.EINVAL, "it is not a regular file", str(path))


class OfLaterVersion(ValueError):
    """The file has results in a form that this version does not know."""


def load(path: Path) -> Run:
    require_regular(path)
    data = json.loads(path.read_text(encoding="utf-8"))
    schema = data.get("schema")
    if type(schema) is int and schema > SCHEMA and "points" in data:
        raise OfLaterVersion(f"{path.name} was written by a later version of this package, which this one cannot read")
    if schema != SCHEMA:
        raise ValueError(_foreign(path))
    points = [_point(point) for point in data.pop("points")]
    checks = [Check(**check) for check in data.pop("checks")]
    first_calls = [first_call(each) for each in data.pop("first_calls", ())]
    return Run(points=points, checks=checks, first_calls=first_calls, **data)


def first_call(data: dict[str, Any]) -> FirstCall:
    """What a file, or the process that measured it, says of a first call."""
    return FirstCall(**data | {"kernels": [CompiledKernel(**each) for each in data["kernels"]]})


def read(path: Path) -> Run:
    """Like `load`, but anything wrong with the content is a ValueError. OSError if there is no readable file."""
    try:
        run = load(path)
        _require_kinds(run)
        json.dumps(dataclasses.asdict(run), ensure_ascii=False).encode()  # half of a surrogate pair is no text
        return run
    except OfLaterVersion:
        raise
    except (ValueError, OverflowError, AttributeError, KeyError, TypeError, RecursionError) as error:
        raise ValueError(_foreign(path)) from error


def _foreign(path: Path) -> str:
    return f"{path.name} is not what `fused-softmax bench --out` writes"


def _require_kinds(run: Run) -> None:
    """TypeError where a value is not of the type that its field says, or is one that no run has."""
    kernels = (kernel for first in run.first_calls for kernel in first.kernels)
    for each in (run, *run.points, *run.checks, *run.first_calls, *kernels):
        parts = (getattr(each, part) for part in ("kernel", "call", "ceiling") if getattr(each, part, None))
        for record in (each, *parts):
            for name, kind in get_type_hints(type(record)).items():
                if not _is(getattr(record, name), kind):
                    raise TypeError(f"{name} is no {kind}")
    gpus = [run.environment.get("gpu") or {}]
    clocks = [point.clocks or {} for point in run.points]
    if not all(isinstance(each, dict) for each in gpus) or not all(
        isinstance(each.get("throttled", []), list) for each in clocks
    ):
        raise TypeError("facts of a GPU of another kind")
    for first in run.first_calls:
        figures = [*first.call_s, *first.module_s, *(s for kernel in first.kernels for s in kernel.stages.values())]
        if not first.call_s or not all(_is(each, float) and 0 <= each < 1e9 for each in figures):
            raise TypeError("seconds that no call takes")
    for point in run.points:
        shape, dim = point.parameters.get("shape", [1]), point.parameters.get("dim", -1)
        if not isinstance(shape, list) or not shape or not isinstance(dim, int) or not -1 <= dim < len(shape):
            raise TypeError("a shape of another kind")
        sizes = (point.n_rows, point.n_cols, *shape)
        times = [value for figure in (point.kernel, point.call) if figure for value in dataclasses.astuple(figure)]
        if not all(isinstance(size, int) and 0 < size < 2**63 for size in sizes):
            raise TypeError("a size that no tensor has")
        if not all(1e-9 < time < 1e15 for time in times):
            raise TypeError("a time or a speed that nothing has")
        if point.dtype not in ITEMSIZE:
            raise TypeError(f"{point.dtype} is no dtype")


def _is(value: Any, kind: Any) -> bool:
    """Whether a value is of an annotated type; of containers the outer type counts."""
    if kind is Any:
        return True
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) in (Union, UnionType):
        return any(_is(value, each) for each in get_args(kind))
    if kind in (int, float) and isinstance(value, bool):
        return False
    return isinstance(value, (int, float) if kind is float else get_origin(kind) or kind)


def _point(data: dict[str, Any]) -> Point:
    parts = {"kernel": Figure, "call": Figure, "ceiling": Ceiling}
    return Point(**{k: parts[k](**v) if k in parts and v is not None else v for k, v in data.items()})


def failures(run: Run) -> list[Point]:
    """The points that fail a run: every wrong result, and every case that this package refuses."""
    return [p for p in run.points if p.status == "wrong" or (p.provider == OWN and p.status == "refused")]


def found_nothing(run: Run) -> bool:
    """Whether none of the points was timed or compared, and no kernel was checked."""
    found = [p.status in ("ok", "wrong") or not p.message or p.error is not None for p in run.points]
    return bool(found) and not run.checks and not any(found)


def without_figure(points: Iterable[Point]) -> list[str]:
    """Why points have no figure, or what to know of it: one line for all reasons that differ in their numbers alone."""
    reasons: dict[tuple[str, str, str], list[Point]] = {}
    for point in points:
        if point.message:
            alike = re.sub(r"[\d.e+-]+", "0", point.message)
            reasons.setdefault((point.provider, point.status, alike), []).append(point)
    lines = []
    for (provider, status, _), group in reasons.items():
        where = f" at {group[0].case}" + (f" and {len(group) - 1} more" if group[1:] else "")
        lines.append(f"{provider}: {status}{'' if status == 'absent' else where}: {group[0].message}")
    return lines


def rows_only(run: Run) -> bool:
    """Whether every point is softmax of rows. A report then need not say so on every line."""
    return all(point.operation == "softmax" and not point.parameters for point in run.points)


def floor_of(run: Run) -> str:
    """The bytes that GB/s counts, in words."""
    return "one read and one write" if rows_only(run) else "the bytes that must move"


def ceiling_of(run: Run) -> str:
    return "copy kernel" if rows_only(run) else "plain kernel"


def partial_path(path: Path) -> Path:
    return path.with_name(f"{path.stem}.partial.json")


def require_writable(path: Path) -> None:
    """Raise OSError now rather than after the measurement. Leaves nothing: folders are made when the file is."""
    if path.is_dir():
        raise IsADirectoryError("it is a folder")
    if path.exists() and not path.is_file():
        raise PermissionError("it is not a regular file")
    if path.exists() and not os.access(path, os.W_OK):
        raise PermissionError("it is write-protected")
    folder = next(parent for parent in path.absolute().parents if parent.exists())
    if not folder.is_dir():
        raise NotADirectoryError(f"{folder} is not a folder")
    try:  # by making a file, for /proc and read-only mounts have folders whose modes allow it
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise OSError(f"no file can be made in {folder}: {error.strerror}") from None


def one_line(error: BaseException | str) -> str:
    """The first line of a message, without colours of a terminal and the directories of its paths."""
    text = re.sub(r"\x1b\[[\d;]*m", "", str(error)).strip()
    line = text.splitlines()[0] if text else ""
    line = re.sub(r"(?<![\w.])[~/][^\s'\":,()]*/", "", line)
    name = "" if isinstance(error, str) else type(error).__name__
    return ": ".join(filter(None, (name, line)))[:240]


def command_line(arguments: list[str]) -> str:
    return shlex.join(["fused-softmax", *(re.sub(r"[^=]*/", "", argument) for argument in arguments)])


def environment(gpu: dict[str, Any] | None = None, gpu_uuid: str | None = None) -> dict[str, Any]:
    """Versions, and facts of the GPU: those the caller knows and those nvidia-smi reads. Changes nothing."""
    found: dict[str, Any] = {name.replace("-", "_"): version(name) for name in ("fused-softmax", "torch", "triton")}
    found["python"] = platform.python_version()
    found["platform"] = f"{platform.system()} {platform.machine()}"
    found["commit"] = _commit()
    found["source"] = _source()
    found |= fingerprint.recorded()
    found["gpu"] = gpu and gpu | _nvidia_smi(gpu_uuid)
    return found


def version(distribution: str = "fused-softmax") -> str | None:
    with contextlib.suppress(metadata.PackageNotFoundError):
        return metadata.version(distribution)
    if distribution == "fused-softmax":
        source = Path(__file__).parents[2] / "__init__.py"
        match = re.search(r'__version__ = "(.+)"', source.read_text(encoding="utf-8"))
        return match and match[1]
    return None


def _commit() -> str | None:
    """The commit of this package's files, with a plus if files differ from it."""
    here = Path(__file__).parents[2]
    if _output("git", "-C", str(here), "ls-files", "--error-unmatch", "__init__.py") is None:
        return None
    commit = _output("git", "-C", str(here), "rev-parse", "--short=12", "HEAD")
    changed = _output("git", "-C", str(here), "status", "--porcelain", "--", ".")
    return commit and commit + ("+" if changed else "")


def _source() -> str:
    """A digest of this package's Python files. It says what ran even without a commit."""
    here = Path(__file__).parents[2]
    digest = hashlib.sha256()
    for path in sorted(here.rglob("*.py")):
        digest.update(f"{path.relative_to(here).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    return digest.hexdigest()[:12]


def _nvidia_smi(uuid: str | None) -> dict[str, Any]:
    fields = ("driver_version", "clocks.sm", "clocks.mem", "clocks.max.sm", "clocks.max.mem", "power.limit")
    table = _output("nvidia-smi", f"--query-gpu=uuid,{','.join(fields)}", "--format=csv,noheader,nounits")
    for row in (table or "").splitlines():
        key, *values = (cell.strip() for cell in row.split(","))
        if uuid is None or key.removeprefix("GPU-") == uuid.removeprefix("GPU-"):
            return dict(zip((name.replace(".", "_") for name in fields), values, strict=False))
    return {}


def _output(*command: str) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, timeout=10, check=True, **files.TEXT)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()


# Readings of the moment, not properties of the machine.
PASSING = {"clocks_sm", "clocks_mem"}

# Statuses that another try on the same machine with the same source cannot change.
HELD = ("ok", "wrong", "untimed")


class CannotResume(ValueError):
    """The file has no results, or they are from another machine, source or effort."""


def earlier(out: Path) -> Run | None:
    """The run to continue: the partial one if there is one, else the finished one, else None.

    Raises CannotResume for a file that `fused-softmax bench --out` did not write, or that cannot be read.
    """
    for path in (partial_path(out), out):
        if path.exists():
            try:
                return read(path)
            except OSError as error:
                raise CannotResume(f"cannot read {path}: {error.strerror}") from None
            except ValueError as error:
                raise CannotResume(str(error)) from None
    return None


def mismatch(old: Run, new: Run) -> str:
    """The differences between two runs, as "then, now", or "": machine, versions, source and effort."""
    environments = _flat(old.environment), _flat(new.environment)
    if environments[0].get("GPU name") != environments[1].get("GPU name"):  # from which its other facts follow
        environments = _with_name_of_gpu(environments[0]), _with_name_of_gpu(environments[1])
    said = [
        f"{name} {before.get(name, 'none')} then, {now.get(name, 'none')} now"
        for before, now in (environments, (_flat(old.options), _flat(new.options)))
        for name in sorted(before.keys() | now.keys())
        if before.get(name) != now.get(name)
    ]
    return "; ".join(said)


def _flat(facts: dict[str, Any]) -> dict[str, Any]:
    gpu = facts.get("gpu") or {}
    flat = {name: value for name, value in facts.items() if name not in ("gpu", "kernels_of")}  # as `kernels` says it
    return flat | {f"GPU {name}": value for name, value in gpu.items() if name not in PASSING}


def _with_name_of_gpu(flat: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in flat.items() if name == "GPU name" or not name.startswith("GPU ")}


class Held:
    """The points of an earlier run that need not be measured again."""

    def __init__(self, points: Iterable[Point] = ()):
        self.points = {(point.case, point.provider): point for point in points if point.status in HELD}

    def missing(self, case: Case, names: Sequence[str]) -> list[str]:
        return [name for name in names if (case, name) not in self.points]

    def merged(self, points: Iterable[Point]) -> list[Point]:
        """The held points and the new ones as one run, with the points of a case side by side."""
        by_case: dict[Case, list[Point]] = {}
        for point in [*self.points.values(), *points]:
            by_case.setdefault(point.case, []).append(point)
        return [point for group in by_case.values() for point in group]
