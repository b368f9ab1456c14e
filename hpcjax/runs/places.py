"""The search path of experiments and configs.

`experiments/` and `configs/` are namespace packages whose parts are searched in

1. the root, by default the working directory;
2. the checkout that `hpcjax/` lies in;
3. without such a checkout, and unless the root is one, `hpcjax/_bundled/`.

A paper is a folder in `experiments/` or `configs/`, and its name may occur in one root
only. A checkout therefore replaces the bundled papers and is never mixed with them,
while a user's own root adds to either.
"""

import importlib
import importlib.machinery
import importlib.util
import pathlib
import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

from hpcjax.core import parts as part_lists
from hpcjax.core.errors import ConfigError

PACKAGES = ("experiments", "configs")
_PARTS = "experiments/*/parts.py"
_HOME = pathlib.Path(__file__).resolve().parent.parent


def search_path(root: pathlib.Path) -> tuple[pathlib.Path, ...]:
    """Returns the folders that may hold `experiments/` and `configs/`."""
    folders = [root.resolve()]
    source = checkout()
    if source is not None:
        if _is_checkout(folders[0]) and folders[0] != source.resolve():
            raise ConfigError(
                f"{folders[0]} is a checkout of hpcjax, and the one that runs is "
                f"{source}: run `python -m hpcjax` in that folder, or its own .venv's "
                "hpcjax"
            )
        folders.append(source)
    elif not _is_checkout(root):
        folders.append(_HOME / "_bundled")
    parts = tuple(dict.fromkeys(folder for folder in folders if _holds(folder)))
    _check_parts(parts)
    return parts


def checkout() -> pathlib.Path | None:
    """Returns the checkout that `hpcjax` is imported from, None for an installation."""
    return _HOME.parent if _is_checkout(_HOME.parent) else None


def _is_checkout(folder: pathlib.Path) -> bool:
    files = ("pyproject.toml", "hpcjax/__init__.py")
    return all((folder / name).is_file() for name in files) and _holds(folder)


def _holds(folder: pathlib.Path) -> bool:
    return any((folder / package).is_dir() for package in PACKAGES)


def _check_parts(parts: tuple[pathlib.Path, ...]) -> None:
    owners: dict[str, pathlib.Path] = {}
    for part in parts:
        for package in PACKAGES:
            file = part / package / "__init__.py"
            if file.exists():
                raise ConfigError(f"{package}/ is a namespace package: remove {file}")
        for paper in papers(part):
            if paper in owners:
                raise ConfigError(
                    f"paper {paper!r} is in two roots: {owners[paper]} and {part}; "
                    "rename one, or pass another --root"
                )
            owners[paper] = part


def papers(part: pathlib.Path) -> set[str]:
    """Returns the names of the papers in a folder of the search path."""
    return {
        folder.name
        for package in PACKAGES
        if (part / package).is_dir()
        for folder in (part / package).iterdir()
        if folder.is_dir() and folder.name.isidentifier()
    }


def activate(root: pathlib.Path) -> tuple[pathlib.Path, ...]:
    """Makes `experiments` and `configs` importable from the search path of `root`.

    Imported modules of roots that are no longer on the search path are removed from
    `sys.modules`, so that a process can use several roots one after another.

    Returns:
      The search path.
    """
    parts = search_path(root)
    for package in PACKAGES:
        folders = [str(part / package) for part in parts if (part / package).is_dir()]
        module = sys.modules.get(package)
        if getattr(module, "__file__", None):
            raise ConfigError(
                f"another package named {package!r} is imported: {module.__file__}"
            )
        if module is None:
            spec = importlib.machinery.ModuleSpec(package, None, is_package=True)
            module = sys.modules[package] = importlib.util.module_from_spec(spec)
        if list(getattr(module, "__path__", [])) != folders:
            _forget(package, folders)
            module.__path__ = folders
            importlib.invalidate_caches()
    part_lists.list_of_root(dict(_read_part_lists(parts)))
    return parts


def _read_part_lists(folders: tuple[pathlib.Path, ...]) -> Iterator[tuple[str, Any]]:
    """Yields (file, its `PARTS`) of each `experiments/<paper>/parts.py`."""
    for file in sorted(f for part in folders for f in part.glob(_PARTS)):
        module = import_file(f"experiments.{file.parent.name}.parts", file)
        listing = getattr(module, "PARTS", None)
        if not isinstance(listing, Mapping):
            raise ConfigError(f"{file} must define PARTS, {{kind: {{name: place}}}}")
        yield str(file), listing


def _forget(package: str, folders: list[str]) -> None:
    # Innermost first, since the path of a namespace package is computed from that of
    # the package around it, which must still exist.
    inwards = sorted(sys.modules, key=lambda name: -name.count("."))
    for name, module in [(name, sys.modules[name]) for name in inwards]:
        if not name.startswith(package + "."):
            continue
        places = list(getattr(module, "__path__", [])) or [
            getattr(module, "__file__", "") or ""
        ]
        kept = any(
            pathlib.Path(place).is_relative_to(folder)
            for place in places
            for folder in folders
        )
        if not kept:
            del sys.modules[name]
            parent, _, child = name.rpartition(".")
            vars(sys.modules.get(parent, module)).pop(child, None)


def import_file(name: str, file: pathlib.Path) -> types.ModuleType:
    """Imports a module of the search path.

    Raises:
      ConfigError: it fails; the file is named.
    """
    try:
        return importlib.import_module(name)
    except ConfigError as error:
        raise ConfigError(f"{file}: {error}") from error
    except Exception as error:
        raise ConfigError(
            f"{file} cannot be imported: {type(error).__name__}: {error}"
        ) from error
