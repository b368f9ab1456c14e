"""One writer per run directory."""

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

    The file is made with `O_EXCL` and says who holds it, and is touched for as long as
    it is held. One left by a process that has ended is taken over, with a warning: of
    this host at once, of another one when it has not been touched for two minutes.

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
        with touched(path):
            yield
    finally:
        if _read(path) == mine:
            path.unlink()


@contextlib.contextmanager
def touched(path: pathlib.Path) -> Iterator[None]:
    """Touches a file every ten seconds, so that other hosts see that we live."""
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
    """Says whether a process holds the folder, as far as can be told from here."""
    owner = _read(folder / "lock")
    return owner is not None and is_alive(owner, folder / "lock")


def me() -> dict[str, Any]:
    """Returns what identifies this process: pid, host, and when either began."""
    return {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "since": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        # A pid is given out again, with another start.
        "started": _started(os.getpid()),
    }


def _started(pid: int) -> str | float:
    """Returns when a process began: on Linux the boot, and the ticks since then.

    No change of the clock moves these. Elsewhere it is in seconds since 1970.

    Raises:
      psutil.NoSuchProcess: there is none of this number.
    """
    try:
        boot = (_PROC / "sys/kernel/random/boot_id").read_text().strip()
    except OSError:
        return psutil.Process(pid).create_time()
    try:
        stat = (_PROC / str(pid) / "stat").read_bytes()
    except (FileNotFoundError, ProcessLookupError) as error:
        raise psutil.NoSuchProcess(pid) from error
    # The second field, a name in brackets, may hold anything; the 22nd is the start.
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
    owner = _read(path)
    # Written under the guard: an unreadable one was cut off by a kill.
    if owner is not None and is_alive(owner, path):
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


def is_alive(owner: Mapping[str, Any], sign: pathlib.Path) -> bool:
    """Says whether a process lives.

    Args:
      owner: what `me` said there.
      sign: a file that it keeps `touched`, which tells where it is on another host.
    """
    if owner.get("host") != socket.gethostname():
        return _age(sign) < _SILENCE
    try:
        pid, told = int(owner["pid"]), owner.get("started")
        if isinstance(told, str):
            return told == _started(pid)
        # By the clock, which may have been set a little since.
        started = psutil.Process(pid).create_time()
        return told is None or abs(started - float(told)) < 5
    except (psutil.NoSuchProcess, KeyError, TypeError, ValueError):
        return False
