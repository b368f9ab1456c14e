"""Steps that sleep in real processes, some of them late, with each algorithm."""

import dataclasses
from typing import TYPE_CHECKING

import numpy as np

from experiments.eager.throughput import ROOT
from hpcjax.core import checks
from hpcjax.hostcomm.groups import require_sizes
from hpcjax.hostcomm.imbalance import Pattern
from hpcjax.runs.config import check_seed

if TYPE_CHECKING:
    import xarray as xr

    from hpcjax.runs.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Processes, their steps and who is late.

    Attributes:
      processes: P, a power of two; there may be more than cores, for they sleep.
      group_size: S.
      tau: steps from one mean of all to the next, of WAGMA.
      period: H of local SGD.
      steps: of a run.
      warm_up: steps before it, without sleep.
      base: seconds of everybody's step, slept.
      pattern: who is delayed; see `hostcomm.inject_delays`.
      delay: by how many seconds.
      numbers: float32 in the model.
      repetitions: runs of each method, in turns.
      patience: seconds that a process waits for another one.
      seed: of delays and of who is asked.
    """

    processes: int = 8
    group_size: int = 4
    tau: int = 10
    period: int = 1
    steps: int = 40
    warm_up: int = 10
    base: float = 0.02
    pattern: Pattern = "random_one"
    delay: float = 0.2
    numbers: int = 250_000
    repetitions: int = 3
    patience: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        checks.require_count(2, processes=self.processes)
        require_sizes(self.group_size, processes=self.processes)
        periods = {"tau": self.tau, "period": self.period}
        checks.require_count(1, steps=self.steps, numbers=self.numbers, **periods)
        checks.require_count(1, repetitions=self.repetitions, warm_up=self.warm_up)
        checks.require_finite(0.0, base=self.base, delay=self.delay)
        checks.require_positive(patience=self.patience)


def run(cfg: Config, ctx: "Context") -> "xr.Dataset":
    """Measures all methods in turns, with the same delays.

    Returns:
      Seconds `total`, until the last process has ended [repetition, algorithm]; of
      WAGMA's runs `late`, the share of models that were, and the largest
      `staleness`, [repetition]; `copy`, seconds to copy the model from the device and
      back.
    """
    import xarray as xr

    from experiments.wagma import processes
    from hpcjax import hostcomm

    del ctx
    sleeps = cfg.base + hostcomm.inject_delays(
        cfg.pattern, cfg.steps, cfg.processes, delay=cfg.delay, seed=cfg.seed
    )
    names = ("numbers", "repetitions", "warm_up", "group_size", "tau", "period", "seed")
    told = hostcomm.launch(
        processes.steps,
        cfg.processes,
        arguments=({name: getattr(cfg, name) for name in names} | {"sleeps": sleeps},),
        patience=cfg.patience,
        folder=ROOT,
    )
    begin = np.min([each["begin"] for each in told], axis=0)
    end = np.max([each["end"] for each in told], axis=0)
    traces = [
        hostcomm.join_group_traces([hostcomm.GroupTrace(*trace) for trace in turn])
        for turn in zip(*(each["traces"] for each in told), strict=True)
    ]
    late = [trace.late()[cfg.warm_up :].mean() for trace in traces]
    stale = [int(trace.staleness().max()) for trace in traces]
    return xr.Dataset(
        {
            "total": (("repetition", "algorithm"), end - begin),
            "late": ("repetition", late),
            "staleness": ("repetition", stale),
            "copy": float(np.median([each["copy"] for each in told])),
        },
        coords={"algorithm": list(processes.METHODS)},
    )
