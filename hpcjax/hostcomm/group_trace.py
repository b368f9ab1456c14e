"""What happened in a run of group averages: enough to repeat it without waiting."""

import pathlib
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hpcjax.core import checks
from hpcjax.core.errors import DataFormatError
from hpcjax.hostcomm.partial_trace import load_fields, save_fields


class GroupTrace(NamedTuple):
    """Arrivals of all workers, and whose models of which step were averaged when.

    Attributes:
      arrival: seconds at which each worker arrived at each step, `[T, P]`.
      written: the step whose model each rank contributed to each round, -1 for the one
        at the start, `[T, P]`.
      group_size: S.
      tau: rounds from one of all ranks to the next; 0: there was none.
      groups: "butterfly" or "fixed".
    """

    arrival: np.ndarray
    written: np.ndarray
    group_size: int
    tau: int
    groups: str = "butterfly"

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

    def save(self, path: pathlib.Path) -> None:
        """Writes it whole or not at all, as `.npz` or `.json`.

        Raises:
          ConfigError: another ending.
        """
        save_fields(path, self._asdict())


_TYPES = {
    "arrival": np.float64,
    "written": np.int32,
    "group_size": int,
    "tau": int,
    "groups": str,
}


def load_group_trace(path: pathlib.Path) -> GroupTrace:
    """Reads what `GroupTrace.save` has written.

    Raises:
      DataMissing: no such file.
      DataFormatError: it is no trace.
    """
    trace = GroupTrace(**load_fields(path, _TYPES))
    if trace.arrival.shape != trace.written.shape or trace.arrival.ndim != 2:
        raise DataFormatError(f"{path}: arrays of a trace must fit each other")
    return trace


def join_group_traces(traces: Sequence[GroupTrace]) -> GroupTrace:
    """Returns the trace of all workers from those of each, by rank.

    Raises:
      ConfigError: they differ in steps or settings.
    """
    kinds = {(*each[2:], each.steps) for each in traces}
    checks.require(len(kinds) == 1, "traces must be of one run", found=sorted(kinds))
    arrival, written = (
        np.concatenate([each[part] for each in traces], axis=1) for part in range(2)
    )
    return GroupTrace(arrival, written, *traces[0][2:])
