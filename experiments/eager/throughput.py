"""Steps that sleep in real processes, some of them late, beside the event model."""

import dataclasses
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from experiments.eager.scaling import MODES
from hpcjax import hostcomm, runs
from hpcjax.core import checks
from hpcjax.hostcomm.imbalance import Pattern
from hpcjax.runs.config import check_seed

if TYPE_CHECKING:
    from hpcjax.hostcomm import Transport


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """Processes, their steps and who is late.

    Attributes:
      processes: P; there may be more than cores, for they sleep.
      steps: of a run.
      base: seconds of everybody's step, slept.
      pattern: who is delayed; see `hostcomm.inject_delays`.
      delay: by how many seconds.
      asleep: if not 0, the last process sleeps so many seconds in its first step, and
        not at all in the others.
      numbers: float32 in a gradient.
      limiter: partial rounds between synchronous ones; 0: none is.
      repetitions: runs of each mode, in turns.
      calibration: synchronous steps without delay that tell the time of a round.
      patience: seconds that a process waits for another one.
      seed: of delays and initiators.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "processes": "3",
        "steps": "3",
        "base": "0.001",
        "delay": "0.005",
        "numbers": "100",
        "repetitions": "2",
        "calibration": "2",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "total mean others": "repetition mode: seconds until the last ends",
        "fresh contributors": "repetition mode: of a round",
        "staleness": "repetition mode: the largest",
        "foretold": "mode: total seconds by the event model",
        "round ping pong": ": seconds of a round, a small and a large message",
    }

    processes: int = 8
    steps: int = 25
    base: float = 0.02
    pattern: Pattern = "random_one"
    delay: float = 0.2
    asleep: float = 0.0
    numbers: int = 250_000
    limiter: int = 0
    repetitions: int = 3
    calibration: int = 20
    patience: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        checks.require_count(2, processes=self.processes, calibration=self.calibration)
        checks.require_count(
            1, steps=self.steps, numbers=self.numbers, repetitions=self.repetitions
        )
        checks.require_count(0, limiter=self.limiter)
        checks.require_finite(0.0, base=self.base, delay=self.delay, asleep=self.asleep)
        checks.require_positive(patience=self.patience)

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"repetition": range(self.repetitions), "mode": MODES}


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Measures all modes in turns, with the same delays."""
    from hpcjax import cost

    del ctx
    sleeps = cfg.base + hostcomm.inject_delays(
        cfg.pattern, cfg.steps, cfg.processes, delay=cfg.delay, seed=cfg.seed
    )
    if cfg.asleep:
        sleeps[:, -1] = 0
        sleeps[0, -1] = cfg.asleep
    told = runs.in_processes(
        work, cfg, cfg.processes, given=(sleeps,), patience=cfg.patience
    )
    seconds = max(0.0, float(np.median([each["round"] for each in told])))
    foretold = [
        cost.simulate_rounds(
            sleeps, mode=mode, seconds=seconds, limiter=cfg.limiter, seed=cfg.seed
        ).total()
        for mode in MODES
    ]
    ping, pong = told[0]["ping"]
    return runs.measured(
        {
            **_figures(told),
            "foretold": ("mode", np.array(foretold)),
            "round": seconds,
            "ping": float(ping),
            "pong": float(pong),
        },
        coords={"mode": list(MODES)},
    )


def _figures(told: list[dict[str, Any]]) -> dict[str, Any]:
    """Returns what the runs have shown, of all ranks' answers."""
    begin = np.min([each["begin"] for each in told], axis=0)
    end = np.array([each["end"] for each in told])
    repetitions, modes = begin.shape
    fresh, staleness = np.zeros(begin.shape), np.zeros(begin.shape)
    for row in range(repetitions):
        for column in range(modes):
            trace = hostcomm.join_traces(
                [hostcomm.PartialTrace(*each["traces"][row][column]) for each in told]
            )
            fresh[row, column] = trace.fresh().mean()
            staleness[row, column] = trace.staleness().max()
    found = {
        "total": end.max(0) - begin,
        "mean": end.mean(0) - begin,
        "others": end[:-1].max(0) - begin,
        "fresh": fresh,
        "staleness": staleness,
        "contributors": told[0]["contributors"],
    }
    return {name: (("repetition", "mode"), values) for name, values in found.items()}


def work(transport: "Transport", cfg: Config, sleeps: np.ndarray) -> dict[str, Any]:
    """Runs all modes in turns with the same delays, after a warm-up.

    Args:
      transport: ours.
      cfg: the sizes.
      sleeps: seconds of each step [step, rank].

    Returns:
      `ping`, seconds of a small message and of one of the size; `round`, seconds of a
      synchronous round of all; `begin` and `end` [repetition, mode]; and `traces` and
      `contributors`, by repetition and mode.
    """
    own = sleeps[:, transport.rank]
    ping = hostcomm.ping_pong(transport, [4, 4 * cfg.numbers])
    alone = np.full(cfg.calibration, cfg.base)
    _, seconds, _ = _run(transport, alone, cfg.numbers, {"mode": "sync"})
    settings = {"limiter": cfg.limiter, "seed": cfg.seed}
    runs = [
        [_run(transport, own, cfg.numbers, settings | {"mode": mode}) for mode in MODES]
        for _ in range(cfg.repetitions)
    ]
    return {
        "ping": ping,
        "round": float(np.median(np.diff(seconds)) - cfg.base),
        "begin": np.array([[run[1][0] for run in row] for row in runs]),
        "end": np.array([[run[1][-1] for run in row] for row in runs]),
        "traces": [[tuple(run[0]) for run in row] for row in runs],
        "contributors": np.array([[run[2] for run in row] for row in runs]),
    }


def _run(
    transport: "Transport", sleeps: np.ndarray, size: int, settings: dict[str, Any]
) -> tuple[hostcomm.PartialTrace, np.ndarray, float]:
    """Returns the trace, when each step began and the last ended, and contributors."""
    partial = hostcomm.PartialAllreduce(transport, size, **settings)
    gradient = np.ones(size, np.float32)
    contributors = []
    hostcomm.barrier(transport)
    times = [time.monotonic()]
    for step, seconds in enumerate(sleeps):
        time.sleep(seconds)
        partial.post(step, gradient)
        contributors += [each.contributors for each in partial.result(step)]
        times.append(time.monotonic())
    partial.finish()
    return partial.trace(), np.array(times), float(np.mean(contributors))
