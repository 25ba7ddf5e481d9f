"""A fingerprint of the kernels: a digest of the code that decides what a figure of this package is a figure of.

That is every definition that an eager call runs through up to its launch: device code, the planner, the host's part.
Instruments do not count, nor do the reference formulas, which compute what the kernels leave to torch, unless a call
runs through them. A definition counts by what it says: its code, its constants, its defaults and its decorators, but
not the file where it stands, how that file imports what it refers to, comments and docstrings. So a definition can
move, and a comment can say later what was measured.

Each operation has a fingerprint of its own too, of the definitions that its function refers to, and these, and so on: a
change of the samplers leaves the figures of softmax as they are. What only calls over the ranks of a group run through
is no part of these, for every figure of an operation by itself is of one GPU. It has one of its own.
"""

import ast
import hashlib
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache, cached_property
from pathlib import Path
from typing import Any, NamedTuple

PACKAGE = Path(__file__).parents[2]
NAME = PACKAGE.name

# Files of what only calls over ranks run through, by patterns below the package.
OVER_RANKS = ("ranks/*.py", "ops/*/by_peers.py", "ops/*/dtensor.py", "ops/*/over_ranks.py", "ops/*/over_ranks/*.py")
# Files whose definitions count with every operation: what its figures are compared with.
ALWAYS = ("classic/*.py",)

# Fields of Python's syntax that say where a node stands, or that not every version of Python has.
_IGNORED = {"ctx", "kind", "type_comment", "type_ignores"}


class Definition(NamedTuple):
    """A top-level statement that gives names their values, or one that has an effect, of which `name` is ""."""

    module: str
    name: str


@cache
def kernels() -> str:
    """The fingerprint of this source's kernels: 12 hexadecimal digits."""
    return of_source().kernels


@cache
def of_operations() -> dict[str, str]:
    """That of each operation of the bench, by its name, and as "over ranks" that of calls over the ranks of a group."""
    return of_source().of_operations


@cache
def of_source() -> "Source":
    from fused_softmax.register.table import OPERATORS

    operations: dict[str, Definition] = {}
    for operator in OPERATORS:
        run = operator.public or operator.run
        run = getattr(run, "func", run)
        # A public function's __module__ is the package.
        operations |= dict.fromkeys(operator.bench, Definition(run.__globals__["__name__"], run.__name__))
    return Source(PACKAGE, operations)


class Source:
    """The definitions of a package's source, and digests of those that operations run through.

    operations: the function of each, by the operation's name.
    """

    def __init__(self, package: Path, operations: Mapping[str, Definition]):
        self.package, self.operations = package, operations
        self._modules: dict[str, _Module | None] = {}

    @cached_property
    def kernels(self) -> str:
        return self._digest(set().union(*self.definitions_of_operations.values()), {})

    @cached_property
    def of_operations(self) -> dict[str, str]:
        digests: dict[bool, dict[Definition, str]] = {False: {}, True: {}}  # operations share most of their definitions
        return {
            name: self._digest(found, digests[name == "over ranks"])
            for name, found in self.definitions_of_operations.items()
        }

    @cached_property
    def definitions_of_operations(self) -> dict[str, set[Definition]]:
        ranks = self._all_of(OVER_RANKS)
        always = self._reached(self._all_of(ALWAYS), without=ranks)
        found = {each: self._reached([each], without=ranks) | always for each in {*self.operations.values()}}
        of_one = {name: found[start] for name, start in self.operations.items()}
        return of_one | {"over ranks": self._reached(ranks) | always}

    def _all_of(self, patterns: Iterable[str]) -> set[Definition]:
        paths = {path for pattern in patterns for path in self.package.glob(pattern)}
        modules = [".".join((NAME, *path.relative_to(self.package).with_suffix("").parts)) for path in paths]
        return {Definition(name, each) for name in modules for each in self._module(name).statements}

    def _reached(self, start: Iterable[Definition], without: Collection[Definition] = ()) -> set[Definition]:
        """Definitions and what they refer to; not `without`, nor what only these refer to."""
        found: set[Definition] = set()
        left = [*start]
        while left:
            each = left.pop()
            if each not in found and each not in without:
                found.add(each)
                left += [one for group in self._written(each).references for one in group]
                left += self._module(each.module).effects_on(each)
        return found

    def _digest(self, definitions: Collection[Definition], known: dict[Definition, str]) -> str:
        digests = []
        for each in definitions:
            if each not in known:
                known[each] = self._digest_of(each, definitions)
            digests.append(known[each])
        digests.sort()
        codes = [_without_comments(path.read_text()) for path in sorted(self.package.rglob("*.c"))]
        digests += sorted(hashlib.sha256(code.encode()).hexdigest() for code in codes)
        return hashlib.sha256("\n".join(digests).encode()).hexdigest()[:12]

    def _digest_of(self, definition: Definition, counted: Collection[Definition]) -> str:
        """Of what a definition says, and of what those say to which it refers: their names alone may be others'."""
        own = self._written(definition)
        digests = [own.digest]
        for group in own.references:
            digests += sorted(self._written(each).digest for each in group if each in counted)
        return hashlib.sha256("".join(digests).encode()).hexdigest()

    def _written(self, definition: Definition) -> "_Written":
        return self._module(definition.module).written(definition.name)

    def _module(self, name: str) -> "_Module":
        found = self.find(name)
        if found is None:
            raise ValueError(f"no module {name}")
        return found

    def find(self, name: str) -> "_Module | None":
        """The module of a dotted name, or None where the name is no module of the package."""
        if name not in self._modules:
            path = self.package.joinpath(*name.split(".")[1:])
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            known = name.split(".")[0] == NAME and file.is_file()
            self._modules[name] = _Module(self, name, file.read_text()) if known else None
        return self._modules[name]


class _Written(NamedTuple):
    """A digest of what a definition says, and at each place where it refers to the package what it may mean there."""

    digest: str
    references: tuple[tuple[Definition, ...], ...]


class _Module:
    def __init__(self, source: Source, name: str, text: str):
        self._source, self.name = source, name
        self.statements: dict[str, list[ast.stmt]] = {}  # by the names that they give values; effects by a number
        self._imports: dict[str, set[tuple[str, str | None]]] = defaultdict(set)  # functions import too, and may differ
        self._written: dict[str, _Written] = {}
        self._meant: dict[str, list[Definition | str]] = {}
        tree = ast.parse(text)
        for node in ast.walk(tree):
            if isinstance(node, ast.ImportFrom) and not node.level:
                for each in node.names:
                    self._imports[each.asname or each.name].add((node.module or "", each.name))
            elif isinstance(node, ast.Import):
                for each in node.names:
                    self._imports[each.asname or each.name.split(".")[0]].add((each.name, None))
        for i, node in enumerate(tree.body):
            if not isinstance(node, ast.Import | ast.ImportFrom) and not _is_docstring(node):
                for given in [*_given_values(node)] or [f"effect {i}"]:
                    self.statements.setdefault(given, []).append(node)

    def written(self, name: str) -> _Written:
        if name not in self._written:
            nodes = self.statements[name]
            writers = [_Writer(self, _locals_of(node)) for node in nodes]
            text = "".join(writer.write(node) for writer, node in zip(writers, nodes, strict=True))
            digest = hashlib.sha256(text.encode()).hexdigest()
            self._written[name] = _Written(digest, tuple(each for writer in writers for each in writer.references))
        return self._written[name]

    def effects_on(self, definition: Definition) -> list[Definition]:
        """Statements of this module that do something with a definition, such as to register it."""
        effects = [each for each in self.statements if each.startswith("effect ")]
        return [
            Definition(self.name, each)
            for each in effects
            if any(definition in group for group in self.written(each).references)
        ]

    def attribute_of(self, module: str, name: str) -> list[Definition | str]:
        full, there = f"{module}.{name}", self._source.find(module)
        if self._source.find(full) is not None:
            return [full]
        return there.meant_by(name) if there is not None else []

    def meant_by(self, name: str) -> list[Definition | str]:
        """What a name of this module may be, of the package: definitions, and the names of modules."""
        if name not in self._meant:
            self._meant[name] = [Definition(self.name, name)] if name in self.statements else []
            for module, of_it in sorted(self._imports.get(name, ()), key=str):
                self._meant[name] += [module] if of_it is None else self.attribute_of(module, of_it)
        return self._meant[name]


class _Writer:
    """Writes syntax without places, imports and docstrings, in the same way by every version of Python."""

    def __init__(self, module: _Module, local: Collection[str]):
        self._module, self._local = module, local
        self.references: list[tuple[Definition, ...]] = []

    def write(self, node: Any) -> str:
        if isinstance(node, list):
            return f"[{','.join(self.write(each) for each in node if not _is_left_out(each))}]"
        if not isinstance(node, ast.AST):
            return repr(node)
        if isinstance(node, ast.Name | ast.Attribute):
            meant = tuple(each for each in self._meant_by(node) if isinstance(each, Definition))
            if meant:
                self.references.append(meant)
            if len(meant) == 1:
                return meant[0].name
        fields = [
            f"{name}={self.write(value)}"
            for name, value in ast.iter_fields(node)
            if name not in _IGNORED and (value or name != "type_params")
        ]
        return f"{type(node).__name__}({','.join(fields)})"

    def _meant_by(self, node: ast.AST) -> list[Definition | str]:
        if isinstance(node, ast.Name):
            return [] if node.id in self._local else self._module.meant_by(node.id)
        if not isinstance(node, ast.Attribute):
            return []
        modules = [each for each in self._meant_by(node.value) if isinstance(each, str)]
        return [each for module in modules for each in self._module.attribute_of(module, node.attr)]


def _given_values(node: ast.stmt) -> Iterator[str]:
    """The names that a top-level statement gives values, in blocks too."""
    if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        yield node.name
    elif isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        for target in node.targets if isinstance(node, ast.Assign) else [node.target]:
            yield from (each.id for each in ast.walk(target) if isinstance(each, ast.Name))
    elif isinstance(node, ast.If | ast.Try | ast.With | ast.For):
        for each in ast.iter_child_nodes(node):
            blocks = each.body if isinstance(each, ast.ExceptHandler) else [each]
            for inner in blocks:
                if isinstance(inner, ast.stmt):
                    yield from _given_values(inner)


def _locals_of(node: ast.stmt) -> set[str]:
    """Names that a function gives values, or its arguments: they are no top-level definitions there."""
    if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef):
        return set()
    found, shared = set(), set()
    for each in ast.walk(node):
        if isinstance(each, ast.arg):
            found.add(each.arg)
        elif isinstance(each, ast.Name) and isinstance(each.ctx, ast.Store):
            found.add(each.id)
        elif isinstance(each, ast.Global):
            shared |= {*each.names}
    return found - shared


def _is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _is_left_out(node: Any) -> bool:
    return _is_docstring(node) or isinstance(node, ast.Import | ast.ImportFrom)


def _without_comments(code: str) -> str:
    """C without comments and without what only sets it apart on the page."""
    code = re.sub(r'("(?:\\.|[^"\\])*")|//[^\n]*|/\*.*?\*/', lambda found: found[1] or " ", code, flags=re.DOTALL)
    return "\n".join(line.strip() for line in code.split("\n") if line.strip())


def difference(
    environment: Mapping[str, Any], present: Mapping[str, Any] | None = None, operations: Collection[str] = ()
) -> str:
    """How the kernels of a result differ from the present ones, in words, or "".

    environment: the result's. present: the present one, as `recorded` has it. operations: those that the result has.
    """
    then, present = environment.get("kernels"), present or recorded()
    if then is None:
        return "made before fingerprints"
    if then == present["kernels"]:
        return ""
    before, now = environment.get("kernels_of") or {}, present.get("kernels_of") or {}
    others = [name for name in operations if name not in before or before[name] != now.get(name)]
    if operations and not others:
        return ""
    of = f" of {', '.join(sorted(others))}" if others and before else ""
    return f"of other kernels{of} (fingerprint {then} against {present['kernels']})"


def recorded() -> dict[str, Any]:
    """What a result's environment says of kernels."""
    return {"kernels": kernels(), "kernels_of": of_operations()}
