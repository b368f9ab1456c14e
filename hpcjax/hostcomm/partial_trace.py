"""What happened in a run of partial sums: enough to repeat it without any waiting."""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcjax.core import checks, files
from hpcjax.core.errors import DataFormatError, DataMissing


class PartialTrace(NamedTuple):
    """Steps and rounds of all workers; T steps have T + 1 rounds, the last one for all.

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

    def save(self, path: pathlib.Path) -> None:
        """Writes it whole or not at all, as `.npz` or `.json`.

        Raises:
          ConfigError: another ending.
        """
        save_fields(path, self._asdict())


_TYPES = {
    "arrival": np.float64,
    "contributed": np.int32,
    "applied": np.int32,
    "stale": str,
    "sync_models_every": int,
}


def load_trace(path: pathlib.Path) -> PartialTrace:
    """Reads what `PartialTrace.save` has written.

    Raises:
      DataMissing: no such file.
      DataFormatError: it is no trace.
    """
    trace = PartialTrace(**load_fields(path, _TYPES))
    shape = trace.contributed.shape
    fits = len(shape) == 2 and trace.arrival.shape == shape
    if not fits or trace.applied.shape != (shape[0] + 1, shape[1], 2):
        raise DataFormatError(f"{path}: arrays of a trace must fit each other")
    return trace


def join_traces(traces: Sequence[PartialTrace]) -> PartialTrace:
    """Returns the trace of all workers from those of each, by rank.

    Raises:
      ConfigError: they differ in steps, or are of different kinds.
    """
    kinds = {(*each[3:], each.steps) for each in traces}
    checks.require(len(kinds) == 1, "traces must be of one run", found=sorted(kinds))
    arrival, contributed, applied = (
        np.concatenate([each[part] for each in traces], axis=1) for part in range(3)
    )
    return PartialTrace(arrival, contributed, applied, *traces[0][3:])


def save_fields(path: pathlib.Path, fields: Mapping[str, Any]) -> None:
    """Writes arrays, texts and numbers whole or not at all, as `.npz` or `.json`.

    Raises:
      ConfigError: another ending.
    """
    kinds = (".npz", ".json")
    checks.require_choice("the ending of the file's name", path.suffix, kinds)
    if path.suffix == ".json":
        plain = {k: np.asarray(v).tolist() for k, v in fields.items()}
        files.write_atomic(path, json.dumps(plain) + "\n")
        return
    with files.replacing(path) as temporary, temporary.open("wb") as file:
        np.savez_compressed(file, **fields)


def load_fields(path: pathlib.Path, types: Mapping[str, type]) -> dict[str, Any]:
    """Reads what `save_fields` has written; types of numpy are those of arrays.

    Raises:
      DataMissing: no such file.
      DataFormatError: a field is missing or of another type.
    """
    try:
        if path.suffix == ".json":
            found = files.read_object(path)
        else:
            with np.load(path) as arrays:
                found = dict(arrays)
        return {
            name: np.asarray(found[name], kind)
            if issubclass(kind, np.generic)
            else kind(found[name])
            for name, kind in types.items()
        }
    except FileNotFoundError as error:
        raise DataMissing(f"no such file: {path}") from error
    except Exception as error:  # damage may break the reading of it anywhere
        words = f"{path}: expected a trace: {type(error).__name__}: {error}"
        raise DataFormatError(words) from error
