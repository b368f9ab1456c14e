"""What the text of a module defines, imports and mentions; see `core.sources`.

To parse a hundred modules takes as long as to import JAX, and every run asks for them.
Outlines are therefore kept in the user's cache, by all that they are made of.
"""

import ast
import contextlib
import dataclasses
import functools
import hashlib
import inspect
import json
import pathlib
import sys
from collections.abc import Iterator
from typing import Any

from hpcjax.core import _source_trees, files, user_cache
from hpcjax.core._source_trees import Bare, find_defined, find_mentions, write_plain
from hpcjax.core.errors import DiskFull

# The statements of a module that define nothing, such as registrations.
REST = ""
# What reading an outline raises that is not there, or not whole.
_DAMAGED = (OSError, ValueError, LookupError, TypeError, AttributeError)


@dataclasses.dataclass(frozen=True)
class Definition:
    """What one name at the top level of a module is.

    Attributes:
      texts: of the statements that define it, as `write_plain` has them.
      mentions: the dotted names and texts that it mentions.
      strings: all strings in it, of a module that looks for files beside itself.
    """

    texts: list[str] = dataclasses.field(default_factory=list)
    mentions: list[list[str]] = dataclasses.field(default_factory=list)
    strings: list[str] = dataclasses.field(default_factory=list)


@dataclasses.dataclass(frozen=True)
class Outline:
    """What a module's text defines and imports.

    Attributes:
      name: dotted.
      definitions: by the name that is defined; that of `REST` is all other statements.
      imports: targets by the name that they are bound to anywhere in the module:
        `"package.module"`, or `"package.module:name"` for a name out of one.
      exported: targets by name, of a package whose names are loaded when used.
    """

    name: str
    definitions: dict[str, Definition]
    imports: dict[str, list[str]]
    exported: dict[str, str]

    def definition(self, name: str) -> Definition:
        """Returns the definition of a name; an empty one if there is none."""
        return self.definitions.get(name, Definition())


def find_outline(name: str, package: str, text: bytes, stub: bytes) -> Outline:
    """Returns a module's outline, from the user's cache if it is there.

    Args:
      name: of the module, dotted.
      package: in which relative imports begin.
      text: of the module.
      stub: the text of its `.pyi` file, empty if there is none.
    """
    folder = _folder()
    made_of = json.dumps([name, package]).encode(), text, stub
    key = hashlib.sha256(b"".join(hashlib.sha256(each).digest() for each in made_of))
    path = folder / f"{key.hexdigest()[:32]}.json" if folder else None
    if path is None:
        return _read(name, package, text, stub)
    with contextlib.suppress(*_DAMAGED):
        return _from_json(json.loads(path.read_bytes()))
    found = _read(name, package, text, stub)
    # Where it cannot be kept, it is made again: it is only a cache.
    with (
        contextlib.suppress(OSError, DiskFull),
        files.replacing(path, durable=False) as temporary,
    ):
        temporary.write_text(json.dumps(dataclasses.asdict(found)))
    return found


@functools.cache
def _folder() -> pathlib.Path | None:
    """Returns where outlines are kept that this code makes with this Python."""
    folder = user_cache.find()
    code = [inspect.getsource(each) for each in (_source_trees, sys.modules[__name__])]
    made_by = hashlib.sha256("".join([*code, sys.version]).encode()).hexdigest()[:16]
    return folder / f"outlines-{made_by}" if folder else None


def _from_json(value: dict[str, Any]) -> Outline:
    given = value.pop("definitions").items()
    return Outline(definitions={name: Definition(**d) for name, d in given}, **value)


def _read(name: str, package: str, text: bytes, stub: bytes) -> Outline:
    tree = Bare().visit(ast.parse(text))
    imports: dict[str, list[str]] = {}
    for node in ast.walk(tree):
        for bound, target in _targets(node, package):
            imports.setdefault(bound, []).append(target)
    nodes: dict[str, list[ast.AST]] = {REST: []}
    for node in tree.body:
        if not isinstance(node, (ast.Import, ast.ImportFrom)):
            for bound in find_defined(node) or [REST]:
                nodes.setdefault(bound, []).append(node)
    finds_files = b"__file__" in text
    definitions = {
        bound: Definition(
            texts=[*map(write_plain, each)],
            mentions=[*map(list, sorted({p for n in each for p in find_mentions(n)}))],
            strings=sorted({*_strings(each)} if finds_files else ()),
        )
        for bound, each in nodes.items()
    }
    exported: dict[str, str] = {}
    for node in ast.parse(stub).body:
        exported.update(_targets(node, package))
    return Outline(name, definitions, imports, exported)


def _strings(nodes: list[ast.AST]) -> Iterator[str]:
    for node in nodes:
        for each in ast.walk(node):
            if isinstance(each, ast.Constant) and isinstance(each.value, str):
                yield each.value


def _targets(node: ast.AST, package: str) -> Iterator[tuple[str, str]]:
    """Yields the names that an import binds, and what to."""
    if isinstance(node, ast.Import):
        for alias in node.names:
            whole = alias.name if alias.asname else alias.name.partition(".")[0]
            yield alias.asname or whole, whole
    if isinstance(node, ast.ImportFrom):
        source = node.module or ""
        if node.level:
            around = package.split(".")
            kept = around[: len(around) - node.level + 1]
            source = ".".join([*kept, source] if source else kept)
        for alias in node.names:
            yield alias.asname or alias.name, f"{source}:{alias.name}"
