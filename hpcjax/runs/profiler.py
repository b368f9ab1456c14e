"""A trace of a few training steps by JAX's profiler."""

import contextlib
import logging
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any

log = logging.getLogger(__name__)

# Steps that pass before the trace, so that nothing is compiled in it, and those in it.
_WARM, _TRACED = 3, 5


class Profiler:
    """A copy of a run's records that traces the steps after the first few.

    Args:
      folder: where the trace goes.
    """

    def __init__(self, folder: pathlib.Path) -> None:
        self.folder = folder
        self._taken, self._first, self._last = 0, 0, 0
        self._running = False

    def write(self, record: Mapping[str, Any]) -> None:
        """Begins or ends the trace, where the record is of the step before it."""
        import jax

        step = int(record["step"])
        # A step's record has its loss; validations and times are records of their own.
        if "loss" not in record or self._last:
            return
        self._taken += 1
        if self._taken == _WARM:
            # A trace that Perfetto's page reads as it is, beside TensorBoard's.
            jax.profiler.start_trace(self.folder, create_perfetto_trace=True)
            self._running, self._first = True, step + 1
        elif self._taken == _WARM + _TRACED:
            self.close(step)

    def rewind(self, step: int) -> float:
        """Returns 0: it keeps no training seconds."""
        del step
        return 0.0

    def close(self, step: int | None = None) -> None:
        """Ends the trace, if it runs, and says where it is."""
        import jax

        if not self._running:
            return
        self._running, self._last = False, step or self._first
        jax.profiler.stop_trace()
        log.warning(
            "trace of the steps from %d on: tensorboard --logdir %s, or open its "
            "perfetto_trace.json.gz at https://ui.perfetto.dev",
            self._first,
            self.folder,
        )


@contextlib.contextmanager
def profiling(folder: pathlib.Path | None) -> Iterator[tuple[Profiler, ...]]:
    """Yields a profiler that writes below `folder`; none without one."""
    if folder is None:
        yield ()
        return
    profiler = Profiler(folder)
    try:
        yield (profiler,)
    finally:
        profiler.close()
        if not profiler._last:
            log.warning("no trace: the run has not taken %d steps", _WARM)
