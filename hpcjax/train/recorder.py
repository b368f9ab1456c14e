"""Recorders, which receive the measurements of a run; imports no JAX."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable


def training_seconds(records: Iterable[Mapping[str, Any]]) -> float:
    """Returns the greatest training time in records, 0 if none has one."""
    return max((float(r["seconds"]) for r in records if "seconds" in r), default=0.0)


@runtime_checkable
class Recorder(Protocol):
    """Receives the measurements of a run, in the order of steps."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Takes one record: `step`, and metrics of that step."""
        ...

    def rewind(self, step: int) -> float:
        """Drops records after `step`; returns the training seconds until then."""
        ...


class TeeRecorder:
    """A recorder that passes everything on to several recorders.

    Args:
      own: the run's own records. They are written first, so that a record on which
        another recorder fails is kept; its training seconds are those that count.
      others: recorders that display or copy records.
    """

    def __init__(self, own: Recorder, *others: Recorder) -> None:
        self._own, self._others = own, others

    def write(self, record: Mapping[str, Any]) -> None:
        """Writes the record, then passes it on."""
        self._own.write(record)
        for other in self._others:
            other.write(record)

    def rewind(self, step: int) -> float:
        """Drops records after `step`; returns the training seconds until then."""
        seconds = self._own.rewind(step)
        for other in self._others:
            other.rewind(step)
        return seconds
