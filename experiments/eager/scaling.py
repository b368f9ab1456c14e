"""Throughput of many processes, by the event model alone: nothing is measured."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

import numpy as np

from hpcjax import cost, hostcomm, runs
from hpcjax.core import config
from hpcjax.hostcomm.imbalance import Pattern

if TYPE_CHECKING:
    from hpcjax.runs.outlines import Labels

MODES = ("sync", "majority", "solo")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
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

    smoke: ClassVar[Mapping[str, str]] = {"processes": "4", "steps": "5", "runs": "2"}
    figures: ClassVar[Mapping[str, str]] = {
        "total": "mode repetition: seconds",
        "fresh": "mode repetition: contributions of a round",
    }

    processes: config.Several = 64
    steps: config.Size = 200
    base: config.NotNegative = 0.02
    jitter: config.NotNegative = 0.1
    pattern: Pattern = "random_one"
    delay: config.NotNegative = 0.2
    numbers: config.Size = 250_000
    alpha: config.NotNegative = 8e-5
    beta: config.NotNegative = 3e-10
    runs: config.Size = 20
    seed: config.Seed = 0

    def labels(self) -> "Labels":
        """Returns those of the figures' dimensions."""
        return {"mode": MODES, "repetition": range(self.runs)}


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Follows the clocks of all workers."""
    compute = draw(cfg)
    message = hostcomm.MessageCost(cfg.alpha, cfg.beta)
    seconds = cost.round_seconds(message, cfg.numbers, cfg.processes)
    times = [
        cost.simulate_rounds(compute, mode=mode, seconds=seconds, seed=cfg.seed)
        for mode in MODES
    ]
    return runs.simulated(
        {
            "total": (("mode", "repetition"), [each.total() for each in times]),
            "fresh": (
                ("mode", "repetition"),
                [each.fresh().mean(-1) for each in times],
            ),
        },
        coords={"mode": list(MODES)},
    )


def draw(cfg: Config) -> np.ndarray:
    """Returns seconds of all steps, delays included, `[runs, steps, processes]`."""
    rng = np.random.Generator(np.random.Philox(key=[cfg.seed, 2]))
    delays = [
        hostcomm.inject_delays(
            cfg.pattern, cfg.steps, cfg.processes, delay=cfg.delay, seed=cfg.seed + each
        )
        for each in range(cfg.runs)
    ]
    shape = cfg.runs, cfg.steps, cfg.processes
    return cfg.base * rng.lognormal(0.0, cfg.jitter, shape) + np.array(delays)
