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

import xxhash

from hpcjax.core.errors import ConfigError, DataFormatError, DataMissing, DiskFull

_CHUNK = 1 << 20
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
    """Turns a lack of room while writing `path` into `DiskFull`.

    The message tells the free bytes, or the largest file that this process may write.
    """
    try:
        yield
    except OSError as error:
        if error.errno == errno.EFBIG:
            raise DiskFull(f"{path} cannot be written: {_size_limit()}") from error
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            raise
        existing = next(p for p in (path, *path.parents) if p.exists())
        free = shutil.disk_usage(existing).free
        raise DiskFull(f"no space left to write {path}: {free} bytes free") from error


def check_room(path: pathlib.Path, nbytes: int) -> None:
    """Raises `DiskFull` if a file of that size cannot be written at `path`.

    Another process may fill the disk meanwhile: `disk_errors` turns that into an error.
    """
    existing = next(p for p in (path, *path.parents) if p.exists())
    free = shutil.disk_usage(existing).free
    if free < nbytes:
        raise DiskFull(
            f"no space left to write {path}: {free} bytes free, {nbytes} needed"
        )
    limit = _largest_file()
    if limit is not None and limit < nbytes:
        raise DiskFull(f"{path} cannot be written: {_size_limit()}")


def _largest_file() -> int | None:
    """Returns how many bytes a file of this process may have; None is any number."""
    import resource  # Unix has it, as it has limits

    limit, _ = resource.getrlimit(resource.RLIMIT_FSIZE)
    return None if limit == resource.RLIM_INFINITY else limit


def _size_limit() -> str:
    """Returns why a file cannot grow: a limit on this process, or its file system's."""
    limit = _largest_file()
    if limit is None:
        return "its file system holds no file so large"
    return f"no file may have more than {limit} bytes here, see `ulimit -f`"


def make_folder(path: pathlib.Path) -> None:
    """Makes a folder, with those above it, unless it is there.

    Raises:
      ConfigError: there can be none.
      DiskFull: there is no room for it.
    """
    try:
        with disk_errors(path):
            path.mkdir(parents=True, exist_ok=True)
    except DiskFull:
        raise
    except OSError as error:
        raise ConfigError(f"no folder can be made at {path}: {error}") from error


def check_folder(path: pathlib.Path) -> None:
    """Raises ConfigError if there is no such folder."""
    if not path.is_dir():
        raise ConfigError(f"there is no folder {path}")


@contextlib.contextmanager
def replacing(path: pathlib.Path, *, durable: bool = True) -> Iterator[pathlib.Path]:
    """Yields a temporary file that replaces `path` once the block has written it.

    Args:
      path: the file.
      durable: whether it is safe on the disk then, also if the power fails.

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
            if durable:
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


def checksum(path: pathlib.Path) -> str:
    """Returns the xxh3-128 of a file, read in chunks."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


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
