"""A disk with no room for files of some names, for tests without the right to mount."""

import contextlib
import errno
import os
import pathlib
from collections.abc import Iterator

import pytest

STAGES = ("write", "fsync", "replace")


@contextlib.contextmanager
def no_room(name: str, stage: str) -> Iterator[list[str]]:
    """Within it, files with `name` in theirs fail at a stage with "no space left".

    Args:
      name: part of the names, of temporary files too.
      stage: "write": half of what is written arrives; "fsync"; "replace".

    Yields:
      The paths that have failed, which a test should look at.
    """
    failed: list[str] = []
    opened, synced, replaced = pathlib.Path.open, os.fsync, pathlib.Path.replace

    def fail(path) -> None:
        if name in pathlib.Path(path).name:
            failed.append(str(path))
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(path))

    def fsync(handle):
        number = handle if isinstance(handle, int) else handle.fileno()
        fail(os.readlink(f"/proc/self/fd/{number}"))
        synced(handle)

    def replace(path, target):
        fail(target)
        return replaced(path, target)

    def open_(path, *args, **kwargs):
        file = opened(path, *args, **kwargs)
        return file if file.readable() else _Half(file, lambda: fail(path))

    with pytest.MonkeyPatch.context() as patch:
        if stage == "write":
            patch.setattr(pathlib.Path, "open", open_)
        elif stage == "fsync":
            patch.setattr(os, "fsync", fsync)
        else:
            patch.setattr(pathlib.Path, "replace", replace)
        yield failed


class _Half:
    """A file of which only half is written where there is no room for all."""

    def __init__(self, file, fail):
        self._file, self._fail = file, fail

    def __getattr__(self, name):
        return getattr(self._file, name)

    def __enter__(self):
        return self

    def __exit__(self, *error):
        self._file.close()

    def write(self, data):
        try:
            self._fail()
        except OSError:
            self._file.write(data[: len(data) // 2])
            raise
        return self._file.write(data)
