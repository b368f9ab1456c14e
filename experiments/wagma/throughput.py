"""Steps that sleep in real processes, some of them late, with each algorithm."""

import dataclasses
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from experiments.wagma.scaling import METHODS
from hpcjax import hostcomm, runs
from hpcjax.core import checks
from hpcjax.hostcomm.groups import require_sizes
from hpcjax.hostcomm.imbalance import Pattern
from hpcjax.runs.config import check_seed

if TYPE_CHECKING:
    from hpcjax.hostcomm import Transport


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
      methods: what is run, of `METHODS`; "wagma" among them.
      repetitions: runs of each method, in turns.
      patience: seconds that a process waits for another one.
      seed: of delays and of who is asked.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "processes": "2",
        "group_size": "2",
        "tau": "2",
        "steps": "3",
        "warm_up": "1",
        "base": "0.001",
        "delay": "0.005",
        "numbers": "100",
        "repetitions": "1",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "total": "repetition algorithm: seconds until the last process has ended",
        "late": "repetition: share of WAGMA's models that were",
        "staleness": "repetition: the largest",
        "copy": ": seconds to copy the model from the device and back",
    }

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
    methods: tuple[str, ...] = METHODS
    repetitions: int = 3
    patience: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        for method in self.methods:
            checks.require_choice("methods", method, METHODS)
        rule = 'methods must hold "wagma"'
        checks.require("wagma" in self.methods, rule, methods=self.methods)
        checks.require_count(2, processes=self.processes)
        require_sizes(self.group_size, processes=self.processes)
        periods = {"tau": self.tau, "period": self.period}
        checks.require_count(1, steps=self.steps, numbers=self.numbers, **periods)
        checks.require_count(1, repetitions=self.repetitions, warm_up=self.warm_up)
        checks.require_finite(0.0, base=self.base, delay=self.delay)
        checks.require_positive(patience=self.patience)

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"repetition": self.repetitions, "algorithm": self.methods}


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Measures all methods in turns, with the same delays."""
    del ctx
    sleeps = cfg.base + hostcomm.inject_delays(
        cfg.pattern, cfg.steps, cfg.processes, delay=cfg.delay, seed=cfg.seed
    )
    told = runs.in_processes(
        work, cfg, cfg.processes, given=(sleeps,), patience=cfg.patience
    )
    begin = np.min([each["begin"] for each in told], axis=0)
    end = np.max([each["end"] for each in told], axis=0)
    traces = [
        hostcomm.join_traces([hostcomm.GroupTrace(*trace) for trace in turn])
        for turn in zip(*(each["traces"] for each in told), strict=True)
    ]
    late = [trace.late()[cfg.warm_up :].mean() for trace in traces]
    stale = [int(trace.staleness().max()) for trace in traces]
    return runs.measured(
        {
            "total": (("repetition", "algorithm"), end - begin),
            "late": ("repetition", late),
            "staleness": ("repetition", stale),
            "copy": float(np.median([each["copy"] for each in told])),
        },
        coords={"algorithm": list(cfg.methods)},
    )


def work(transport: "Transport", cfg: Config, sleeps: np.ndarray) -> dict[str, Any]:
    """Runs all methods in turns with the same delays, each after a warm-up.

    Args:
      transport: ours.
      cfg: the sizes.
      sleeps: seconds of each step [step, rank].

    Returns:
      `begin` and `end` [repetition, method]; `copy`, seconds to copy the model from the
      device and back; `traces` of "wagma", by repetition.
    """
    import jax
    import jax.numpy as jnp

    own = sleeps[:, transport.rank]
    params = jnp.zeros(cfg.numbers)
    begin = time.monotonic()
    for _ in range(5):
        copy = np.array(jax.block_until_ready(params + 1))
        jax.block_until_ready(jnp.asarray(copy))
    copied = (time.monotonic() - begin) / 5
    found: dict[str, list[Any]] = {"begin": [], "end": [], "traces": []}
    for _ in range(cfg.repetitions):
        rows = []
        for method in cfg.methods:
            worker = _worker(method, transport, cfg)
            rows.append(_run(transport, worker, own, params, cfg.warm_up))
            if method == "wagma":
                found["traces"].append(tuple(worker.trace()))
        found["begin"].append([begin for begin, _ in rows])
        found["end"].append([end for _, end in rows])
    times = {name: np.array(found[name]) for name in ("begin", "end")}
    return {**times, "traces": found["traces"], "copy": copied}


def _worker(method: str, transport: "Transport", cfg: Config) -> Any:
    import optax

    from hpcjax import averaging

    tx, size = optax.sgd(0.1), cfg.group_size
    if method == "eager":
        return averaging.eager_sgd(transport, tx, mode="solo", limiter=0)
    if method in ("wagma", "waiting"):
        avoiding = method == "wagma"
        return averaging.wagma(
            transport, tx, group_size=size, tau=cfg.tau, wait_avoiding=avoiding
        )
    return {
        "allreduce": averaging.allreduce_sgd,
        "local_sgd": lambda *own: averaging.local_sgd(*own, period=cfg.period),
        "dpsgd": averaging.dpsgd,
        "adpsgd": lambda *own: averaging.adpsgd(*own, seed=cfg.seed),
        "sgp": averaging.sgp,
    }[method](transport, tx)


def _run(
    transport: "Transport", worker: Any, sleeps: np.ndarray, params: Any, warm_up: int
) -> tuple[float, float]:
    """Returns when the steps after the warm-up began and when they had ended."""
    import jax
    import jax.numpy as jnp

    grads = jnp.ones_like(params)
    state = worker.init(params)
    begin = time.monotonic()
    for step, seconds in enumerate(np.append(np.zeros(warm_up), sleeps)):
        if step == warm_up:
            hostcomm.barrier(transport, tag=hostcomm.Tag("together"))
            begin = time.monotonic()
        time.sleep(seconds)
        params, state = worker.step(grads, state, params)
    jax.block_until_ready(params)
    end = time.monotonic()
    worker.finish(state, params)
    return begin, end
