"""Measuring where the time of a run goes."""

import collections
import contextlib
import time
from collections.abc import Iterable, Iterator
from typing import Any, Literal

from hpcjax.train.watchdog import Watchdog


class Stopwatch:
    """Measures training time, and the time spent on other things.

    Args:
      seconds: training time of earlier sessions of the run.
      began: when this session began, by `time.perf_counter`.
      watchdog: is told of every step and validation batch, and when to expect none.
    """

    def __init__(
        self, seconds: float, began: float, watchdog: Watchdog | None = None
    ) -> None:
        self._seconds, self._began, self._watchdog = seconds, began, watchdog
        self._started: float | None = None
        self._others: dict[str, float] = collections.defaultdict(float)

    def start(self, compiling: float) -> dict[str, float]:
        """Starts to measure training; returns the time before that, as `init`.

        Args:
          compiling: the part of it that went into compiling, which is returned too.
        """
        self._started = time.perf_counter()
        self._others.clear()
        self._others["init"] = self._started - self._began
        return {"compile_seconds": compiling, **self.take_spent()}

    def read(self) -> float:
        """Returns the seconds of training so far."""
        if self._started is None:
            return self._seconds
        return self._seconds + time.perf_counter() - self._started

    @contextlib.contextmanager
    def pause(
        self, what: Literal["validation", "checkpoint", "compile"]
    ) -> Iterator[None]:
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

    @contextlib.contextmanager
    def waiting(self) -> Iterator[None]:
        """Returns a context of training whose duration counts as `data`."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._others["data"] += time.perf_counter() - began

    def time_waiting(
        self, batches: Iterator[Any], numbers: Iterable[int]
    ) -> Iterator[tuple[int, Any]]:
        """Yields numbers of steps with their batches; waiting counts as `data`."""
        if self._watchdog:
            self._watchdog.expect("step")
        for number in numbers:
            with self.waiting():
                batch = next(batches, None)
            if batch is None:
                return
            if self._watchdog:
                self._watchdog.beat(number)
            yield number, batch

    def watch_validation(self, batches: Iterable[Any], step: int) -> Iterator[Any]:
        """Yields the batches of the validation after `step`."""
        for number, batch in enumerate(batches, 1):
            if self._watchdog:
                self._watchdog.beat(step, number)
            yield batch

    def take_spent(self) -> dict[str, float]:
        """Returns the seconds since the last call that were not spent on computing.

        Names are `spent_init_seconds`, `spent_data_seconds`, the same for `validation`
        and `checkpoint`, and `compile_seconds`, as far as there was any. Training time
        less that of waiting for data is the time of computing.
        """
        others, self._others = self._others, collections.defaultdict(float)
        names = {name: f"spent_{name}_seconds" for name in others}
        names |= {"compile": "compile_seconds"}
        return {names[what]: seconds for what, seconds in others.items()}
