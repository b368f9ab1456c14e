"""Where the time of a run goes."""

import collections
import contextlib
import itertools
import time
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from hpcjax.train.watchdog import Watchdog


class Stopwatch:
    """Seconds of training, and what else the time went into.

    Args:
      seconds: of training in earlier sessions of the run.
      began: when this session began, by `time.perf_counter`.
      watchdog: told of every step and validation batch, and when to expect none.
    """

    def __init__(
        self, seconds: float, began: float, watchdog: Watchdog | None = None
    ) -> None:
        self._seconds, self._began, self._watchdog = seconds, began, watchdog
        self._started: float | None = None
        self._others: dict[str, float] = collections.defaultdict(float)

    def start(self) -> None:
        """Begins to count; what came before was initialisation."""
        self._started = time.perf_counter()
        self._others.clear()
        self._others["init"] = self._started - self._began

    def read(self) -> float:
        """Returns the seconds of training so far."""
        if self._started is None:
            return self._seconds
        return self._seconds + time.perf_counter() - self._started

    @contextlib.contextmanager
    def paused(self, what: Literal["validation", "checkpoint"]) -> Iterator[None]:
        """Returns a context whose duration counts as `what` and not as training."""
        self._seconds, self._started = self.read(), None
        began = time.perf_counter()
        if self._watchdog:
            self._watchdog.expect(what)
        try:
            yield
        finally:
            if self._watchdog:
                self._watchdog.expect("step")
            self._started = time.perf_counter()
            self._others[what] += self._started - began

    def waiting(self, batches: Iterator[Any], start: int) -> Iterator[Any]:
        """Yields the batches of steps `start + 1`, ...; waiting counts as `data`."""
        if self._watchdog:
            self._watchdog.expect("step")
        for number in itertools.count(start + 1):
            began = time.perf_counter()
            batch = next(batches, None)
            self._others["data"] += time.perf_counter() - began
            if batch is None:
                return
            if self._watchdog:
                self._watchdog.beat(number)
            yield batch

    def validating(self, batches: Iterable[Any], step: int) -> Iterator[Any]:
        """Yields the batches of the validation after `step`."""
        for number, batch in enumerate(batches, 1):
            if self._watchdog:
                self._watchdog.beat(step, number)
            yield batch

    def spent(self) -> dict[str, float]:
        """Returns what the time since the last call went into, but for computing.

        Names are `spent_init_seconds`, `_data_`, `_validation_` and `_checkpoint_`, as
        far as there was any. Training less waiting for data is what was computed.
        """
        others, self._others = self._others, collections.defaultdict(float)
        return {f"spent_{name}_seconds": seconds for name, seconds in others.items()}
