"""A hyperplane learned by real processes, one of which is late in every step."""

import dataclasses
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from experiments.eager.hyperplane import Hyperplane
from experiments.eager.scaling import MODES
from hpcjax import hostcomm, runs
from hpcjax.core import checks
from hpcjax.hostcomm.imbalance import Pattern
from hpcjax.runs.config import check_seed

if TYPE_CHECKING:
    from hpcjax.hostcomm import Transport


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

    smoke: ClassVar[Mapping[str, str]] = {
        "processes": "2",
        "epochs": "2",
        "delay": "0.002",
        "base": "0.001",
        "lr": "0.05",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "loss": "mode step: the expected one on new points, mean over the workers",
        "seconds": "mode step: at which they were there",
        "total": "mode: seconds until the last worker has ended its steps",
        "staleness": "mode: standard deviation of how late gradients were summed",
    }

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

    @property
    def steps(self) -> int:
        """Steps of each mode."""
        return self.epochs * self.task.points // self.task.batch

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"mode": MODES, "step": range(self.steps + 1)}


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Trains with each mode, with the same data and delays."""
    del ctx
    told = runs.in_processes(work, cfg, cfg.processes, patience=cfg.patience)
    loss, seconds = (
        np.array([each[name] for each in told]) for name in ("loss", "seconds")
    )
    traces = [
        hostcomm.join_traces(
            [hostcomm.PartialTrace(*each["traces"][row]) for each in told]
        )
        for row in range(len(MODES))
    ]
    return runs.measured(
        {
            "loss": (("mode", "step"), loss.mean(0)),
            "seconds": (("mode", "step"), seconds.mean(0)),
            "total": ("mode", seconds[..., -1].max(0)),
            "staleness": ("mode", [trace.staleness().std() for trace in traces]),
        },
        coords={"mode": list(MODES)},
    )


def work(transport: "Transport", cfg: Config) -> dict[str, Any]:
    """Learns a hyperplane from this process's shard, with each mode.

    Returns:
      `loss` of the parameters at each step's begin and at the end, and `seconds` at
      which they were there, [mode, step + 1]; `traces`, by mode.
    """
    import jax
    import jax.numpy as jnp
    import optax

    from hpcjax import averaging

    task, seed = cfg.task, cfg.seed
    sleeps = cfg.base + hostcomm.inject_delays(
        cfg.pattern, cfg.steps, transport.size, delay=cfg.delay, seed=seed
    )
    x, y = map(jnp.asarray, task.shard(seed, transport.rank, transport.size))
    gradient = jax.jit(task.gradient(transport.size))
    excess = jax.jit(task.excess(seed))
    found: dict[str, list[Any]] = {"loss": [], "seconds": [], "traces": []}
    for mode in MODES:
        worker = averaging.eager_sgd(
            transport,
            optax.sgd(cfg.lr),
            mode=mode,
            limiter=cfg.limiter,
            missed=cfg.missed,
            seed=seed,
            sync_models_every=cfg.sync_models_every,
        )
        params = jnp.zeros(task.dims + 1)
        state = worker.init(params)
        jax.block_until_ready((gradient(params, x, y, 0), excess(params)))
        hostcomm.barrier(transport, tag=hostcomm.Tag("together"))
        begin, losses, times = time.monotonic(), [], []
        for step, pause in enumerate(sleeps[:, transport.rank]):
            losses.append(excess(params))
            times.append(time.monotonic() - begin)
            time.sleep(pause)
            _, grads = gradient(params, x, y, step)
            params, state = worker.step(grads, state, params)
        times.append(time.monotonic() - begin)
        params, state = worker.finish(state, params)
        losses.append(excess(params))
        found["loss"].append(np.array(losses))
        found["seconds"].append(np.array(times))
        found["traces"].append(tuple(worker.trace() or ()))
    return {
        **found,
        "loss": np.array(found["loss"]),
        "seconds": np.array(found["seconds"]),
    }
