"""What ends a run before its last step: non-finite numbers, or a request to stop."""

import logging
import signal
from collections.abc import Callable

import jax
import numpy as np
from jax.sharding import Mesh

from hpcjax.core.errors import Diverged, Preempted, stopped_by
from hpcjax.train.step import STOP

log = logging.getLogger(__name__)


class SkipGuard:
    """Counts consecutive steps with non-finite numbers, and stops the run.

    Args:
      names: what the entries of the step's `NONFINITE` stand for.
      limit: how many such steps in a row stop it.
    """

    def __init__(self, names: list[str], limit: int) -> None:
        self.names, self.limit, self.in_a_row = names, limit, 0

    def check(self, step: int, nonfinite: np.ndarray) -> None:
        """Takes the counts of one step; logs the arrays that were hit."""
        if not nonfinite.any():
            self.in_a_row = 0
            return
        self.in_a_row += 1
        hit = [name for name, count in zip(self.names, nonfinite, strict=True) if count]
        log.warning("step %d skipped: not finite: %s", step, hit)
        if self.in_a_row >= self.limit:
            raise Diverged(
                f"{self.limit} consecutive steps gave non-finite numbers, the last "
                f"step {step} in {hit[:5]}; what the checkpoints hold is finite"
            )


class StopRequest:
    """Whether to stop, agreed between processes.

    One process asks its `stop`. Several ask theirs and exchange the answers within the
    step, so that all read the same of the same step; a process that stopped alone would
    leave the others waiting in the next exchange.
    """

    def __init__(self, stop: Callable[[], int], mesh: Mesh) -> None:
        self._stop, self.signal = stop, 0
        self._alone, self._rows = jax.process_count() == 1, len(mesh.local_devices)

    def flags(self) -> dict[str, np.ndarray]:
        """Returns what the batch carries to the other processes."""
        if self._alone:
            return {}
        return {STOP: np.full(self._rows, self._stop(), np.int32)}

    def agree(self, exchanged: np.ndarray | None) -> None:
        """Takes what a step exchanged, if it did."""
        self.signal = self._stop() if exchanged is None else int(exchanged)

    def error(self, step: int) -> Preempted:
        """Returns the error with which a run ends that was stopped after `step`."""
        name = signal.Signals(self.signal).name
        return stopped_by(self.signal)(f"{name}: stopped after step {step}")
