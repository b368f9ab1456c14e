"""How long a round takes whose workers arrive one after the other, by its size."""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from experiments.eager.scaling import MODES
from hpcjax import hostcomm, runs
from hpcjax.core import checks, config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """Processes and their messages.

    Attributes:
      processes: P.
      bytes: of the messages.
      skew: seconds between one arrival and the next.
      rounds: of each mode and size.
      patience: seconds that a process waits for another one.
      seed: of the initiators.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "processes": "2",
        "bytes": "[64,4096]",
        "rounds": "3",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "latency": "mode bytes: seconds from arrival to result",
        "fresh": "mode bytes: contributions of the round's own step",
        "ping": "bytes: seconds of one message",
    }

    processes: config.Several = 8
    bytes: tuple[int, ...] = (64, 1024, 16_384, 262_144, 4_194_304)
    skew: config.NotNegative = 0.001
    rounds: config.Size = 64
    patience: config.Positive = 60.0
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.require_count(4, bytes=min(self.bytes, default=0))

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"mode": MODES, "bytes": self.bytes}


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Measures from each worker's arrival to its result, the mean over all."""
    told = runs.in_processes(work, cfg, cfg.processes, patience=cfg.patience)
    return runs.measured(
        {
            "latency": (
                ("mode", "bytes"),
                np.mean([each["latency"] for each in told], axis=0),
            ),
            "fresh": (("mode", "bytes"), told[0]["fresh"]),
            "ping": ("bytes", told[0]["ping"]),
        },
        coords={"mode": list(MODES), "bytes": list(cfg.bytes)},
    )


def work(transport: "hostcomm.Transport", cfg: Config) -> dict[str, Any]:
    """Measures from arrival to result, all arriving one after the other.

    Returns:
      `ping`, seconds of a message of each size; `latency` and `fresh`, means over
      rounds, [mode, size].
    """
    skewed = hostcomm.inject_delays(
        "linear_skew", cfg.rounds, transport.size, delay=cfg.skew
    )
    shape = len(MODES), len(cfg.bytes)
    latency, fresh = np.zeros(shape), np.zeros(shape)
    for row, mode in enumerate(MODES):
        for column, count in enumerate(cfg.bytes):
            size = count // 4
            partial = hostcomm.PartialAllreduce(
                transport, size, mode=mode, limiter=0, seed=cfg.seed
            )
            gradient, spent = np.ones(size, np.float32), []
            for step, seconds in enumerate(skewed[:, transport.rank]):
                hostcomm.barrier(transport, tag=hostcomm.Tag("together", step))
                time.sleep(seconds)
                begin = time.monotonic()
                partial.post(step, gradient)
                partial.result(step)
                spent.append(time.monotonic() - begin)
            partial.finish()
            latency[row, column] = np.mean(spent)
            fresh[row, column] = np.mean(partial.stats().fresh)
    ping = hostcomm.ping_pong(transport, list(cfg.bytes))
    return {"ping": ping, "latency": latency, "fresh": fresh}
