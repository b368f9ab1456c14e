"""Exchanges between processes over a slow link, in real time."""

import dataclasses
import time
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from hpcjax import collectives, hostcomm, runs
from hpcjax.collectives import (
    DenseConfig,
    ExchangeConfig,
    OkTopkConfig,
    TopKConfig,
)
from hpcjax.core import config

PHASES = ("total", "communicating")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """Processes of this machine, and the link that each of them has.

    Attributes:
      processes: P.
      numbers: n, in float32.
      density: of the sparse exchanges.
      bits_per_second: of what a process sends, to all others together; 0: no limit.
      latency: seconds until a message arrives.
      dense_steps: exchanges of the dense one; each takes long.
      warm_up: exchanges of the others before these, not timed: residuals first grow to
        the size that they have in a long run.
      steps: exchanges of the others; two periods of exact thresholds at least.
      tau: steps between regions of Ok-Topk.
      tau_prime: steps between exact thresholds.
      patience: seconds that a process waits for another one.
      seed: of the gradients.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "processes": "2",
        "numbers": "2000",
        "bits_per_second": "0",
        "dense_steps": "2",
        "warm_up": "1",
        "steps": "2",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "seconds": "exchange phase step: of the slowest process; NaN beyond its steps",
        "words": "exchange step: sent by the process that sends most; NaN likewise",
    }

    processes: config.Several = 4
    numbers: config.Several = 4_000_000
    density: float = 0.01
    bits_per_second: config.NotNegative = 100e6
    latency: config.NotNegative = 0.0
    dense_steps: config.Size = 5
    warm_up: config.Count = 64
    steps: config.Size = 64
    tau: int = 64
    tau_prime: int = 32
    patience: config.Positive = 60.0
    seed: config.Seed = 0

    def exchanges(self) -> dict[str, tuple[ExchangeConfig, int, int]]:
        """Returns the exchanges, how often they are made before, and timed."""
        ok_topk = OkTopkConfig(
            density=self.density,
            tau=self.tau,
            tau_prime=self.tau_prime,
            global_threshold="histogram",  # 4 turns where counts would need 31
        )
        return {
            "dense": (DenseConfig(), 0, self.dense_steps),
            "top_k": (TopKConfig(density=self.density), self.warm_up, self.steps),
            "ok_topk": (ok_topk, self.warm_up, self.steps),
        }

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {
            "exchange": list(self.exchanges()),
            "phase": PHASES,
            "step": range(max(self.steps, self.dense_steps)),
        }


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Times the exchanges, one after the other in the same processes."""
    rate = cfg.bits_per_second / 8
    link = hostcomm.Link(rate=rate, latency=cfg.latency) if rate else None
    told = runs.in_processes(work, cfg, cfg.processes, link=link, patience=cfg.patience)
    names, most = list(cfg.exchanges()), max(cfg.steps, cfg.dense_steps)
    seconds = np.full((len(names), len(PHASES), most), np.nan)
    words = np.full((len(names), most), np.nan)
    for place, name in enumerate(names):
        of_all = np.array([each[name] for each in told])  # [process, step, 3]
        slowest = of_all.max(axis=0)
        seconds[place, :, : len(slowest)] = slowest[:, :2].T
        words[place, : len(slowest)] = slowest[:, 2]
    return runs.measured(
        {
            "seconds": (("exchange", "phase", "step"), seconds),
            "words": (("exchange", "step"), words),
        },
        coords={"exchange": names, "phase": list(PHASES)},
    )


def work(transport: "hostcomm.Transport", cfg: Config) -> dict[str, Any]:
    """Returns (seconds, seconds of communication, words sent) of each step."""
    draws = np.random.default_rng([cfg.seed, transport.rank])
    like = np.zeros(cfg.numbers, np.float32)
    found = {}
    for name, (chosen, untimed, timed) in cfg.exchanges().items():
        exchange, group = chosen.make(), collectives.HostGroup(transport)
        state = exchange.init(like)
        rows = []
        for _ in range(untimed + timed):
            gradient = draws.standard_normal(cfg.numbers, np.float32)
            hostcomm.barrier(transport)
            before, talked = transport.counters(), group.seconds
            begin = time.perf_counter()
            _, state = exchange.average(group, gradient, state)
            taken = time.perf_counter() - begin
            sent = transport.counters().since(before).total_sent().payload
            rows.append([taken, group.seconds - talked, sent / 4])
        found[name] = rows[untimed:]
    return found
