"""A fingerprint of the kernels: a digest of the code that decides what a figure of this package is a figure of.

It is of every definition that an eager call runs through up to its launch: device code, the planner and the host's
part. A definition counts by its code, constants, defaults and decorators. Where it stands, what it is called, how a
file imports what it refers to, comments and docstrings do not count: a definition may move, and a comment may say later
what was measured. Nor do the words of an error or what a block does before it raises one: no figure is of a call that
raises. All C counts always, and so do the classics, which results are compared with. The reference formulas
do not count, for they compute what the kernels leave to torch. Nor does what only nested tensors run through, which no
figure is of.

Each operation has a fingerprint of its own, of what its function refers to, what that refers to, and so on: a change of
the samplers leaves the figures of softmax as they are. What only calls over the ranks of a group run through is no part
of these, for every figure of an operation by itself is of one GPU. It has one of its own.
"""

import ast
import gc
import hashlib
import re
from collections.abc import Collection, Iterable, Iterator, Mapping
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path
from typing import Any, NamedTuple

import fused_softmax

PACKAGE = Path(fused_softmax.__file__).parent

# Files, by the end of their path: of what only calls over ranks run through, of what counts always, and never.
OVER_RANKS = (
    "fused_softmax/ranks/*.py", "ops/*/by_peers.py", "ops/*/dtensor.py", "ops/*/over_ranks.py",
    "ops/*/over_ranks/*.py",
)  # fmt: skip
ALWAYS = ("classic/*.py",)
NEVER = ("ops/*/reference.py", "ops/sampling/noise.py", "ops/segments/nested.py")

_NOTES = {"ctx", "kind", "type_comment"}  # fields of Python's syntax that change nothing of what runs

_IMPORTS = (ast.Import, ast.ImportFrom)
_NAMED = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_COMPREHENSIONS = (ast.ListComp, ast.SetComp, ast.DictComp, ast.GeneratorExp)
_SCOPES = (*_NAMED, ast.Lambda, *_COMPREHENSIONS)


class Definition(NamedTuple):
    """What gives a top-level name of a module its value; a statement that only has an effect has a number for it."""

    module: str
    name: str


@cache
def kernels() -> str:
    """The fingerprint of this source's kernels: 12 hexadecimal digits."""
    return _sum(of_operations().values())


@cache
def of_operations() -> dict[str, str]:
    """That of each operation of the bench, by its name, and as "over ranks" that of calls over the ranks of a group."""
    found, collects = Source(PACKAGE, functions()), gc.isenabled()
    gc.disable()  # a collection looks at all of torch, and so much syntax asks for many: half of the time
    try:
        return found.of_operations
    finally:
        if collects:
            gc.enable()


def functions() -> dict[str, Definition]:
    """The function of each operation and step of the bench, and those that `bench cold` alone calls."""
    from fused_softmax.bench.catalog import STEPS
    from fused_softmax.register.table import OPERATORS

    found: dict[str, Definition] = {}
    for operator in OPERATORS:
        for name in operator.bench:
            run = getattr(fused_softmax, name, None) or operator.public or operator.run
            run = getattr(run, "func", run)
            # A public function's __module__ is the package.
            found[name] = Definition(run.__globals__["__name__"], run.__name__)
    for run in (fused_softmax.speculative_sample, fused_softmax.top_p_mask_logits):
        found[run.__name__] = Definition(run.__globals__["__name__"], run.__name__)
    return found | {name: found[step.operation] for name, step in STEPS.items()}


def _sum(digests: Iterable[str]) -> str:
    return hashlib.sha256("\n".join(sorted({*digests})).encode()).hexdigest()[:12]


class Source:
    """The source of a package, as definitions that refer to definitions.

    package: its folder. functions: the function of each operation, by the operation's name.
    """

    def __init__(self, package: Path, functions: Mapping[str, Definition]):
        self.package, self._functions = package, functions
        self._modules: dict[str, _Module | None] = {}

    @cached_property
    def of_operations(self) -> dict[str, str]:
        always = [self._digest(self.reached([each])) for each in self.all_of(ALWAYS)]
        for path in self.package.rglob("*.c"):
            always.append(hashlib.sha256(_without_comments(path.read_text(encoding="utf-8")).encode()).hexdigest())
        of = {each: self._digest(self.reached([each])) for each in {*self._functions.values()}}
        found = {name: _sum([of[function], *always]) for name, function in self._functions.items()}
        over_ranks = self.reached(self.entries_over_ranks(sorted(of, key=lambda each: of[each])), over_ranks=True)
        return found | {"over ranks": _sum([self._digest(over_ranks), *always])}

    def entries_over_ranks(self, functions: Iterable[Definition]) -> list[Definition]:
        """What only calls over ranks run through, where functions lead to it, and these functions.

        A call over ranks may be given the function of one device.
        """
        functions = [*functions]
        found = dict.fromkeys(there for each in self.reached(functions) for there in self._references(each))
        entries = [each for each in found if self._is(each, OVER_RANKS)]
        return entries + [
            function
            for function in functions
            if any(self._is(there, OVER_RANKS) for each in self.reached([function]) for there in self._references(each))
        ]

    def reached(self, start: Iterable[Definition], over_ranks: bool = False) -> dict[Definition, int]:
        """Definitions, what they refer to, and so on, numbered in the order of references, wherever they stand.

        over_ranks: with what only calls over ranks run through.
        """
        numbers = {each: i for i, each in enumerate(start)}
        left, without = [*numbers], NEVER if over_ranks else NEVER + OVER_RANKS
        for each in left:  # which grows
            for found in (*self._references(each), *self._module(each.module).effects_on(each)):
                if found not in numbers and not self._is(found, without):
                    numbers[found] = len(numbers)
                    left.append(found)
        return numbers

    def _digest(self, numbers: Mapping[Definition, int]) -> str:
        """Of the code of definitions, where a number stands for what the code refers to."""
        digest = hashlib.sha256()
        for each in numbers:
            for piece in self._written(each):
                digest.update((piece if isinstance(piece, str) else f"<{numbers.get(piece)}>").encode())
            digest.update(b"\0")
        return digest.hexdigest()

    def _references(self, definition: Definition) -> Iterator[Definition]:
        return (piece for piece in self._written(definition) if isinstance(piece, Definition))

    def _written(self, definition: Definition) -> "_Code":
        return self._module(definition.module).written(definition.name)

    def _is(self, definition: Definition, patterns: tuple[str, ...]) -> bool:
        return self._module(definition.module).is_one_of(patterns)

    def all_of(self, patterns: Collection[str]) -> Iterator[Definition]:
        """Every definition of some files."""
        for path in self.package.rglob("*.py"):
            if any(map(path.match, patterns)):
                name = ".".join(path.relative_to(self.package.parent).with_suffix("").parts)
                module = self._module(name.removesuffix(".__init__"))
                yield from (Definition(module.name, each) for each in module.statements)

    def _module(self, name: str) -> "_Module":
        found = self.find(name)
        if found is None:
            raise ValueError(f"{self.package.name} has no module {name}")
        return found

    def find(self, name: str) -> "_Module | None":
        """The module of a dotted name, or None if the package has none of that name."""
        if name not in self._modules:
            first, *parts = name.split(".")
            path = self.package.joinpath(*parts)
            file = path / "__init__.py" if path.is_dir() else path.with_suffix(".py")
            known = first == self.package.name and file.is_file()
            self._modules[name] = _Module(self, name, file) if known else None
        return self._modules[name]


_Code = tuple[str | Definition, ...]  # text, and between it the definitions to which code refers
_Bound = dict[str, list[str | None]]  # for each name the dotted names that it is imported from, and None for a value
_Meaning = list[str | Definition]  # a definition, or dotted names of what is imported; [] for what is built in


class _Module:
    """A file's top-level statements, by the names to which they give values, and what its names mean."""

    def __init__(self, source: Source, name: str, file: Path):
        self._source, self.name, self._file = source, name, file
        self.statements: dict[str, list[ast.stmt]] = {}
        self._effects: list[Definition] = []
        self._bound: _Bound = {}
        self._written: dict[str, _Code] = {}
        self._kinds: dict[tuple[str, ...], bool] = {}
        for i, node in enumerate(ast.parse(file.read_text(encoding="utf-8")).body):
            for each, origins in _bound_by([node]).items():
                self._bound.setdefault(each, []).extend(origins)
                if None in origins:
                    self.statements.setdefault(each, []).append(node)
            if not _is_docstring(node) and not _gives_names_alone(node):
                self.statements[f"{i}"] = [node]
                self._effects.append(Definition(name, f"{i}"))

    def is_one_of(self, patterns: tuple[str, ...]) -> bool:
        if patterns not in self._kinds:
            self._kinds[patterns] = any(map(self._file.match, patterns))
        return self._kinds[patterns]

    def written(self, name: str) -> _Code:
        if name not in self._written:
            writer = _Writer(self)
            writer.write(self.statements[name])
            self._written[name] = writer.code()
        return self._written[name]

    def effects_on(self, definition: Definition) -> list[Definition]:
        """Top-level statements that do something with a definition of the file, or with none of the file."""
        found = {}
        for each in self._effects:
            written = self.written(each.name)
            own = {piece for piece in written if isinstance(piece, Definition) and piece.module == self.name}
            if definition in own or not own:
                found[each] = [piece for piece in written if isinstance(piece, str)]
        return sorted(found, key=lambda each: found[each])

    def meaning(self, name: str) -> _Meaning:
        origins = self._bound.get(name, [])
        if None in origins:
            return [Definition(self.name, name)]
        return [each for origin in origins if origin for each in self.imported(origin)]

    def imported(self, origin: str) -> _Meaning:
        home, _, name = origin.rpartition(".")
        module = self._source.find(home) if home else None
        return (module.meaning(name) if module else []) or [origin]

    def all_of(self, meaning: str | Definition) -> _Meaning:
        """What counts of a meaning: of a module of the package, which who takes it may call by any name, all."""
        module = self._source.find(meaning) if isinstance(meaning, str) else None
        if module is None:
            return [meaning]
        return [] if module.is_one_of(NEVER) else [Definition(module.name, each) for each in module.statements]


class _Scope(NamedTuple):
    bound: _Bound
    of_class: bool = False  # whose names its functions do not see


class _Writer:
    """Writes code without places, docstrings and imports, in the same way in every version of Python."""

    def __init__(self, module: _Module):
        self._module = module
        self._pieces: _Meaning = []

    def code(self) -> _Code:
        runs = [[*pieces] for _, pieces in groupby(self._pieces, type)]
        return tuple(each for run in runs for each in (["".join(map(str, run))] if isinstance(run[0], str) else run))

    def write(self, node: Any, scopes: tuple[_Scope, ...] = ()) -> None:
        """scopes: of the functions and classes around a node, the outermost first."""
        kind = type(node)
        if kind is list:
            for each in [ast.Raise()] if _only_raises(node) else node:
                if not _is_docstring(each):
                    self.write(ast.Raise() if isinstance(each, ast.Raise) else each, scopes)
                    self._pieces.append(",")
        elif not isinstance(node, ast.AST):
            self._pieces.append(ascii(node))
        elif kind in (ast.Name, ast.Attribute) and (meaning := self._meaning(node, scopes)):
            self._write_meaning(meaning)
        elif kind in _IMPORTS:  # in a block, where it may decide something
            for origins in _bound_by([node]).values():
                self._write_meaning([each for origin in origins if origin for each in self._module.imported(origin)])
        else:
            self._write_fields(node, scopes)

    def _write_meaning(self, meaning: _Meaning) -> None:
        for each in meaning:
            self._pieces += ["{", *self._module.all_of(each), "}"]

    def _write_fields(self, node: ast.AST, scopes: tuple[_Scope, ...]) -> None:
        scopes_of = self._scopes_of_fields(node, scopes) if isinstance(node, _SCOPES) else {}
        self._pieces.append(f"{type(node).__name__}(")
        for name in node._fields:
            value = getattr(node, name, None)
            if isinstance(node, ast.JoinedStr):  # of which Python 3.12 has empty parts
                value = [each for each in node.values if not (isinstance(each, ast.Constant) and each.value == "")]
            if name in _NOTES or value is None or value == []:  # a field that a later version adds is empty
                continue
            self._pieces.append(f"{name}=")
            if name == "name" and not scopes and isinstance(node, _NAMED):
                self._pieces.append(Definition(self._module.name, node.name))
                continue
            if name == "generators":
                self.write(value[0].iter, scopes)  # which alone does not see the names of the loops
            elif name == "body" and isinstance(node, _NAMED):
                value = [each for each in value if not isinstance(each, _IMPORTS)]
            self.write(value, scopes_of.get(name, scopes))
        self._pieces.append(")")

    def _scopes_of_fields(self, node: ast.AST, scopes: tuple[_Scope, ...]) -> dict[str, tuple[_Scope, ...]]:
        """The scopes of those fields of a function, a class or a comprehension that see its own names."""
        if isinstance(node, ast.ClassDef):
            return {"body": (*scopes, _Scope(_bound_by(node.body), of_class=True))}
        seen = (*(each for each in scopes if not each.of_class),)
        if isinstance(node, _COMPREHENSIONS):
            return dict.fromkeys(node._fields, (*seen, _Scope(_bound_by([each.target for each in node.generators]))))
        assert isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        bound = _bound_by(node.body if isinstance(node.body, list) else [node.body])
        bound |= {each.arg: [None] for each in ast.walk(node.args) if isinstance(each, ast.arg)}
        return {"body": (*seen, _Scope(bound))}

    def _meaning(self, node: ast.AST, scopes: tuple[_Scope, ...]) -> _Meaning:
        """What a name or an attribute of a module means; [] for what is local, built in or no such thing."""
        if isinstance(node, ast.Name):
            for scope in reversed(scopes):
                if origins := scope.bound.get(node.id):
                    imported = [each for origin in origins if origin for each in self._module.imported(origin)]
                    return imported and [*imported, *(node.id for origin in origins if origin is None)]
            return self._module.meaning(node.id)
        if isinstance(node, ast.Attribute):
            value = self._meaning(node.value, scopes)
            names = [each for each in value if isinstance(each, str)]
            if len(names) == len(value):
                return [each for name in names for each in self._module.imported(f"{name}.{node.attr}")]
        return []


def _bound_by(nodes: Iterable[ast.AST]) -> _Bound:
    """The names that code gives values or imports, in its blocks too, but not in functions and classes in it."""
    found: _Bound = {}
    shared: set[str] = set()
    left = [*nodes]
    for node in left:  # which grows
        named: str | None = None
        if isinstance(node, ast.Name):
            named = None if isinstance(node.ctx, ast.Load) else node.id
        elif isinstance(node, _NAMED):
            named = node.name
        elif isinstance(node, _IMPORTS):
            for each in node.names:
                name = each.asname or each.name.split(".")[0]
                origin = f"{node.module}.{each.name}" if isinstance(node, ast.ImportFrom) else each.name
                found.setdefault(name, []).append(origin if each.asname or "." not in each.name else name)
        elif isinstance(node, ast.Global | ast.Nonlocal):
            shared |= {*node.names}
        elif isinstance(node, _COMPREHENSIONS):
            left += [each.target for each in ast.walk(node) if isinstance(each, ast.NamedExpr)]
        elif not isinstance(node, ast.Lambda):
            named = getattr(node, "name", None) or getattr(node, "rest", None)  # of an exception or a pattern
            left += ast.iter_child_nodes(node)
        if named is not None:
            found.setdefault(named, []).append(None)
    return {name: origins for name, origins in found.items() if name not in shared}


def _is_docstring(node: Any) -> bool:
    return isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str)


def _only_raises(block: list[Any]) -> bool:
    """Whether a block of statements always ends by raising an error."""
    leaves = ast.Return, ast.Continue, ast.Break, ast.Yield, ast.YieldFrom
    raises = bool(block) and isinstance(block[-1], ast.Raise)
    return raises and not any(isinstance(inner, leaves) for each in block for inner in ast.walk(each))


def _gives_names_alone(node: ast.stmt) -> bool:
    """Whether a top-level statement has no other effect than to import, or to give its names their values."""
    if isinstance(node, ast.Assign | ast.AnnAssign | ast.AugAssign):
        targets = node.targets if isinstance(node, ast.Assign) else [node.target]
        return not any(isinstance(each, ast.Attribute | ast.Subscript) for it in targets for each in ast.walk(it))
    inner = [each for each in ast.walk(node) if isinstance(each, ast.stmt)]
    return isinstance(node, _NAMED) or all(isinstance(each, (*_IMPORTS, ast.If, ast.Try, ast.Pass)) for each in inner)


def _without_comments(code: str) -> str:
    """C without comments, empty lines and indentation."""
    quoted = r'"(?:\\.|[^"\\])*"' + "|" + r"'(?:\\.|[^'\\])*'"
    code = re.sub(rf"({quoted})|//[^\n]*|/\*.*?\*/", lambda found: found[1] or " ", code, flags=re.DOTALL)
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
    named = f"all {len(others)} operations" if 3 < len(others) == len(operations) else ", ".join(sorted(others))
    of = f" of {named}" if others and before else ""
    return f"of other kernels{of} (fingerprint {then} against {present['kernels']})"


def recorded() -> dict[str, Any]:
    """What a result's environment says of kernels."""
    return {"kernels": kernels(), "kernels_of": of_operations()}
