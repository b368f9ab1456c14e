"""Throughput of many processes, by the event model alone: nothing is measured."""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from hpcjax.core import checks
from hpcjax.hostcomm.imbalance import Pattern
from hpcjax.runs.config import check_seed

if TYPE_CHECKING:
    import xarray as xr

    from hpcjax.runs.context import Context

MODES = ("sync", "majority", "solo")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """What the event model is given.

    Attributes:
      processes: P.
      steps: of a run.
      base: seconds of everybody's step.
      jitter: standard deviation of the logarithm of these.
      pattern: who is delayed; see `hostcomm.inject_delays`.
      delay: by how many seconds.
      numbers: float32 in a gradient, or a model.
      alpha: seconds of a message.
      beta: seconds of a byte.
      runs: with other delays.
      seed: of the first one's draws.
    """

    processes: int = 64
    steps: int = 200
    base: float = 0.02
    jitter: float = 0.1
    pattern: Pattern = "random_one"
    delay: float = 0.2
    numbers: int = 250_000
    alpha: float = 8e-5
    beta: float = 3e-10
    runs: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        checks.require_count(2, processes=self.processes)
        checks.require_count(1, steps=self.steps, numbers=self.numbers, runs=self.runs)
        checks.require_finite(0.0, base=self.base, jitter=self.jitter, delay=self.delay)
        checks.require_finite(0.0, alpha=self.alpha, beta=self.beta)


def run(cfg: Config, ctx: "Context") -> "xr.Dataset":
    """Follows the clocks of all workers.

    Returns:
      `total` seconds and `fresh` contributions of a round, [mode, repetition].
    """
    import xarray as xr

    from hpcjax import hostcomm, perf

    del ctx
    compute = draw(cfg)
    cost = hostcomm.MessageCost(cfg.alpha, cfg.beta)
    seconds = perf.round_seconds(cost, cfg.numbers, cfg.processes)
    times = [
        perf.simulate_rounds(compute, mode=mode, seconds=seconds, seed=cfg.seed)
        for mode in MODES
    ]
    return xr.Dataset(
        {
            "total": (("mode", "repetition"), [each.total() for each in times]),
            "fresh": (
                ("mode", "repetition"),
                [each.fresh().mean(-1) for each in times],
            ),
        },
        coords={"mode": list(MODES)},
        attrs={"source": "simulated"},
    )


def draw(cfg: Config) -> np.ndarray:
    """Returns seconds of all steps, delays included, `[runs, steps, processes]`."""
    from hpcjax import hostcomm

    rng = np.random.Generator(np.random.Philox(key=[cfg.seed, 2]))
    delays = [
        hostcomm.inject_delays(
            cfg.pattern, cfg.steps, cfg.processes, delay=cfg.delay, seed=cfg.seed + each
        )
        for each in range(cfg.runs)
    ]
    shape = cfg.runs, cfg.steps, cfg.processes
    return cfg.base * rng.lognormal(0.0, cfg.jitter, shape) + np.array(delays)
