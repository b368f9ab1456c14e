"""Joules from the counters of processors and GPUs; nothing here sets a clock."""

import pathlib
import time
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

import numpy as np

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError, DataFormatError

SYS = pathlib.Path("/sys")


class EnergyCounter(Protocol):
    """Counts joules."""

    def read_joules(self) -> float:
        """Returns the joules since this counter was made; never less than before."""
        ...


class _Sum:
    """Sums the increments of a counter of integers.

    Args:
      name: for errors.
      read: returns the counter.
      wrap: the reading after which it begins at 0; None if it does not.
    """

    def __init__(self, name: str, read: Callable[[], int], wrap: int | None) -> None:
        self._name, self._read, self._wrap = name, read, wrap
        self._last, self.total = self._checked(), 0

    def advance(self) -> int:
        """Returns the sum up to now.

        Raises:
          DataFormatError: the counter ran backwards, or beyond its range.
        """
        now = self._checked()
        step = now - self._last
        if step < 0:
            if self._wrap is None:
                raise DataFormatError(
                    f"{self._name} ran backwards: {now} after {self._last}"
                )
            step += self._wrap
        self._last = now
        self.total += step
        return self.total

    def _checked(self) -> int:
        now = self._read()
        if self._wrap is not None and not 0 <= now <= self._wrap:
            raise DataFormatError(f"{self._name} is {now}, beyond its {self._wrap}")
        return now


class Rapl:
    """The packages of processors, by Linux's powercap: `intel-rapl:N/energy_uj`.

    Reading it needs root on most systems. The counter begins anew after
    `max_energy_range_uj`, in minutes to hours: it must be read more often.
    """

    def __init__(self, root: pathlib.Path = SYS) -> None:
        """Finds the packages.

        Args:
          root: what the kernel mounts as /sys.

        Raises:
          ConfigError: there is none, or it cannot be read.
        """
        zones = sorted(root.glob("class/powercap/intel-rapl:[0-9]*"))
        zones = [zone for zone in zones if _is_package(zone)]
        checks.require(bool(zones), "no package counts energy", root=str(root))
        self._sums = [
            _Sum(
                str(zone / "energy_uj"),
                lambda zone=zone: read_number(zone / "energy_uj"),
                read_number(zone / "max_energy_range_uj"),
            )
            for zone in zones
        ]

    def read_joules(self) -> float:
        """Returns the joules of all packages since this counter was made."""
        return 1e-6 * sum(each.advance() for each in self._sums)


def _is_package(zone: pathlib.Path) -> bool:
    """Tells packages from their parts, and from `psys`, the platform around them."""
    name = zone / "name"
    platform = name.exists() and name.read_text().strip() == "psys"
    return zone.name.count(":") == 1 and not platform


class Nvml:
    """The total energy of one NVIDIA GPU, of Volta or later; sets nothing."""

    def __init__(self, index: int = 0) -> None:
        """Opens a GPU's counter.

        Raises:
          ConfigError: the extra `power` is not installed, or the driver has no such
            counter.
        """
        try:
            import pynvml
        except ImportError as error:
            raise ConfigError(
                "a GPU's energy needs nvidia-ml-py: pip install 'hpcjax[power]'"
            ) from error
        try:
            pynvml.nvmlInit()
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            read = pynvml.nvmlDeviceGetTotalEnergyConsumption
            self._sum = _Sum(f"the energy of GPU {index}", lambda: read(handle), None)
        except pynvml.NVMLError as error:
            raise ConfigError(f"GPU {index} counts no energy: {error}") from error

    def read_joules(self) -> float:
        """Returns the joules of the GPU since this counter was made."""
        return 1e-3 * self._sum.advance()


def open_counter(name: str, root: pathlib.Path = SYS) -> EnergyCounter:
    """Returns the counter `rapl` or `nvml`; ConfigError if it is not here."""
    checks.require_choice("counter", name, ("rapl", "nvml"))
    return Rapl(root) if name == "rapl" else Nvml()


def read_number(path: pathlib.Path) -> int:
    """Returns the integer that a file of the kernel holds; ConfigError otherwise."""
    try:
        return int(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} cannot be read: {error}") from error


class Window(NamedTuple):
    """A measured stretch of batches.

    Attributes:
      joules: a query, all that flows included.
      idle_watts: while nothing was computed, just before.
      dynamic: joules a query above these watts.
      latencies: seconds of each batch.
    """

    joules: float
    idle_watts: float
    dynamic: float
    latencies: np.ndarray

    @property
    def p95(self) -> float:
        """95th percentile of a batch's seconds."""
        return float(np.quantile(self.latencies, 0.95))


def measure_energy(
    call: Callable[[], Any],
    counter: EnergyCounter,
    batch: int,
    *,
    seconds: float = 2.0,
    batches: int = 30,
    warmup: int = 3,
    clock: Callable[[], float] = time.perf_counter,
    wait: Callable[[float], None] = time.sleep,
) -> Window:
    """Measures energy and latency of batches, one after the other.

    Args:
      call: computes a batch, and returns once it has.
      counter: of what computes it.
      batch: queries in it.
      seconds: least length of the stretch; idle power is measured for half of it.
      batches: least number in the stretch.
      warmup: batches before it.
      clock: returns seconds.
      wait: sleeps so many seconds.

    Raises:
      ConfigError: no batch, or a stretch of no length.
    """
    checks.require_count(1, batch=batch, batches=batches)
    checks.require_positive(seconds=seconds)
    for _ in range(warmup):
        call()
    before, start = counter.read_joules(), clock()
    wait(seconds / 2)
    idle = (counter.read_joules() - before) / (clock() - start)
    before, start, latencies = counter.read_joules(), clock(), []
    while len(latencies) < batches or clock() - start < seconds:
        began = clock()
        call()
        latencies.append(clock() - began)
    length, joules = clock() - start, counter.read_joules() - before
    queries = batch * len(latencies)
    return Window(
        joules=joules / queries,
        idle_watts=idle,
        dynamic=(joules - idle * length) / queries,
        latencies=np.array(latencies),
    )
