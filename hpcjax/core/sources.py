"""The code that a function depends on, and a digest of it, read from source files.

A result can only be trusted, or used again, as long as the code that made it is still
the same. All of the code is too much: a new optimizer does not change what an old one
has measured. What was imported is too much, too, for a process imports what its earlier
runs needed. Therefore this module follows names: from a function or class to every
function, class and constant at the top level of a module that its text mentions, and on
from these.

Text that is the dotted name of a module or `"module:name"` is followed, too. So are
files that a module finds beside itself: of a definition whose module mentions
`__file__`, strings that name a file or a folder there; of a folder the files that are
text or NumPy's, and those that a string names.

Documentation, comments, annotations, formatting and the order of definitions do not
count. Packages other than the given ones (JAX, NumPy) do not either: their versions are
part of a result's provenance. Nothing is imported for it.
"""

import dataclasses
import hashlib
import itertools
import pathlib
import sys
from collections.abc import Iterable, Iterator

from hpcjax.core._outlines import REST, Outline, find_outline

# Of a folder that is named; a file that is named counts whatever it ends in.
_READ = {".py", ".csv", ".json", ".txt", ".npz"}
# All of a module: where it is used as a value, nobody can tell what of it is.
_ALL = "*"


@dataclasses.dataclass(frozen=True)
class Symbol:
    """A definition at the top level of a module, `module:name`."""

    module: str
    name: str

    def __str__(self) -> str:
        return f"{self.module}:{self.name}"

    @classmethod
    def parse(cls, place: str) -> "Symbol":
        """Returns the symbol of `"module:name"`; of `"module:Class.name"` the class."""
        module, _, name = place.partition(":")
        return cls(module, name.partition(".")[0])


class Sources:
    """Follows names through the modules of some packages.

    All files are read when it is made. An object that is made when a process starts
    therefore tells what code the process runs, and one that is made later what the
    files hold by then.

    Args:
      packages: top-level packages whose code counts; they must have been imported.
      ignored: modules that cannot change a result, and are not followed.
    """

    def __init__(self, packages: Iterable[str], ignored: Iterable[str] = ()) -> None:
        self._folders = {name: _folders(name) for name in packages}
        self._ignored = frozenset(ignored)
        self._files = dict(_read_all(self._folders.values()))
        self._modules: dict[str, Outline | None] = {}
        self._nearby: dict[Symbol, tuple[Symbol, ...]] = {}
        self._digests: dict[frozenset[Symbol], str] = {}

    def digest(self, places: Iterable[str]) -> str:
        """Returns 16 hex digits of all code that `"module:name"`s depend on."""
        start = frozenset(self._find_all(places))
        if start not in self._digests:
            texts = sorted(f"{s} {self._text(s)}" for s in self.reached(start))
            joined = "\n".join(texts).encode()
            self._digests[start] = hashlib.sha256(joined).hexdigest()[:16]
        return self._digests[start]

    def _find_all(self, places: Iterable[str]) -> Iterator[Symbol]:
        for symbol in map(Symbol.parse, places):
            # Where it is defined; a module may have it of another one.
            yield from self._resolve(symbol.module, symbol.name)

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

    def _mentioned(self, module: Outline | None, name: str) -> Iterator[Symbol]:
        if module is None:
            return
        if name == _ALL:
            for own in (*module.definitions, *module.exported):
                yield from self._resolve(module.name, own)
            return
        if name != REST:
            yield Symbol(module.name, REST)
        for path in module.definition(name).mentions:
            yield from self._follow(module, path)

    def _follow(self, module: Outline, path: list[str]) -> Iterator[Symbol]:
        """Yields what a dotted name in a module means."""
        if len(path) == 1 and (":" in path[0] or "." in path[0]):
            place = Symbol.parse(path[0])
            yield from self._resolve(place.module, place.name or _ALL)
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
        """Returns a definition, what its names were imported as, and files it reads."""
        module = self._module(symbol.module)
        if module is None:
            return ""
        own = module.definition(symbol.name)
        bound = {path[0] for path in own.mentions}
        meant = sorted(
            f"{name}={module.imports[name]}" for name in bound & set(module.imports)
        )
        files = self._digest_files(module.name, own.strings)
        return " ".join([*own.texts, *meant, *files])

    def _digest_files(self, module: str, strings: Iterable[str]) -> Iterator[str]:
        """Yields name and digest of the files beside a module that strings name."""
        beside = self._file(module)
        if beside is None:
            return
        named = set(strings) - {"", ".", "..", "results"}
        for text in sorted(named):
            place = beside.parent / text
            inside = sorted(place.iterdir()) if place.is_dir() else [place]
            for file in inside:
                if file.is_file() and (file.suffix in _READ or file.name in named):
                    yield f"{file.name} {hashlib.sha256(file.read_bytes()).hexdigest()}"

    def _is_module(self, name: str) -> bool:
        return self._file(name) is not None

    def _file(self, name: str) -> pathlib.Path | None:
        top, *inner = name.split(".")
        for folder in self._folders.get(top, ()):
            if folder.is_file():  # a module that lies in no package
                return None if inner else folder
            place = folder.joinpath(*inner)
            for file in (place / "__init__.py", place.with_name(f"{place.name}.py")):
                if file in self._files and (inner or file.name == "__init__.py"):
                    return file
        return None

    def _module(self, name: str) -> Outline | None:
        if name not in self._modules:
            file = self._file(name)
            known = file is not None and name not in self._ignored
            self._modules[name] = self._outline(name, file) if known else None
        return self._modules[name]

    def _outline(self, name: str, file: pathlib.Path) -> Outline:
        package = name if file.name == "__init__.py" else name.rpartition(".")[0]
        stub = self._files.get(file.with_suffix(".pyi"), b"")
        return find_outline(name, package, self._files[file], stub)


def _read_all(
    folders: Iterable[tuple[pathlib.Path, ...]],
) -> Iterator[tuple[pathlib.Path, bytes]]:
    """Yields the source files of packages, and of modules that lie in none."""
    for folder in itertools.chain(*folders):
        inside = [folder] if folder.is_file() else folder.rglob("*.py*")
        for file in inside:
            if file.suffix in (".py", ".pyi"):
                yield file, file.read_bytes()


def _folders(package: str) -> tuple[pathlib.Path, ...]:
    """Returns the folders of an imported package; its file if it is one module."""
    module = sys.modules[package]
    folders = list(getattr(module, "__path__", ())) or [getattr(module, "__file__", "")]
    return tuple(pathlib.Path(folder) for folder in folders if folder)
