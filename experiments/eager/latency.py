"""How long a round takes whose workers arrive one after the other, by its size."""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from experiments.eager.throughput import ROOT
from hpcjax.core import checks
from hpcjax.runs.config import check_seed

if TYPE_CHECKING:
    import xarray as xr

    from hpcjax.runs.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Processes and their messages.

    Attributes:
      processes: P.
      bytes: of the messages.
      skew: seconds between one arrival and the next.
      rounds: of each mode and size.
      patience: seconds that a process waits for another one.
      seed: of the initiators.
    """

    processes: int = 8
    bytes: tuple[int, ...] = (64, 1024, 16_384, 262_144, 4_194_304)
    skew: float = 0.001
    rounds: int = 64
    patience: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        checks.require_count(2, processes=self.processes)
        checks.require_count(1, rounds=self.rounds)
        checks.require_count(4, bytes=min(self.bytes, default=0))
        checks.require_finite(0.0, skew=self.skew)
        checks.require_positive(patience=self.patience)


def run(cfg: Config, ctx: "Context") -> "xr.Dataset":
    """Measures from each worker's arrival to its result, the mean over all.

    Returns:
      Seconds `latency`, and `fresh`, contributions of the round's own step, [mode,
      bytes]; `ping`, seconds of one message [bytes].
    """
    import xarray as xr

    from experiments.eager import processes
    from hpcjax import hostcomm

    del ctx
    given = {
        "bytes": list(cfg.bytes),
        "sleeps": hostcomm.inject_delays(
            "linear_skew", cfg.rounds, cfg.processes, delay=cfg.skew
        ),
        "seed": cfg.seed,
    }
    told = hostcomm.launch(
        processes.latencies,
        cfg.processes,
        arguments=(given,),
        patience=cfg.patience,
        folder=ROOT,
    )
    return xr.Dataset(
        {
            "latency": (
                ("mode", "bytes"),
                np.mean([each["latency"] for each in told], axis=0),
            ),
            "fresh": (("mode", "bytes"), told[0]["fresh"]),
            "ping": ("bytes", told[0]["ping"]),
        },
        coords={"mode": list(processes.MODES), "bytes": list(cfg.bytes)},
    )
