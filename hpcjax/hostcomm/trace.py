"""What happened in a run of workers that do not wait: enough to repeat it.

Each kind of run has its own arrays, by step and worker; all are saved, read and joined
in the same way.
"""

import json
import pathlib
from collections.abc import Sequence
from typing import Any, NamedTuple, TypeVar

import numpy as np

from hpcjax.core import checks, files
from hpcjax.core.errors import DataFormatError, DataMissing


class PartialTrace(NamedTuple):
    """A run of partial sums: T steps have T + 1 rounds, the last one for all.

    Attributes:
      arrival: seconds at which each worker arrived at each step, `[T, P]`.
      contributed: the round in whose sum the gradient of a step is, -1 for one that was
        dropped, `[T, P]`.
      applied: first and end of the rounds whose results a worker took after a step, and
        at the end; equal ones mean none, `[T + 1, P, 2]`.
      stale: "accumulate" or "drop".
      sync_models_every: steps between averages of the models; 0: never.
    """

    arrival: np.ndarray
    contributed: np.ndarray
    applied: np.ndarray
    stale: str = "accumulate"
    sync_models_every: int = 0

    @property
    def steps(self) -> int:
        """T."""
        return self.contributed.shape[0]

    @property
    def size(self) -> int:
        """P."""
        return self.contributed.shape[1]

    def contents(self, number: int) -> list[list[int]]:
        """Returns the steps whose gradients each worker's contribution holds."""
        return [np.flatnonzero(own == number).tolist() for own in self.contributed.T]

    def fresh(self) -> np.ndarray:
        """Counts the contributions that hold the gradient of their own step, `[T]`."""
        steps = np.arange(self.steps)[:, None]
        return np.sum(self.contributed == steps, axis=1)

    def staleness(self) -> np.ndarray:
        """Returns round less step of every gradient that was summed, flat."""
        late = self.contributed - np.arange(self.steps)[:, None]
        return late[self.contributed >= 0]


class GroupTrace(NamedTuple):
    """A run of group averages: whose model of which step was averaged when.

    Attributes:
      arrival: seconds at which each worker arrived at each step, `[T, P]`.
      written: the step whose model each rank contributed to each round, -1 for the one
        at the start, `[T, P]`.
      group_size: S.
      tau: rounds from one of all ranks to the next; 0: there was none.
      groups: "butterfly" or "fixed".
      first: rounds of the run before these; groups go on from there.
    """

    arrival: np.ndarray
    written: np.ndarray
    group_size: int
    tau: int
    groups: str = "butterfly"
    first: int = 0

    @property
    def steps(self) -> int:
        """T."""
        return self.written.shape[0]

    @property
    def size(self) -> int:
        """P."""
        return self.written.shape[1]

    def staleness(self) -> np.ndarray:
        """Returns by how many rounds each model was older than its round, `[T, P]`."""
        return np.arange(self.steps)[:, None] - self.written

    def late(self) -> np.ndarray:
        """Says whose new model a round did not contain, `[T, P]`."""
        return self.staleness() > 0


Trace = PartialTrace | GroupTrace
_Kind = TypeVar("_Kind", bound=Trace)
_KIND = "kind"
# By the name in a file: the class, and its arrays with their dtypes and how many rows
# they have beyond one for each step.
_KINDS: dict[str, tuple[type, dict[str, tuple[type, int]]]] = {
    "partial": (
        PartialTrace,
        {"arrival": (float, 0), "contributed": (np.int32, 0), "applied": (np.int32, 1)},
    ),
    "group": (GroupTrace, {"arrival": (float, 0), "written": (np.int32, 0)}),
}


def join_traces(traces: Sequence[_Kind]) -> _Kind:
    """Returns the trace of all workers from those of each, by rank.

    Raises:
      ConfigError: they differ in steps, or are of different kinds or settings.
    """
    arrays = _KINDS[_kind_of(traces[0])][1]
    settings = [
        {"kind": _kind_of(each), "steps": each.steps}
        | {name: value for name, value in each._asdict().items() if name not in arrays}
        for each in traces
    ]
    same = all(each == settings[0] for each in settings)
    checks.require(same, "traces must be of one run", settings=settings)
    joined: dict[str, Any] = {
        name: np.concatenate([getattr(each, name) for each in traces], axis=1)
        for name in arrays
    }
    return traces[0]._replace(**joined)


def save_trace(path: pathlib.Path, trace: Trace) -> None:
    """Writes a trace whole or not at all, as `.npz` or `.json`.

    Raises:
      ConfigError: another ending.
    """
    endings = (".npz", ".json")
    checks.require_choice("the ending of the file's name", path.suffix, endings)
    fields: dict[str, Any] = {_KIND: _kind_of(trace), **trace._asdict()}
    if path.suffix == ".json":
        plain = {name: np.asarray(value).tolist() for name, value in fields.items()}
        files.write_atomic(path, json.dumps(plain) + "\n")
        return
    with files.replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **fields)


def load_trace(path: pathlib.Path) -> Trace:
    """Reads what `save_trace` has written.

    Raises:
      DataMissing: no such file.
      DataFormatError: it is no trace: a field is missing, or does not fit the others.
    """
    try:
        if path.suffix == ".json":
            held = files.read_object(path)
        else:
            with np.load(path) as stored:
                held = dict(stored)
        kind, arrays = _KINDS[str(held.pop(_KIND))]
        fields = {
            name: np.asarray(value, arrays[name][0])
            if name in arrays
            else np.asarray(value).item()
            for name, value in held.items()
        }
        trace = kind(**fields)
    except FileNotFoundError as error:
        raise DataMissing(f"no such file: {path}") from error
    except Exception as error:  # damage may break the reading of it anywhere
        words = f"{path}: expected a trace: {type(error).__name__}: {error}"
        raise DataFormatError(words) from error
    steps, size = trace.arrival.shape if trace.arrival.ndim == 2 else (-1, -1)
    for name, (_, more) in arrays.items():
        if getattr(trace, name).shape[:2] != (steps + more, size):
            raise DataFormatError(f"{path}: arrays of a trace must fit each other")
    return trace


def _kind_of(trace: Trace) -> str:
    return next(name for name, (kind, _) in _KINDS.items() if isinstance(trace, kind))
