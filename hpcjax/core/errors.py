"""Errors a caller can react to, each with the exit status its command ends with."""

import difflib
import signal
from collections.abc import Iterable


class HpcjaxError(Exception):
    """Base of the project's errors; `exit_code` is what the command line returns."""

    exit_code = 70


class ConfigError(HpcjaxError, ValueError):
    """A config, override or name that cannot be used; raised before compilation."""

    exit_code = 2


class DataMissing(HpcjaxError, FileNotFoundError):
    """A data set is not on this machine; the message says how to get it."""

    exit_code = 3


class DataFormatError(HpcjaxError, ValueError):
    """A data file is not in its format: names file, place and what was expected."""

    exit_code = 3


class Diverged(HpcjaxError):
    """Training produced non-finite numbers for too many steps in a row."""

    exit_code = 4


class CheckpointCorrupt(HpcjaxError):
    """A checkpoint does not match its manifest."""

    exit_code = 5


class DiskFull(HpcjaxError, OSError):
    """A file could not be written; nothing written before it is lost."""

    exit_code = 6


class RunBusy(HpcjaxError):
    """Another process holds the run directory."""

    exit_code = 2


class ProcessLost(HpcjaxError, RuntimeError):
    """A process of the run died or made no progress; the run can be resumed."""

    exit_code = 7


class Preempted(HpcjaxError):
    """The run was told to stop, wrote a checkpoint and can be resumed."""

    exit_code = 75


class Interrupted(Preempted):
    """The run was stopped from the keyboard, wrote a checkpoint and can be resumed."""

    exit_code = 130


def stopped_by(number: int) -> type[Preempted]:
    """Returns the error class of a run that was stopped by signal `number`."""
    return Interrupted if number == signal.SIGINT else Preempted


class UnsupportedOp(HpcjaxError, NotImplementedError):
    """An operation has no implementation for the given arguments."""

    exit_code = 2


def nearest(name: str, allowed: Iterable[str]) -> str:
    """Returns a hint naming the allowed value closest to `name`, or all of them.

    Examples:
      >>> nearest("momentun", ["lr", "momentum"])
      "; did you mean 'momentum'?"
    """
    allowed = sorted(allowed)
    folded = {each.lower(): each for each in reversed(allowed)}
    close = difflib.get_close_matches(name.lower(), folded, 1, 0.5)
    if close:
        return f"; did you mean {folded[close[0]]!r}?"
    return "; allowed: " + ", ".join(allowed) if allowed else ""
