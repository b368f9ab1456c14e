"""Who receives what a training run measures; imports no JAX."""

from collections.abc import Iterable, Mapping
from typing import Any, Protocol, runtime_checkable


def training_seconds(records: Iterable[Mapping[str, Any]]) -> float:
    """Returns the greatest training time that a record names, 0 without one."""
    return max((float(r["seconds"]) for r in records if "seconds" in r), default=0.0)


@runtime_checkable
class Recorder(Protocol):
    """Receives what a run measures, in the order of steps."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Takes one record: `step`, and metrics of that step."""
        ...

    def rewind(self, step: int) -> float:
        """Forgets records after `step`; returns the training seconds spent until it."""
        ...


class Joined:
    """A recorder that hands everything on to several.

    Args:
      own: the run's own records: written first, so that a record which others cannot
        take is kept; its training seconds are the ones that count.
      others: what shows or copies them.
    """

    def __init__(self, own: Recorder, *others: Recorder) -> None:
        self._own, self._others = own, others

    def write(self, record: Mapping[str, Any]) -> None:
        """Writes the record, then hands it on."""
        self._own.write(record)
        for other in self._others:
            other.write(record)

    def rewind(self, step: int) -> float:
        """Forgets records after `step`; returns the training seconds until it."""
        seconds = self._own.rewind(step)
        for other in self._others:
            other.rewind(step)
        return seconds
