"""Ending a run before its last step: for non-finite numbers, or on request."""

import logging
import signal
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from hpcjax.core.errors import Diverged, Preempted, stopped_by
from hpcjax.sharding.mesh import place_batch
from hpcjax.train.step import STOP, UNSCORED
from hpcjax.train.task import Task

log = logging.getLogger(__name__)


class SkipGuard:
    """Ends the run after too many consecutive steps with non-finite numbers.

    Args:
      names: names of the arrays that the entries of the step's `NONFINITE` count.
      limit: number of consecutive steps.
      in_a_row: how many of them there have been already.

    Attributes:
      in_a_row: how many there have been.
    """

    def __init__(self, names: list[str], limit: int, in_a_row: int = 0) -> None:
        self.names, self.limit, self.in_a_row = names, limit, in_a_row
        self._said = ""

    def check(
        self, step: int, nonfinite: np.ndarray, unscored: np.ndarray
    ) -> dict[str, int]:
        """Takes the counts of a step; logs why it was skipped, if it was.

        Where numbers were not finite is said once for steps in a row, then how many
        steps they are. A batch that scores nothing neither ends a run nor shows that it
        goes on.

        Returns:
          What the record of the step tells besides: `UNSCORED`, if it is so.

        Raises:
          Diverged: this was the last of `limit` such steps in a row.
        """
        if unscored:
            log.warning("step %d: batch %d scores nothing", step, step - 1)
            return {UNSCORED: 1}
        if not nonfinite.any():
            self.in_a_row, self._said = 0, ""
            return {}
        self.in_a_row += 1
        first, *others = np.flatnonzero(nonfinite)
        where = self.names[first] + (f" and {len(others)} more" if others else "")
        if where != self._said:
            log.warning("step %d skipped: not finite: %s", step, where)
            self._said = where
        else:
            log.warning("step %d skipped: %d in a row", step, self.in_a_row)
        if self.in_a_row >= self.limit:
            raise Diverged(
                f"{self.limit} consecutive steps gave non-finite numbers, the last "
                f"step {step} in {where}; what the checkpoints hold is finite"
            )
        return {}


class StopRequest:
    """A request to stop, on which all processes agree.

    A single process asks its `stop`. Several processes send the answers of theirs with
    the batch and reduce them within the step, so that all stop after the same step: a
    process that stopped alone would leave the others waiting in the next collective.
    """

    def __init__(self, stop: Callable[[], int], mesh: Mesh, task: Task) -> None:
        self._stop, self.signal, self._cut = stop, 0, task.method.batch
        self._mesh, self._alone = mesh, jax.process_count() == 1

    def place(self, batch: Mapping[str, Any]) -> Any:
        """Returns a batch on the devices; it carries this process's request."""
        if self._alone:
            return place_batch(batch, self._mesh, self._cut)
        flags = np.full(len(self._mesh.local_devices), self._stop(), np.int32)
        return place_batch({**batch, STOP: flags}, self._mesh, self._cut)

    def take(self, exchanged: np.ndarray | None) -> None:
        """Takes the signal on which a step agreed; None if there is one process."""
        self.signal = self._stop() if exchanged is None else int(exchanged)

    def error(self, step: int) -> Preempted:
        """Returns the error that ends a run which was stopped after `step`."""
        name = signal.Signals(self.signal).name
        return stopped_by(self.signal)(f"{name}: stopped after step {step}")
