"""Files that are whole or absent, and names that stay inside their root."""

import contextlib
import errno
import json
import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Iterator, Mapping
from typing import Any

from hpcjax.core.errors import ConfigError, DataFormatError, DataMissing, DiskFull

_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")


def check_name(name: str, what: str = "name") -> str:
    """Returns `name` if it is one safe path component, else raises ConfigError."""
    if not _NAME.fullmatch(name) or ".." in name or len(name) > 200:
        raise ConfigError(
            f"{what} may hold only letters, digits, '.', '_' and '-', must start with "
            f"a letter or digit and be at most 200 long: got {name[:60]!r}"
        )
    return name


def inside(root: pathlib.Path, *names: str) -> pathlib.Path:
    """Joins checked names below `root`; a symbolic link out of it is a ConfigError."""
    path = root.joinpath(*(check_name(name) for name in names))
    check_inside(root, path)
    return path


def check_inside(root: pathlib.Path, path: pathlib.Path) -> None:
    """Raises ConfigError if `path` is, or lies below, a symbolic link out of `root`."""
    # Path.resolve would fail on links in a circle, which lead nowhere.
    if not pathlib.Path(os.path.realpath(path)).is_relative_to(root.resolve()):
        raise ConfigError(f"{path} leads out of {root}")


@contextlib.contextmanager
def disk_errors(path: pathlib.Path) -> Iterator[None]:
    """Turns "no space left" while writing `path` into `DiskFull` with free bytes."""
    try:
        yield
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        existing = next(p for p in (path, *path.parents) if p.exists())
        free = shutil.disk_usage(existing).free
        raise DiskFull(f"no space left to write {path}: {free} bytes free") from error


@contextlib.contextmanager
def replacing(path: pathlib.Path) -> Iterator[pathlib.Path]:
    """Yields a temporary file that replaces `path` once the block has written it.

    Raises:
      DiskFull: the file system is full; the old content of `path` is untouched.
    """
    with disk_errors(path):
        path.parent.mkdir(parents=True, exist_ok=True)
        handle, name = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)
        temporary = pathlib.Path(name)
        os.close(handle)
        try:
            yield temporary
            with temporary.open("rb") as file:
                os.fsync(file.fileno())
            temporary.chmod(0o644)
            temporary.replace(path)
        finally:
            temporary.unlink(missing_ok=True)


def write_atomic(path: pathlib.Path, content: str | bytes) -> None:
    """Writes a file whole or not at all: temporary file, fsync, rename.

    Raises:
      DiskFull: the file system is full; the old content of `path` is untouched.
    """
    with replacing(path) as temporary:
        temporary.write_bytes(content.encode() if isinstance(content, str) else content)


def cut_torn_line(path: pathlib.Path) -> None:
    """Cuts off a last line that has no end, as a kill or a full disk leaves it."""
    if not path.exists():
        return
    with path.open("rb+") as file:
        size = file.seek(0, os.SEEK_END)
        if size == 0:
            return
        file.seek(-1, os.SEEK_END)
        if file.read(1) != b"\n":
            file.seek(0)
            file.truncate(file.read().rfind(b"\n") + 1)


def write_json(path: pathlib.Path, value: Any) -> None:
    """Writes `value` as indented JSON, whole or not at all."""
    write_atomic(path, json.dumps(value, indent=2, sort_keys=True) + "\n")


def read_json(path: pathlib.Path) -> Any:
    """Reads one JSON file.

    Raises:
      DataMissing: no such file.
      DataFormatError: no JSON, or nested too deeply.
    """
    try:
        return json.loads(path.read_bytes())
    except (FileNotFoundError, IsADirectoryError) as error:
        raise DataMissing(f"no such file: {path}") from error
    except (ValueError, RecursionError) as error:
        raise DataFormatError(f"{path}: expected JSON: {error}") from error


def read_object(path: pathlib.Path) -> dict[str, Any]:
    """Reads a file that holds one JSON object.

    Raises:
      DataMissing: no such file.
      DataFormatError: it holds something else.
    """
    content = read_json(path)
    if not isinstance(content, dict):
        raise DataFormatError(f"{path}: expected a JSON object, found {type(content)}")
    return content


def flatten_json(tree: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Returns the leaves of nested objects by path; an empty object is a leaf.

    Examples:
      >>> flatten_json({"train": {"steps": 300}, "seed": 0})
      {'train.steps': 300, 'seed': 0}
    """
    flat: dict[str, Any] = {}
    for name, value in tree.items():
        if isinstance(value, Mapping) and value:
            flat |= flatten_json(value, f"{prefix}{name}.")
        else:
            flat[prefix + name] = value
    return flat
