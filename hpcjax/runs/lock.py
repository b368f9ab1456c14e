"""The lock of a run directory, which lets one process write to it."""

import contextlib
import datetime
import json
import logging
import math
import os
import pathlib
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import filelock
import psutil

from hpcjax.core import files
from hpcjax.core.errors import RunBusy

log = logging.getLogger(__name__)
_BEAT, _SILENCE = 10.0, 120.0  # seconds
_PROC = pathlib.Path("/proc")


@contextlib.contextmanager
def hold(folder: pathlib.Path) -> Iterator[None]:
    """Holds `folder/lock` for as long as the block runs.

    The file is created with `O_EXCL`, names its holder, and is touched regularly while
    it is held. A lock whose process has ended is taken over with a warning: on this
    host at once, on another host if it has not been touched for two minutes.

    Raises:
      RunBusy: it is held, also if by another part of this process.
    """
    path, mine = folder / "lock", me()
    # Two processes that find the same stale lock must not both replace it.
    with filelock.FileLock(folder.parent / ".lock.guard"), files.disk_errors(path):
        if path.exists():
            _take_over(path)
        handle = os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY, 0o644)
        with os.fdopen(handle, "w") as file:
            json.dump(mine, file)
    try:
        with _keep_touching(path):
            yield
    finally:
        if _read(path) == mine:
            path.unlink()


@contextlib.contextmanager
def _keep_touching(path: pathlib.Path) -> Iterator[None]:
    """Touches a file every ten seconds, to show other hosts that this process lives."""
    end = threading.Event()

    def touch() -> None:
        while not end.wait(_BEAT):
            with contextlib.suppress(OSError):
                os.utime(path)

    thread = threading.Thread(target=touch, daemon=True)
    thread.start()
    try:
        yield
    finally:
        end.set()
        thread.join()


def is_held(folder: pathlib.Path) -> bool:
    """Returns whether a living process holds the folder, as far as can be told here."""
    return bool(find_holder(folder))


def find_holder(folder: pathlib.Path) -> str:
    """Returns the host of the living process that holds a folder, "" if none does."""
    owner = _read(folder / "lock")
    lives = owner is not None and _is_alive(owner, folder / "lock")
    return owner["host"] if lives else ""


def me() -> dict[str, Any]:
    """Returns what identifies this process: pid, host and the times of its start."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        # Pids are reused; a pid together with its start time is unique.
        "started": _started(os.getpid()),
    }


def _started(pid: int) -> str | float:
    """Returns when a process started: on Linux the boot's id and the ticks since then.

    These do not depend on the clock. On other systems it is seconds since 1970.
    """
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return psutil.Process(pid).create_time()
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise psutil.NoSuchProcess(pid) from error
    # `man proc_pid_stat`: the second field is a name in brackets that may contain
    # anything, the 22nd the start; after the last bracket follows the third.
    return f"{boot} {int(stat.rpartition(b')')[2].split()[19])}"


def _read(path: pathlib.Path) -> dict[str, Any] | None:
    try:
        owner = files.read_json(path)
    except (FileNotFoundError, ValueError):
        return None
    return owner if isinstance(owner, dict) else None


def _age(path: pathlib.Path) -> float:
    """Returns the seconds since a file was touched, by the clock of its disk."""
    try:
        with tempfile.TemporaryFile(dir=path.parent) as now:
            return os.fstat(now.fileno()).st_mtime - path.stat().st_mtime
    except FileNotFoundError:
        return math.inf


def _take_over(path: pathlib.Path) -> None:
    """Removes a lock whose process has ended, or raises RunBusy."""
    owner = _read(path)
    # Locks are written under the guard, so an unreadable one was truncated by a kill.
    if owner is not None and _is_alive(owner, path):
        pid, host, since = (owner.get(name) for name in ("pid", "host", "since"))
        raise RunBusy(
            f"{path.parent} is held by process {pid} on {host} since {since}"
            + (
                ""
                if host == socket.gethostname()
                else f"; if it has ended, wait {_SILENCE:.0f} s"
            )
        )
    holder = "an unknown process" if owner is None else f"process {owner.get('pid')}"
    log.warning("taking over %s, left by %s, which has ended", path, holder)
    path.unlink()


def _is_alive(owner: Mapping[str, Any], sign: pathlib.Path) -> bool:
    """Returns whether a process is alive."""
    if owner.get("host") != socket.gethostname():
        return _age(sign) < _SILENCE
    try:
        pid, recorded = int(owner["pid"]), owner.get("started")
        if isinstance(recorded, str):
            return recorded == _started(pid)
        # Times by the clock, which may have been adjusted in between.
        started = psutil.Process(pid).create_time()
        return recorded is None or abs(started - float(recorded)) < 5
    except (psutil.NoSuchProcess, KeyError, TypeError, ValueError):
        return False
