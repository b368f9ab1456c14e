"""Devices on which queries can be measured: a stated model, or this machine."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from hpcjax import bo, cost, perf

NOISE, OUTLIERS, SLOWER = 0.02, 0.02, 1.1


class Measured(NamedTuple):
    """What a stretch of batches took.

    Attributes:
      joules: a query.
      latencies: seconds of each batch.
    """

    joules: float
    latencies: np.ndarray

    @property
    def p95(self) -> float:
        """95th percentile of the seconds."""
        return float(np.quantile(self.latencies, 0.95))


class Simulated:
    """A simulated device that serves one network, with seeded noise.

    Latencies have Gaussian noise of 2 %, and 2 % of them are 10 % longer; energy has
    noise of 2 % a measurement.

    Attributes:
      grid: GPU and memory clocks, and batches.
      cpu_mhz: clocks of the CPU.
      start: the greatest clocks, and the least batch.
    """

    source = "simulated"

    def __init__(
        self,
        device: "cost.DevicePower",
        work: "cost.Work",
        batches: Sequence[int],
        seed: Sequence[int],
    ) -> None:
        """Makes a device; the seed is of its noise."""
        self.device, self.work, self.cpu_mhz = device, work, device.cpu_mhz
        knobs = {"gpu_mhz": device.gpu_mhz, "mem_mhz": device.mem_mhz}
        self.grid = bo.Grid(**knobs, batch=batches, log=["batch"])
        self.start = {k: v[-1] for k, v in knobs.items()} | {"batch": min(batches)}
        self._rng = np.random.default_rng(seed)

    def spend(self, point: "bo.Point") -> "cost.Spent":
        """Returns the model's figures, without noise."""
        clocks = {name: value for name, value in point.items() if name != "batch"}
        return self.device.spend(self.work, clocks, int(point["batch"]))

    def spend_all(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns joules and seconds of all points of the grid."""
        points = map(self.grid.point, range(len(self.grid)))
        spent = [self.spend(point) for point in points]
        return np.array([s.joules for s in spent]), np.array([s.seconds for s in spent])

    def measure(self, point: "bo.Point", batches: int) -> Measured:
        """Returns what so many batches took."""
        spent, rng = self.spend(point), self._rng
        latencies = spent.seconds * (1 + NOISE * rng.standard_normal(batches))
        latencies[rng.random(batches) < OUTLIERS] *= SLOWER
        return Measured(spent.joules * (1 + NOISE * rng.standard_normal()), latencies)


class Here:
    """This machine: batches of a network, and clocks where they may be set.

    Attributes:
      grid: batches and knobs.
      cpu_mhz: empty, since all clocks are on the grid.
      start: the greatest clocks, and the least batch.
    """

    source = "measured"
    cpu_mhz: tuple[float, ...] = ()

    def __init__(
        self,
        calls: dict[int, Any],
        counter: "perf.EnergyCounter",
        clocks: "perf.Sysfs | None" = None,
        knobs: Sequence[str] = (),
        seconds: float = 2.0,
    ) -> None:
        """Makes a device of compiled programs, one for each batch."""
        self._calls, self._counter, self._clocks = calls, counter, clocks
        self._seconds = seconds
        own = clocks.grids() if clocks else {}
        values = {name: own[name] for name in knobs}
        self.grid = bo.Grid(**values, batch=list(calls), log=["batch"])
        self.start = {k: v[-1] for k, v in values.items()} | {"batch": min(calls)}

    def measure(self, point: "bo.Point", batches: int) -> Measured:
        """Sets the clocks, waits for them, and measures batches."""
        batch = int(point["batch"])
        if self._clocks is not None:
            self._clocks.set(**{k: int(v) for k, v in point.items() if k != "batch"})
            self._clocks.settle()
        window = perf.measure_energy(
            self._calls[batch],
            self._counter,
            batch,
            seconds=self._seconds,
            batches=batches,
        )
        return Measured(window.joules, window.latencies)
