"""Who receives what a training run measures; imports no JAX."""

from collections.abc import Mapping
from typing import Any, Protocol, runtime_checkable


@runtime_checkable
class Recorder(Protocol):
    """Receives what a run measures, in the order of steps."""

    def write(self, record: Mapping[str, Any]) -> None:
        """Takes one record: `step`, and metrics of that step."""
        ...

    def rewind(self, step: int) -> float:
        """Forgets records after `step`; returns the training seconds spent until it."""
        ...
