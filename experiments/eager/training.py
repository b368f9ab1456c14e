"""A hyperplane learned by real processes, one of which is late in every step."""

import dataclasses
from typing import TYPE_CHECKING, Literal

import numpy as np

from experiments.eager.hyperplane import Hyperplane
from experiments.eager.throughput import ROOT
from hpcjax.core import checks
from hpcjax.hostcomm.imbalance import Pattern
from hpcjax.runs.config import check_seed

if TYPE_CHECKING:
    import xarray as xr

    from hpcjax.runs.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """The task, the processes and who is late.

    Attributes:
      task: its sizes.
      processes: each with its own shard.
      epochs: over all points.
      lr: learning rate.
      base: seconds that everybody sleeps in a step, besides computing.
      pattern: who is delayed; see `hostcomm.inject_delays`.
      delay: by how many seconds.
      limiter: partial rounds between synchronous ones; 0: none is.
      missed: what a late worker applies.
      sync_models_every: steps between averages of the parameters; 0: never.
      patience: seconds that a process waits for another one.
      seed: of data, delays and initiators.
    """

    task: Hyperplane = Hyperplane()
    processes: int = 8
    epochs: int = 48
    lr: float = 0.05
    base: float = 0.0
    pattern: Pattern = "random_one"
    delay: float = 0.2
    limiter: int = 32
    missed: Literal["apply_all", "newest"] = "apply_all"
    sync_models_every: int = 0
    patience: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        checks.require_count(2, processes=self.processes)
        checks.require_count(1, epochs=self.epochs)
        every = self.sync_models_every
        checks.require_count(0, limiter=self.limiter, sync_models_every=every)
        checks.require_positive(lr=self.lr, patience=self.patience)
        checks.require_finite(0.0, base=self.base, delay=self.delay)
        self.task.check(self.processes)


def run(cfg: Config, ctx: "Context") -> "xr.Dataset":
    """Trains with each mode, with the same data and delays.

    Returns:
      `loss`, the expected one on new points, mean over the workers, at each step's
      begin and at the end, and `seconds` at which they were there, [mode, step];
      `total`, seconds until the last worker has ended its steps; `staleness`, standard
      deviation of how late gradients were summed, [mode].
    """
    import xarray as xr

    from experiments.eager import processes
    from hpcjax import hostcomm

    del ctx
    count = cfg.epochs * cfg.task.points // cfg.task.batch
    given = {
        "task": dataclasses.asdict(cfg.task),
        "sleeps": cfg.base
        + hostcomm.inject_delays(
            cfg.pattern, count, cfg.processes, delay=cfg.delay, seed=cfg.seed
        ),
        "lr": cfg.lr,
        "limiter": cfg.limiter,
        "missed": cfg.missed,
        "sync_models_every": cfg.sync_models_every,
        "seed": cfg.seed,
    }
    told = hostcomm.launch(
        processes.train,
        cfg.processes,
        arguments=(given,),
        patience=cfg.patience,
        folder=ROOT,
    )
    loss, seconds = (
        np.array([each[name] for each in told]) for name in ("loss", "seconds")
    )
    traces = [
        hostcomm.join_traces(
            [hostcomm.PartialTrace(*each["traces"][row]) for each in told]
        )
        for row in range(len(processes.MODES))
    ]
    return xr.Dataset(
        {
            "loss": (("mode", "step"), loss.mean(0)),
            "seconds": (("mode", "step"), seconds.mean(0)),
            "total": ("mode", seconds[..., -1].max(0)),
            "staleness": ("mode", [trace.staleness().std() for trace in traces]),
        },
        coords={"mode": list(processes.MODES)},
    )
