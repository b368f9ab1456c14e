"""Time of a batch when the order follows the messages, over that of 1F1B."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from hpcjax import runs
from hpcjax.core import config
from hpcjax.sharding.message_driven import Ties


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A pipeline whose ops take times that are drawn.

    Attributes:
      stages: a device each.
      micro_batches: of a batch.
      in_flight: micro-batches in the pipeline; none for as many as stages.
      jitter: σ of the times' logarithms; forward passes take 1 in the mean, backward
        passes 2.
      latency: of a message.
      ties: which of several waiting messages comes first.
      draws: of times, each for both orders.
      seed: of the first draw.
    """

    smoke: ClassVar[Mapping[str, str]] = {"draws": "2", "micro_batches": "4"}
    figures: ClassVar[Mapping[str, str]] = {
        "ratio": "draw: time by messages over that of 1F1B",
        "fixed": "draw: time of 1F1B with as many in flight over its usual one",
        "held": "draw: inputs that a stage keeps at most, by messages",
        "still": ": time by messages without jitter over (m + G - 1)(t_f + t_b)",
    }

    stages: config.Size = 4
    micro_batches: config.Size = 16
    in_flight: config.Size | None = None
    jitter: config.NotNegative = 0.3
    latency: config.NotNegative = 0.0
    ties: Ties = "arrival"
    draws: config.Size = 100
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"draw": range(self.draws)}


@runs.simulated
def run(cfg: Config) -> dict:
    """Simulates the same draws by messages and by 1F1B."""
    from hpcjax import cost

    size = cfg.stages, cfg.micro_batches
    ratio, fixed, held = np.zeros((3, cfg.draws))
    most = max(cfg.in_flight or 0, cfg.stages)
    for draw in range(cfg.draws):
        times = cost.draw_durations(*size, cfg.jitter, cfg.seed + draw)
        static = cost.simulate_one_f_one_b(times, cfg.latency)
        deep = cost.simulate_one_f_one_b(times, cfg.latency, most)
        own = cost.simulate_messages(times, cfg.latency, cfg.in_flight, cfg.ties)
        ratio[draw] = own.makespan / static.makespan
        fixed[draw] = deep.makespan / static.makespan
        held[draw] = max(map(own.held, range(cfg.stages)))
    still = cost.simulate_messages(cost.draw_durations(*size, 0.0), 0.0, cfg.in_flight)
    ideal = 3 * (cfg.stages + cfg.micro_batches - 1)
    return {
        "ratio": ratio,
        "fixed": fixed,
        "held": held,
        "still": still.makespan / ideal,
    }
