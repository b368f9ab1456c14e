"""The code that a function depends on, and a digest of it, read from source files.

A result can only be trusted, or used again, as long as the code that made it is still
the same. All of the code is too much: a new optimizer does not change what an old one
has measured. What was imported is too much, too, for a process imports what its earlier
runs needed. Therefore this module follows names: from a function or class to every
function, class and constant at the top level of a module that its text mentions, and on
from these.

Documentation, comments, annotations, formatting and the order of definitions do not
count. Packages other than the given ones (JAX, NumPy) do not either: their versions are
part of a result's provenance. Nothing is imported for it.
"""

import ast
import dataclasses
import functools
import hashlib
import pathlib
import re
import sys
from collections.abc import Iterable, Iterator

_PLACE = re.compile(r"[A-Za-z_][\w.]*:[A-Za-z_]\w*")
# All of a module: where it is used as a value, nobody can tell what of it is.
_ALL = "*"
# The statements of a module that define nothing, such as registrations.
_REST = ""


@dataclasses.dataclass(frozen=True)
class Symbol:
    """A definition at the top level of a module, `module:name`."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"

    @classmethod
    def parse(cls, place: str) -> "Symbol":
        """Returns the symbol of `"module:name"`."""
        module, _, name = place.partition(":")
        return cls(module, name)


class Sources:
    """Follows names through the modules of some packages.

    A module's text is read once, when it is first needed. An object that is made when a
    process starts therefore tells what code the process runs, and one that is made
    later what the files hold by then.

    Args:
      packages: top-level packages whose code counts; they must have been imported.
    """

    def __init__(self, packages: Iterable[str]) -> None:
        self._folders = {name: _folders(name) for name in packages}
        self._modules: dict[str, _Module | None] = {}
        self._nearby: dict[Symbol, tuple[Symbol, ...]] = {}
        self._digests: dict[frozenset[Symbol], str] = {}

    def digest(self, places: Iterable[str]) -> str:
        """Returns 16 hex digits of all code that `"module:name"`s depend on."""
        start = frozenset(map(Symbol.parse, places))
        if start not in self._digests:
            texts = sorted(f"{s} {self._text(s)}" for s in self.reached(start))
            joined = "\n".join(texts).encode()
            self._digests[start] = hashlib.sha256(joined).hexdigest()[:16]
        return self._digests[start]

    def reached(self, start: Iterable[Symbol]) -> set[Symbol]:
        """Returns all symbols that some depend on, these included."""
        waiting, found = list(start), set[Symbol]()
        while waiting:
            symbol = waiting.pop()
            if symbol not in found:
                found.add(symbol)
                waiting += self._next(symbol)
        return found

    def _next(self, symbol: Symbol) -> tuple[Symbol, ...]:
        """Returns the symbols that one mentions."""
        if symbol not in self._nearby:
            module = self._module(symbol.module)
            self._nearby[symbol] = tuple(self._mentioned(module, symbol.name))
        return self._nearby[symbol]

    def _mentioned(self, module: "_Module | None", name: str) -> Iterator[Symbol]:
        if module is None:
            return
        if name == _ALL:
            for own in (*module.definitions, *module.exported):
                yield from self._resolve(module.name, own)
            return
        if name != _REST:
            yield Symbol(module.name, _REST)
        for node in module.definitions.get(name, ()):
            for path in _mentions(node):
                yield from self._follow(module, path)

    def _follow(self, module: "_Module", path: tuple[str, ...]) -> Iterator[Symbol]:
        """Yields what a dotted name in a module means."""
        if len(path) == 1 and ":" in path[0]:
            place = Symbol.parse(path[0])
            if self._module(place.module) is not None:
                yield from self._resolve(place.module, place.name)
            return
        first, *rest = path
        if first in module.definitions:
            yield Symbol(module.name, first)
        for target in module.imports.get(first, ()):
            yield from self._descend(target, rest)

    def _descend(self, target: str, rest: list[str]) -> Iterator[Symbol]:
        """Yields what the attributes `rest` of an imported `target` mean."""
        place, colon, name = target.partition(":")
        if colon:
            inner = f"{place}.{name}"
            if not self._is_module(inner):
                yield from self._resolve(place, name)
                return
            place = inner
        while rest and self._is_module(f"{place}.{rest[0]}"):
            if self._exports(place, rest[0]):
                break
            place, rest = f"{place}.{rest[0]}", rest[1:]
        if self._module(place) is None:
            return
        yield from self._resolve(place, rest[0] if rest else _ALL)

    def _exports(self, place: str, name: str) -> bool:
        module = self._module(place)
        return module is not None and name in module.exported

    def _resolve(self, place: str, name: str) -> Iterator[Symbol]:
        """Yields what the name `name` of a module means."""
        module = self._module(place)
        if module is None:
            return
        if name == _ALL or name in module.definitions:
            yield Symbol(place, name)
        elif name in module.exported:
            yield from self._descend(module.exported[name], [])
        elif name in module.imports:
            for target in module.imports[name]:
                yield from self._descend(target, [])
        elif self._is_module(f"{place}.{name}"):
            yield Symbol(f"{place}.{name}", _ALL)
        elif not name.startswith("__"):
            yield Symbol(place, _ALL)

    def _text(self, symbol: Symbol) -> str:
        module = self._module(symbol.module)
        nodes = module.definitions.get(symbol.name, ()) if module else ()
        return " ".join(map(_plain, nodes))

    def _is_module(self, name: str) -> bool:
        return self._file(name) is not None

    def _file(self, name: str) -> pathlib.Path | None:
        top, *inner = name.split(".")
        for folder in self._folders.get(top, ()):
            if folder.is_file():  # a module that lies in no package
                return None if inner else folder
            place = folder.joinpath(*inner)
            for file in (place / "__init__.py", place.with_name(f"{place.name}.py")):
                if file.is_file() and (inner or file.name == "__init__.py"):
                    return file
        return None

    def _module(self, name: str) -> "_Module | None":
        if name not in self._modules:
            file = self._file(name)
            self._modules[name] = None if file is None else _Module(name, file)
        return self._modules[name]


def _folders(package: str) -> tuple[pathlib.Path, ...]:
    """Returns the folders of an imported package; its file if it is one module."""
    module = sys.modules[package]
    folders = list(getattr(module, "__path__", ())) or [getattr(module, "__file__", "")]
    return tuple(pathlib.Path(folder) for folder in folders if folder)


class _Module:
    """What a module's text defines and imports.

    Attributes:
      name: dotted.
      definitions: statements by the name that they define; `_REST` are all others.
      imports: targets by the name that they are bound to anywhere in the module:
        `"package.module"`, or `"package.module:name"` for a name out of one.
      exported: targets by name, of a package whose names are loaded when used.
    """

    def __init__(self, name: str, file: pathlib.Path) -> None:
        self.name = name
        self._package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        tree = _Bare().visit(ast.parse(file.read_text(encoding="utf-8")))
        self.definitions: dict[str, list[ast.AST]] = {_REST: []}
        self.imports: dict[str, set[str]] = {}
        self.exported: dict[str, str] = {}
        for node in ast.walk(tree):
            for bound, target in self._targets(node):
                self.imports.setdefault(bound, set()).add(target)
        for node in tree.body:
            if not isinstance(node, (ast.Import, ast.ImportFrom)):
                for bound in _defined(node) or [_REST]:
                    self.definitions.setdefault(bound, []).append(node)
        stub = file.with_suffix(".pyi")
        if stub.is_file():
            for node in ast.parse(stub.read_text(encoding="utf-8")).body:
                self.exported.update(self._targets(node))

    def _targets(self, node: ast.AST) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.Import):
            for alias in node.names:
                whole = alias.name if alias.asname else alias.name.partition(".")[0]
                yield alias.asname or whole, whole
        if isinstance(node, ast.ImportFrom):
            source = node.module or ""
            if node.level:
                around = self._package.split(".")
                kept = around[: len(around) - node.level + 1]
                source = ".".join([*kept, source] if source else kept)
            for alias in node.names:
                yield alias.asname or alias.name, f"{source}:{alias.name}"


class _Bare(ast.NodeTransformer):
    """Removes from a tree what has no effect on results."""

    def generic_visit(self, node: ast.AST) -> ast.AST:
        super().generic_visit(node)
        body = getattr(node, "body", None)
        if isinstance(body, list):
            node.body = [each for each in body if not _is_text(each)]  # pyrefly: ignore
        return node

    def visit_arg(self, node: ast.arg) -> ast.AST:
        node.annotation = None
        return node

    def visit_FunctionDef(self, node: ast.FunctionDef) -> ast.AST:
        node.returns = None
        return self.generic_visit(node)

    def visit_AnnAssign(self, node: ast.AnnAssign) -> ast.AST:
        self.generic_visit(node)
        node.annotation = ast.Constant(value=None)
        return node

    def visit_If(self, node: ast.If) -> ast.AST | None:
        """Drops `if TYPE_CHECKING`, which never runs."""
        if isinstance(node.test, ast.Name) and node.test.id == "TYPE_CHECKING":
            return None
        return self.generic_visit(node)


def _is_text(node: ast.AST) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def _defined(node: ast.AST) -> list[str]:
    """Returns the names that a statement at the top level defines."""
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    targets = getattr(node, "targets", None) or [getattr(node, "target", None)]
    if isinstance(node, (ast.Assign, ast.AnnAssign, ast.AugAssign)):
        return [
            each.id
            for target in targets
            for each in ast.walk(target)
            if isinstance(each, ast.Name)
        ]
    return []


def _mentions(
    node: ast.AST, hidden: frozenset[str] = frozenset()
) -> Iterator[tuple[str, ...]]:
    """Yields the dotted names that a tree reads, and texts `"module:name"`.

    Args:
      node: the tree.
      hidden: names that mean variables of the functions around it.
    """
    path = _dotted(node)
    if path:
        if path[0] not in hidden:
            yield path
        return
    text = node.value if isinstance(node, ast.Constant) else None
    if isinstance(text, str) and _PLACE.fullmatch(text):
        yield (text,)
    if isinstance(node, _SCOPES):
        hidden |= frozenset(_variables(node))
    for child in ast.iter_child_nodes(node):
        yield from _mentions(child, hidden)


_SCOPES = (
    ast.FunctionDef,
    ast.AsyncFunctionDef,
    ast.Lambda,
    ast.ListComp,
    ast.SetComp,
    ast.DictComp,
    ast.GeneratorExp,
)


def _variables(scope: ast.AST) -> Iterator[str]:
    """Yields the arguments and variables of a function, but not of those inside it."""
    waiting = list(ast.iter_child_nodes(scope))
    while waiting:
        node = waiting.pop()
        if isinstance(node, ast.arg):
            yield node.arg
        elif isinstance(node, ast.Name) and not isinstance(node.ctx, ast.Load):
            yield node.id
        elif isinstance(node, ast.Global):
            continue
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            yield node.name
        elif not isinstance(node, _SCOPES):
            waiting += ast.iter_child_nodes(node)


def _dotted(node: ast.AST) -> tuple[str, ...]:
    names: list[str] = []
    while isinstance(node, ast.Attribute):
        names.append(node.attr)
        node = node.value
    if not isinstance(node, ast.Name):
        return ()
    is_set = not names and isinstance(node.ctx, ast.Store)
    return () if is_set else (node.id, *reversed(names))


@functools.cache
def _plain(node: ast.AST) -> str:
    """Returns a tree as text that no version of Python writes in another way."""
    fields = (
        (name, value)
        for name, value in ast.iter_fields(node)
        if value not in (None, []) and name not in ("kind", "type_comment", "ctx")
    )
    texts = []
    for name, value in fields:
        if isinstance(value, list):
            each = [_plain(v) if isinstance(v, ast.AST) else repr(v) for v in value]
            texts.append(f"{name}=[{','.join(each)}]")
        else:
            plain = _plain(value) if isinstance(value, ast.AST) else repr(value)
            texts.append(f"{name}={plain}")
    return f"{type(node).__name__}({','.join(texts)})"
