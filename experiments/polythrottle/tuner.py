"""The least energy a query within a latency objective, in two phases and guarded."""

import math
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import numpy as np

from experiments.polythrottle.simulator import NOISE, Measured
from hpcjax import bo
from hpcjax.core.errors import ConfigError

CHECKED, PARTS, LEAST_GUARD = 200, 4, 0.01


class Device(Protocol):
    """What is tuned; see `simulator.Simulated`."""

    grid: "bo.Grid"
    cpu_mhz: tuple[float, ...]
    start: dict[str, float]

    def measure(self, point: "bo.Point", batches: int) -> Measured:
        """Returns what so many batches took."""
        ...


class Tuned(NamedTuple):
    """What was found.

    Attributes:
      point: the chosen clocks and batch; the least infeasible one if none is feasible.
      feasible: whether it kept the objective, with the guard, when measured again.
      checked: that measurement.
      trials: points that phase 1 measured, in order, and
      measured: what they took.
    """

    point: dict[str, float]
    feasible: bool
    checked: Measured
    trials: list[dict[str, float]]
    measured: list[Measured]


def tune(
    device: Device, objective: float, *, budget: int, batches: int, seed: int
) -> Tuned:
    """Finds clocks and batch of the least energy whose p95 keeps the objective.

    Args:
      device: what is measured.
      objective: seconds, of the 95th percentile of a batch.
      budget: trials of phase 1, which may stop earlier.
      batches: of a trial.
      seed: of the search.

    Raises:
      ConfigError: the objective is below the latency at the greatest clocks.
    """
    search, measured = search_clocks(
        device, objective, budget=budget, batches=batches, seed=seed
    )
    ranked = search.rank_feasible()
    first = search_cpu(device, ranked[0], objective, batches) if ranked else None
    candidates = ([] if first is None else [first]) + ranked
    chosen = choose(device, candidates, objective)
    if chosen is not None:
        return Tuned(*chosen, search.points, measured)
    least = min(zip(measured, search.points, strict=True), key=lambda each: each[0].p95)
    checked = device.measure(least[1], CHECKED)
    return Tuned(least[1], False, checked, search.points, measured)


def search_clocks(
    device: Device,
    objective: float,
    *,
    budget: int,
    batches: int,
    seed: int,
    stops: bool = True,
) -> "tuple[bo.ConstrainedSearch, list[Measured]]":
    """Phase 1: searches the grid at the CPU's greatest clock; see `tune`."""
    search = bo.ConstrainedSearch(
        device.grid, {"p95": objective}, seed, start=device.start
    )
    measured: list[Measured] = []
    while len(measured) < min(budget, len(device.grid)):
        if stops and search.stopped:
            break
        point = search.ask()
        measured.append(device.measure(point, batches))
        if len(measured) == 1 and measured[0].p95 > objective:
            raise ConfigError(
                f"the objective of {1e3 * objective:.4g} ms is below the latency at "
                f"the greatest clocks, {1e3 * measured[0].p95:.4g} ms"
            )
        search.tell(point, measured[-1].joules, p95=measured[-1].p95)
    return search, measured


def search_cpu(
    device: Device, point: dict[str, float], objective: float, batches: int
) -> dict[str, float] | None:
    """Phase 2: the CPU clock by a golden section; None if the gain is in the noise."""
    clocks = device.cpu_mhz
    if not clocks:
        return None

    def measure(place: int) -> "bo.Measurement":
        found = device.measure({**point, "cpu_mhz": clocks[place]}, batches)
        allowed = found.p95 <= objective
        return bo.Measurement(
            found.joules if allowed else math.inf, NOISE * found.joules
        )

    seen = bo.golden_section(len(clocks), measure)
    last = seen.get(len(clocks) - 1) or measure(len(clocks) - 1)
    best = min(seen, key=lambda place: seen[place].value)
    gain = last.value - seen[best].value
    if not gain > 2 * math.hypot(last.error, seen[best].error):
        return None
    return {**point, "cpu_mhz": clocks[best]}


def choose(
    device: Device,
    ranked: Sequence[dict[str, float]],
    objective: float,
    *,
    guard: bool = True,
) -> tuple[dict[str, float], bool, Measured] | None:
    """Returns the first point that keeps the objective when measured again.

    With a margin g: 1 %, or twice the relative deviation of p95 over four parts of the
    queries. The least of noisy values is one of luck, so that without the margin the
    chosen point too often breaks an objective that the optimum just keeps. None if no
    point does.

    Args:
      device: what is measured.
      ranked: points, best first.
      objective: seconds.
      guard: False takes the first one as it is.
    """
    for point in ranked:
        found = device.measure(point, CHECKED)
        whole = np.array_split(found.latencies, PARTS)  # a machine may have done more
        parts = [np.quantile(each, 0.95) for each in whole]
        margin = max(LEAST_GUARD, 2 * float(np.std(parts) / np.mean(parts)))
        if not guard or found.p95 <= objective / (1 + margin):
            return point, True, found
    return None
