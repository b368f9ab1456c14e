"""A sweep's journal: JSON lines, of which Optuna appends one for every change."""

import json
import pathlib
from typing import TYPE_CHECKING, Any, cast

import filelock

from hpcjax.core import files
from hpcjax.core.errors import ConfigError, DataFormatError

if TYPE_CHECKING:
    import optuna

NAME = "journal.log"
CELL = "cell"  # the attribute of a trial that is the number of its point
_OPERATIONS = range(11)  # of Optuna's `JournalOperation`


def open_journal(folder: pathlib.Path) -> "optuna.Study":
    """Returns the study whose changes are the lines of a sweep's journal.

    Raises:
      ConfigError: Optuna is not installed.
      DataFormatError: the journal is damaged; names file and line.
    """
    try:
        import optuna
    except ImportError as error:
        raise ConfigError("sweeps need optuna: pip install 'hpcjax[sweep]'") from error
    from optuna.storages import journal

    class Lock:
        """A lock that the operating system releases if its process is killed."""

        def __init__(self) -> None:
            self._lock = filelock.FileLock(folder / ".journal.lock")

        def acquire(self) -> bool:
            self._lock.acquire()
            files.cut_torn_line(folder / NAME)
            return True

        def release(self) -> None:
            self._lock.release()

    optuna.logging.set_verbosity(optuna.logging.ERROR)
    path, lock_of = folder / NAME, Lock()
    _check_journal(path)
    backend = journal.JournalFileBackend(str(path), lock_obj=cast("Any", lock_of))
    try:
        study = optuna.create_study(
            study_name=folder.name,
            storage=optuna.storages.JournalStorage(backend),
            load_if_exists=True,
        )
    except (AttributeError, LookupError, TypeError, ValueError) as error:
        raise _damaged(path, repr(error)) from error
    _check_points(path, study)
    return study


def _check_journal(path: pathlib.Path) -> None:
    """Raises DataFormatError at a line that is none of a sweep's.

    Optuna passes over the last one, and over trials of other studies. What follows the
    last line's end is of a write that was cut off, and is mended.
    """
    *lines, _ = path.read_bytes().split(b"\n") if path.exists() else [b""]
    for number, line in enumerate(lines, 1):
        try:
            problem = _find_problem(json.loads(line))
        except (ValueError, RecursionError):
            problem = "is not JSON"
        if problem:
            raise _damaged(path, f"line {number} {problem}")


def _find_problem(entry: Any) -> str:
    """Returns what is wrong with a line's content, "" if nothing is."""
    if not isinstance(entry, dict):
        return "is not a JSON object"
    if entry.get("op_code") not in _OPERATIONS:
        return f"has op_code {entry.get('op_code')!r}"
    if entry.get("study_id", 0) != 0:
        return f"is of study {entry['study_id']!r}, where there is only study 0"
    attributes = entry.get("user_attrs", entry.get("user_attr", {}))
    if not isinstance(attributes, dict):
        return f"has user_attrs {attributes!r}"
    cell = attributes.get(CELL, 0)
    return "" if type(cell) is int and cell >= 0 else f"has the point's number {cell!r}"


def _check_points(path: pathlib.Path, study: "optuna.Study") -> None:
    """Raises DataFormatError if a trial has parameters of another one.

    Lines name a trial by how many were created before it. Where the line that created
    one is gone, what was said of it is taken for said of the next.
    """
    for trial in study.get_trials(deepcopy=False):
        point = trial.system_attrs.get("fixed_params", trial.params)
        if any(point.get(key) != value for key, value in trial.params.items()):
            raise _damaged(
                path,
                f"trial {trial.number} is of {point} and has {trial.params}, as where "
                "a line is missing",
            )


def _damaged(path: pathlib.Path, how: str) -> DataFormatError:
    return DataFormatError(
        f"{path} is damaged: {how}. Put it back, or remove it and run the sweep again: "
        "runs that have ended are used again"
    )
