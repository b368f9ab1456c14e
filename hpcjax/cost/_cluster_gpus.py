"""What the GPUs of a simulated cluster do and hold."""

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np
from jaxtyping import Float

if TYPE_CHECKING:
    from hpcjax.cost.cluster import Cluster, Job


class Gpus:
    """What each GPU does and holds; jobs by number.

    A GPU does what is placed on it in this order, so that what it holds after the last
    of these is known when that is placed.
    """

    def __init__(self, jobs: Sequence["Job"], cluster: "Cluster") -> None:
        self.jobs, self.cluster = jobs, cluster
        self.free = np.zeros(cluster.gpus)  # when all that was placed is done
        self._work = np.zeros(cluster.gpus)  # seconds of tasks so far
        self._last = np.full(cluster.gpus, -1)
        self.peak = np.zeros(cluster.gpus)
        # The jobs whose state a GPU holds, those used last at the end; and the reverse.
        self._held: list[list[int]] = [[] for _ in range(cluster.gpus)]
        self._holders: list[list[int]] = [[] for _ in jobs]

    def choose(self, number: int, now: float, *, idle: bool) -> list[int] | None:
        """Returns the GPUs that can begin a job's tasks the earliest, in this order.

        Those that have worked least come first among equals. Returns None if too few of
        them are `idle`.
        """
        wait = np.maximum(self.free - now, 0.0)
        order = np.lexsort((self._work, wait + self._switching(number)))
        order = order[wait[order] == 0] if idle else order
        count = self.jobs[number].workers
        return order[:count].tolist() if len(order) >= count else None

    def _switching(self, number: int) -> Float[np.ndarray, " gpus"]:
        """Returns the seconds in which each GPU would turn to a job."""
        load = self.cluster.link.seconds(self.jobs[number].bytes)
        seconds = np.full(self.cluster.gpus, self.cluster.switch + load)
        seconds[self._holders[number]] = self.cluster.switch
        seconds[self._last == number] = 0.0
        return seconds

    def turn(self, number: int, chosen: Sequence[int], now: float) -> list[float]:
        """Makes GPUs hold a job's state and returns the seconds of their switches.

        The job's other copies of it are then out of date, and dropped.
        """
        seconds = self._switching(number)[chosen].tolist()
        for gpu in set(self._holders[number]) - set(chosen):
            self._drop(number, gpu)
        for gpu in chosen:
            self._hold(number, gpu)
        self._last[chosen] = number
        self.free[chosen] = np.maximum(self.free[chosen], now) + seconds
        return seconds

    def _hold(self, number: int, gpu: int) -> None:
        if number in self._held[gpu]:
            self._drop(number, gpu)
        room = self.cluster.memory - self.jobs[number].bytes
        while self._bytes(gpu) > room:
            self._drop(self._held[gpu][0], gpu)
        self._held[gpu].append(number)
        self._holders[number].append(gpu)
        self.peak[gpu] = max(self.peak[gpu], self._bytes(gpu))

    def _drop(self, number: int, gpu: int) -> None:
        self._held[gpu].remove(number)
        self._holders[number].remove(gpu)
        if self._last[gpu] == number:
            self._last[gpu] = -1

    def _bytes(self, gpu: int) -> float:
        return math.fsum(self.jobs[number].bytes for number in self._held[gpu])

    def compute(self, gpu: int, start: float, end: float) -> None:
        """Notes a task."""
        self.free[gpu] = end
        self._work[gpu] += end - start
