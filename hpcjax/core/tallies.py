"""Numbers that layers count, on their way out of the scans that trace these."""

import contextlib
import contextvars
from collections.abc import Iterator, Mapping
from typing import Any

_found: contextvars.ContextVar[dict[str, Any] | None] = contextvars.ContextVar(
    "tallies", default=None
)


@contextlib.contextmanager
def tallying() -> Iterator[dict[str, Any]]:
    """Collects what is tallied inside, `{name: sum}`.

    The body of a scan, or of a `jax.checkpoint`, must return what it has collected; who
    applies it tallies that again.
    """
    collected: dict[str, Any] = {}
    token = _found.set(collected)
    try:
        yield collected
    finally:
        _found.reset(token)


def tally(counts: Mapping[str, Any]) -> None:
    """Adds numbers to what the innermost `tallying` collects; drops them without one.

    Examples:
      >>> with tallying() as found:
      ...     tally({"clamped": 1})
      ...     tally({"clamped": 2})
      >>> found
      {'clamped': 3}
    """
    collected = _found.get()
    if collected is not None:
        collected |= {name: collected.get(name, 0) + n for name, n in counts.items()}
