"""Exchanges between processes over a slow link, in real time."""

import dataclasses
import pathlib
import time
from typing import TYPE_CHECKING, Any

from hpcjax.collectives.config import (
    AnyExchangeConfig,
    DenseConfig,
    OkTopkConfig,
    TopKConfig,
)
from hpcjax.core import checks
from hpcjax.runs.config import check_seed, from_json, to_json

if TYPE_CHECKING:
    import xarray as xr

    from hpcjax.hostcomm import Transport
    from hpcjax.runs.context import Context

ROOT = pathlib.Path(__file__).resolve().parents[2]
PHASES = ("total", "communicating")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
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

    processes: int = 4
    numbers: int = 4_000_000
    density: float = 0.01
    bits_per_second: float = 100e6
    latency: float = 0.0
    dense_steps: int = 5
    warm_up: int = 64
    steps: int = 64
    tau: int = 64
    tau_prime: int = 32
    patience: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        checks.require_count(2, processes=self.processes, numbers=self.numbers)
        checks.require_count(1, dense_steps=self.dense_steps, steps=self.steps)
        checks.require_count(0, warm_up=self.warm_up)
        checks.require_finite(0.0, bits_per_second=self.bits_per_second)
        checks.require_finite(0.0, latency=self.latency)
        checks.require_positive(patience=self.patience)

    def exchanges(self) -> dict[str, tuple[AnyExchangeConfig, int, int]]:
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


def run(cfg: Config, ctx: "Context") -> "xr.Dataset":
    """Times the exchanges, one after the other in the same processes.

    Returns:
      `seconds` [exchange, phase, step], of the slowest process: the whole of a step,
      from the gradient to the update, and how much of it was waiting for messages; and
      `words` [exchange, step], sent by the process that sends most. NaN where an
      exchange has fewer steps.
    """
    import numpy as np
    import xarray as xr

    from hpcjax import hostcomm

    del ctx
    rate = cfg.bits_per_second / 8
    link = hostcomm.Link(rate=rate, latency=cfg.latency) if rate else None
    told = hostcomm.launch(
        measure,
        cfg.processes,
        link=link,
        arguments=(to_json(cfg),),
        patience=cfg.patience,
        folder=ROOT,
    )
    names, most = list(cfg.exchanges()), max(cfg.steps, cfg.dense_steps)
    seconds = np.full((len(names), len(PHASES), most), np.nan)
    words = np.full((len(names), most), np.nan)
    for place, name in enumerate(names):
        of_all = np.array([each[name] for each in told])  # [process, step, 3]
        slowest = of_all.max(axis=0)
        seconds[place, :, : len(slowest)] = slowest[:, :2].T
        words[place, : len(slowest)] = slowest[:, 2]
    return xr.Dataset(
        {
            "seconds": (("exchange", "phase", "step"), seconds),
            "words": (("exchange", "step"), words),
        },
        coords={"exchange": names, "phase": list(PHASES)},
    )


def measure(transport: "Transport", given: dict[str, Any]) -> dict[str, Any]:
    """Returns (seconds, seconds of communication, words sent) of each step."""
    import numpy as np

    from hpcjax import hostcomm
    from hpcjax.collectives import HostGroup

    cfg = from_json(given, Config)
    draws = np.random.default_rng([cfg.seed, transport.rank])
    like = np.zeros(cfg.numbers, np.float32)
    found = {}
    for name, (config, untimed, timed) in cfg.exchanges().items():
        exchange, group = config.make(), HostGroup(transport)
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
