"""Clocks that the kernel lets one limit, set and given back whatever happens.

Each knob is a pair of files, the least and the greatest clock, of Linux's cpufreq or
devfreq. Before the first write their texts go to a journal on the disk. They are
written back at the end, on errors and signals, and after a SIGKILL or a loss of power
by the next start, or by hand (`restore_clocks`).
"""

import bisect
import os
import pathlib
import signal
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol, Self

import filelock

from hpcjax.core import checks, files
from hpcjax.core.errors import (
    ConfigError,
    DataFormatError,
    HpcjaxError,
    RunBusy,
    nearest,
)
from hpcjax.perf.energy import SYS, read_number

_SETTLE, _POLL = 0.2, 0.02  # seconds


class Clocks(Protocol):
    """What sets clocks."""

    def grids(self) -> Mapping[str, tuple[int, ...]]:
        """Returns the values of each knob, ascending, in the units of its files."""
        ...

    def set(self, **values: int) -> None:
        """Sets some knobs."""
        ...

    def restore(self) -> None:
        """Gives all knobs the values they had; may be called again."""
        ...


class Knob(NamedTuple):
    """The pair of files that limits one clock.

    Attributes:
      low: the least clock.
      high: the greatest clock.
      current: the clock as it is.
      values: that can be set, ascending.
    """

    low: pathlib.Path
    high: pathlib.Path
    current: pathlib.Path
    values: tuple[int, ...]


def find_knobs(root: pathlib.Path = SYS) -> dict[str, Knob]:
    """Returns the knobs of cpufreq, in kHz, and devfreq, in Hz, below a root.

    One that lists no clocks has the least and the greatest of its hardware, or in
    devfreq, which does not tell these, of its present limits.

    Raises:
      ConfigError: a list of anything but integers.
    """
    knobs = {}
    for folder in sorted(root.glob("devices/system/cpu/cpufreq/policy*")):
        limits = [folder / f"cpuinfo_{end}_freq" for end in ("min", "max")]
        knobs[folder.name] = Knob(
            folder / "scaling_min_freq",
            folder / "scaling_max_freq",
            folder / "scaling_cur_freq",
            _values(folder / "scaling_available_frequencies", limits),
        )
    for folder in sorted(root.glob("class/devfreq/*")):
        pair = folder / "min_freq", folder / "max_freq"
        values = _values(folder / "available_frequencies", list(pair))
        knobs[folder.name] = Knob(*pair, folder / "cur_freq", values)
    return knobs


def _values(listed: pathlib.Path, ends: list[pathlib.Path]) -> tuple[int, ...]:
    text = listed.read_text() if listed.exists() else ""
    try:
        values = set(map(int, text.split()))
    except ValueError as error:
        raise ConfigError(f"{listed} must list clocks: {error}") from error
    return tuple(sorted(values or {read_number(end) for end in ends}))


class Sysfs:
    """Clocks of this machine, as a context: `with Sysfs(journal, ...) as clocks`.

    Attributes:
      knobs: by name.
    """

    def __init__(
        self,
        journal: pathlib.Path,
        *,
        allow_write: bool,
        root: pathlib.Path = SYS,
    ) -> None:
        """Finds the knobs; writes nothing.

        Args:
          journal: the file that keeps the original values while they are changed; its
            lock is beside it. The same for all who set clocks of this machine.
          allow_write: whether clocks may be set at all.
          root: what the kernel mounts as /sys.

        Raises:
          ConfigError: there is no knob.
        """
        self.knobs = find_knobs(root)
        checks.require(bool(self.knobs), "there is no clock to set", root=str(root))
        self._journal, self._allow_write = journal, allow_write
        self._lock = filelock.FileLock(journal.with_suffix(".lock"))
        self._before: Any = None

    def grids(self) -> dict[str, tuple[int, ...]]:
        """Returns the values of each knob, ascending: kHz of cpufreq, Hz of devfreq."""
        return {name: knob.values for name, knob in self.knobs.items()}

    def __enter__(self) -> Self:
        """Takes the lock, and restores what a process that was killed has left.

        Raises:
          RunBusy: another process sets clocks.
        """
        files.make_folder(self._journal.parent)
        try:
            self._lock.acquire(blocking=False)
        except filelock.Timeout as error:
            raise RunBusy(
                f"{self._lock.lock_file} is held: clocks are in use"
            ) from error
        try:
            restore_clocks(self._journal)
            self._catch_sigterm()
        except BaseException:
            self._lock.release()
            raise
        return self

    def __exit__(self, *exception: object) -> None:
        """Restores all clocks, and releases the lock."""
        try:
            self.restore()
        finally:
            if self._before is not None:
                signal.signal(signal.SIGTERM, self._before)
            self._lock.release()

    def set(self, **values: int) -> None:
        """Sets the least and the greatest clock of some knobs to a value each.

        Raises:
          ConfigError: writing is not allowed, the context is not open, an unknown knob,
            a value off its grid, or a file that cannot be written.
        """
        rule = "clocks are set only with allow_write=true, inside of a `with`"
        good = self._allow_write and self._lock.is_locked
        checks.require(good, rule, allow_write=self._allow_write)
        for name, value in values.items():
            if name not in self.knobs:
                raise ConfigError(f"no knob {name!r}{nearest(name, self.knobs)}")
            checks.require_on_grid(name, value, self.knobs[name].values)
        self._keep()
        for name, value in values.items():
            knob = self.knobs[name]
            _write_pair(knob.low, knob.high, value, value)

    def settle(self, timeout: float = 2.0) -> None:
        """Waits until each clock that is fixed has been within a step of its value.

        Raises:
          HpcjaxError: one has not: it is throttled, or was not obeyed.
        """
        end = time.monotonic() + timeout
        since = time.monotonic()
        while time.monotonic() - since < _SETTLE:
            far = [text for knob in self.knobs.values() if (text := _off(knob))]
            if far and time.monotonic() > end:
                raise HpcjaxError(f"clocks are not reached: {'; '.join(far)}")
            since = time.monotonic() if far else since
            time.sleep(_POLL)

    def restore(self) -> None:
        """Writes the original values, if there are any, and removes the journal."""
        restore_clocks(self._journal)

    def _keep(self) -> None:
        """Writes the original values to the journal, before the first change."""
        if self._journal.exists():
            return
        pairs = [
            [(str(path), path.read_text().strip()) for path in (knob.low, knob.high)]
            for knob in self.knobs.values()
        ]
        files.write_json(self._journal, pairs)
        _sync_folder(self._journal.parent)

    def _catch_sigterm(self) -> None:
        """Has SIGTERM end the process by an exception, unless somebody handles it."""
        main = threading.current_thread() is threading.main_thread()
        if main and signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            self._before = signal.signal(signal.SIGTERM, _leave)


def _leave(number: int, *_: object) -> None:
    raise SystemExit(128 + number)


def restore_clocks(journal: pathlib.Path) -> bool:
    """Writes the values of a journal back, reads them, and removes it.

    Returns:
      Whether there was a journal.

    Raises:
      HpcjaxError: some could not be restored, and which values they had; the others
        have been, and the journal stays.
      DataFormatError: no journal, but another file.
    """
    if not journal.exists():
        return False
    failed = []
    for low, least, high, greatest in _read_journal(journal):
        try:
            # Others, which this user may have no right to write, stay as they are.
            if (read_number(low), read_number(high)) != (least, greatest):
                _write_pair(low, high, least, greatest)
        except ConfigError as error:
            failed.append(f"{error} (it had {least} to {greatest})")
    if failed:
        raise HpcjaxError(f"clocks are not restored: {'; '.join(failed)}")
    journal.unlink()
    return True


def _read_journal(
    journal: pathlib.Path,
) -> list[tuple[pathlib.Path, int, pathlib.Path, int]]:
    try:
        return [
            (pathlib.Path(low), int(least), pathlib.Path(high), int(greatest))
            for (low, least), (high, greatest) in files.read_json(journal)
        ]
    except (TypeError, ValueError) as error:
        raise DataFormatError(f"{journal} is no journal of clocks: {error}") from error


def _write_pair(
    low: pathlib.Path, high: pathlib.Path, least: int, greatest: int
) -> None:
    """Writes two limits such that the least is never above the greatest.

    When clocks are lowered the least one is written first, when raised the greatest.
    """
    pairs = [(low, least), (high, greatest)]
    if least > read_number(high):
        pairs.reverse()
    for path, value in pairs:
        _write(path, value)
        if (found := read_number(path)) != value:
            raise ConfigError(f"{path} was set to {value} and is {found}")


def _write(path: pathlib.Path, value: int) -> None:
    try:
        path.write_text(f"{value}\n")
    except OSError as error:
        raise ConfigError(
            f"{path} cannot be set to {value}: {error.strerror}; it needs root"
        ) from error


def _off(knob: Knob) -> str:
    """Returns how a clock differs from the value that is set, or nothing."""
    wanted = read_number(knob.low)
    if wanted != read_number(knob.high) or not knob.current.exists():
        return ""
    place = bisect.bisect_left(knob.values, wanted)  # others may fix one off the grid
    near = knob.values[max(place - 1, 0) : place + 2]
    found = read_number(knob.current)
    good = min(near) <= found <= max(near)
    return "" if good else f"{knob.current} is {found}, not {wanted}"


def _sync_folder(folder: pathlib.Path) -> None:
    """Has the names in a folder survive a loss of power."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
