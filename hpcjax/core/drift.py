"""How far measured times moved while they were measured, told to whom it concerns."""

import contextlib
import contextvars
from collections.abc import Iterator

STEADY = 0.05  # that a median may move by on a machine that is idle
_told: contextvars.ContextVar[list[float] | None] = contextvars.ContextVar(
    "drifts", default=None
)


@contextlib.contextmanager
def listening() -> Iterator[list[float]]:
    """Collects what is told inside, of this thread.

    Examples:
      >>> with listening() as found:
      ...     tell(0.02)
      >>> found
      [0.02]
    """
    found: list[float] = []
    token = _told.set(found)
    try:
        yield found
    finally:
        _told.reset(token)


def tell(*drifts: float) -> None:
    """Tells the innermost `listening` by how much of themselves medians moved."""
    found = _told.get()
    if found is not None:
        found.extend(drifts)
