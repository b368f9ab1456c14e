"""Each public name has a use in product code, a config, a guide or a notebook."""

import ast
import collections
import pathlib
import re

ROOT = pathlib.Path(__file__).parents[2]
FACTORY = re.compile(r"hpcjax\.[\w.]+:(\w+)")
WORD = re.compile(r"\w+")
GUIDES = ("*.md", "docs/*.md", "experiments/*/README.md", "notebooks/*.py")


def names_of(path):
    """What a file's code names, in texts such as "module:Class" too.

    Docstrings and comments do not count, and a definition is no use.
    """
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Name):
            found.add(node.id)
        elif isinstance(node, ast.Attribute):
            found.add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            # A docstring has spaces.
            found.update(() if " " in node.value else WORD.findall(node.value))
    return found


def factories_of(path):
    return set(FACTORY.findall(path.read_text()))


def public_names():
    """`(room, name, file)` of what the rooms' stubs name."""
    for stub in sorted((ROOT / "hpcjax").rglob("__init__.pyi")):
        for node in ast.parse(stub.read_text()).body:
            if isinstance(node, ast.ImportFrom):
                file = stub.parent.joinpath(*(node.module or "").split("."))
                for alias in node.names:
                    yield stub.parent.name, alias.name, file.with_suffix(".py")


def is_used(name, file, uses, by_file):
    """A class may be what the public functions of its own file take or return."""
    own = by_file.get(file, set())
    elsewhere = uses[name] - (name in own)
    return elsewhere or (name in own and name[0].isupper() and not name.isupper())


def test_every_public_name_has_a_use():
    product = [
        path
        for top in ("hpcjax", "experiments", "configs")
        for path in (ROOT / top).rglob("*.py")
    ]
    by_file = {path: names_of(path) for path in product}
    uses = collections.Counter(name for found in by_file.values() for name in found)
    for pattern in GUIDES:
        for path in ROOT.glob(pattern):
            if path.name != "CHANGELOG.md":
                uses.update(set(WORD.findall(path.read_text())))
    for path in product:
        uses.update(factories_of(path))
    unused = [
        f"{room}.{name}"
        for room, name, file in public_names()
        if not is_used(name, file, uses, by_file)
    ]
    assert not unused, (
        f"only their own files and tests use {unused}: delete what nobody needs; take "
        "what only its own file needs out of `__init__.pyi`, tests then import it from "
        "its file; name what users are to call in a guide"
    )
