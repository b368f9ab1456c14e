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


@runtime_checkable
class DurableRecorder(Recorder, Protocol):
    """A recorder whose records can be told from those that a checkpoint came with."""

    def mark(self) -> Mapping[str, Any]:
        """Makes all that was written durable; returns JSON values to know it by."""
        ...

    def check(self, mark: Mapping[str, Any]) -> None:
        """Raises DataFormatError unless the records are still there as at `mark`."""
        ...


def mark(recorder: Recorder) -> Mapping[str, Any]:
    """Returns the mark of a recorder's records; nothing if it is not durable."""
    return recorder.mark() if isinstance(recorder, DurableRecorder) else {}


def check(recorder: Recorder, extra: Mapping[str, Any]) -> None:
    """Checks that a recorder has the records of a checkpoint, if it is durable.

    Args:
      recorder: of the run.
      extra: what was saved beside the state.

    Raises:
      DataFormatError: records of the checkpoint are lost.
    """
    kept = extra.get("records")
    if kept and isinstance(recorder, DurableRecorder):
        recorder.check(kept)


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

    def mark(self) -> Mapping[str, Any]:
        """Returns the mark of the run's own records."""
        return mark(self._own)

    def check(self, mark: Mapping[str, Any]) -> None:
        """Checks the run's own records."""
        if isinstance(self._own, DurableRecorder):
            self._own.check(mark)
