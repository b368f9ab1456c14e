"""Two training configs side by side in the same processes, iteration by iteration."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

from hpcjax import cost, hostcomm, perf, runs
from hpcjax.core import checks, config, parts
from hpcjax.core.errors import ConfigError
from hpcjax.runs.training import TrainingConfig

WHOLE, JIGSAW, ALIGNED = "whole backward", "jigsaw", "partial, not interleaved"
ROWS = (WHOLE, JIGSAW, ALIGNED)
JOBS = ("first", "second")
# What a run may have of its own that the executor does not know.
REFUSED = (
    *("input", "exchange", "averaging", "backward", "state", "sparsity", "parallel"),
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """Two training runs, and the processes that are the workers of both.

    Attributes:
      first: a run; of its `train` batch size and `iterations` in place of steps count.
      second: another one.
      workers: processes, each on a core of its own.
      k: blocks, and so roles, of either.
      iterations: of each run.
      repetitions: of each order of tasks, in turns.
      timings: of each pass, before.
      patience: seconds that a process waits for another one.
      pinned: False for processes that may share cores, whose times prove nothing.
      seed: not used; the runs have their own.
    """

    factory: ClassVar[str] = "experiments.spb.training_jobs:work"
    smoke: ClassVar[Mapping[str, str]] = {
        "iterations": "2",
        "repetitions": "1",
        "timings": "1",
        "pinned": "false",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "seconds idle": "order repetition: until all is done, and share",
        "apart others": "order: largest difference from the run alone",
        "foretold": "order: seconds by the simulator",
        "forward backward": "job: seconds",
        "ideal": ": speed-up of iterations that never wait",
        "iterations": ": of both runs together",
    }

    first: TrainingConfig = TrainingConfig()
    second: TrainingConfig = TrainingConfig()
    workers: config.Several = 2
    k: config.Several = 2
    iterations: config.Size = 12
    repetitions: config.Size = 5
    timings: config.Size = 5
    patience: config.Positive = 120.0
    pinned: bool = True
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        good = self.workers % self.k == 0
        rule = "workers must be a multiple of k"
        checks.require(good, rule, workers=self.workers, k=self.k)
        for name in JOBS:
            self._check(name, getattr(self, name))

    def _check(self, name: str, own: TrainingConfig) -> None:
        for field in REFUSED:
            if (part := getattr(own, field)) is not None:
                raise ConfigError(
                    f"jobs side by side average their gradients by roles: "
                    f"{name}.{field} must be none, got {_name(part)}"
                )
        if "gradients" in getattr(own.optimizer, "claims", ()):
            raise ConfigError(
                f"{name}.optimizer must have no backward pass of its own: "
                f"got {_name(own.optimizer)}"
            )
        rule = f"{name}.train.batch_size must divide by the {self.workers} workers"
        rows = own.train.batch_size
        checks.require(rows % self.workers == 0, rule, batch_size=rows)

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"order": ROWS, "repetition": self.repetitions, "job": JOBS}

    def typical(self) -> Mapping[str, Any]:
        """Returns what the table wants more of than that it is positive."""
        return {"ideal": 1.2}


def _name(part: Any) -> str:
    return parts.name_of(type(part)) or type(part).__name__


def run(cfg: Config, ctx: "runs.Context | None") -> "runs.Dataset":
    """Times the roles, then does the tasks of both runs in each order, in turns.

    Leaves the last measured timelines as `timeline.png`.

    Raises:
      ConfigError: fewer cores than workers; more blocks than a model has layers.
      HpcjaxError: processes have ended with different parameters, or one has failed.
    """
    found = runs.in_processes(
        cfg.find_factory(),
        cfg,
        cfg.workers,
        given=() if ctx is None else (str(ctx.data_root.absolute()),),
        cores=hostcomm.free_cores(cfg.workers) if cfg.pinned else None,
        patience=cfg.patience,
    )
    times = {name: perf.IterationTimes(*found[0]["times"][name]) for name in JOBS}
    told = {row: [[r[row] for r in own["runs"]] for own in found] for row in ROWS}
    spans = {
        row: [_spans(each) for each in zip(*told[row], strict=True)] for row in ROWS
    }
    if ctx is not None:
        from hpcjax.runs import curves, spans_and_fields

        bars = {row: perf.task_bars(spans[row][-1]) for row in (JIGSAW, WHOLE)}
        picture = spans_and_fields.draw_timelines(bars, unit="s")
        curves.save(picture, ctx.directory.path / "timeline.png")
    idle = [[perf.idle_share(each) for each in spans[row]] for row in ROWS]
    both = ("order", "repetition")
    return runs.measured(
        {
            "seconds": (both, [[_seconds(each) for each in spans[r]] for r in ROWS]),
            "idle": (both, idle),
            **{
                name: ("order", [max(own[name][row] for own in found) for row in ROWS])
                for name in ("apart", "others")
            },
            "foretold": ("order", [_foretold(cfg, times, row) for row in ROWS]),
            "forward": ("job", [times[name].forward for name in JOBS]),
            "backward": ("job", [times[name].backward for name in JOBS]),
            "ideal": ideal(times, cfg.k),
            "iterations": 2 * cfg.iterations,
        },
        coords={"order": list(ROWS), "job": list(JOBS)},
    )


def plan(
    cfg: Config, times: Mapping[str, "perf.IterationTimes"], row: str
) -> "tuple[tuple[perf.CoTask, ...], ...]":
    """Returns the tasks of each process in order."""
    if row != ALIGNED:
        return perf.rows_of(_simulate(cfg, times, row))
    # Worker w is on process w with role w mod k + 1, in both runs.
    return tuple(
        tuple(
            perf.CoTask(name, iteration, worker, worker % cfg.k + 1)
            for iteration in range(cfg.iterations)
            for name in JOBS
        )
        for worker in range(cfg.workers)
    )


def _simulate(
    cfg: Config, times: Mapping[str, "perf.IterationTimes"], row: str
) -> "cost.ClusterRun":
    replicas = cfg.workers // cfg.k
    options = {"replicas": replicas, "iterations": cfg.iterations}
    jobs = [times[name].job(name, **options) for name in JOBS]
    policy = "jigsaw" if row == JIGSAW else "las"
    return cost.simulate_cluster(jobs, cost.Cluster(gpus=cfg.workers), policy)


def _foretold(
    cfg: Config, times: Mapping[str, "perf.IterationTimes"], row: str
) -> float:
    if row != ALIGNED:
        return _simulate(cfg, times, row).makespan
    longest = sum(times[name].forward + times[name].backward for name in JOBS)
    return cfg.iterations * longest


def ideal(times: Mapping[str, "perf.IterationTimes"], k: int) -> float:
    """Returns Σ (f + b) / Σ (f + b (k + 1) / 2k): 2 (f + b) / (2 f + 1.5 b), k = 2."""
    whole = sum(each.forward + each.backward for each in times.values())
    share = (k + 1) / (2 * k)
    return whole / sum(each.forward + share * each.backward for each in times.values())


def _spans(told: Sequence[Sequence[Any]]) -> "list[list[perf.CoSpan]]":
    """Returns what processes did, from what they have sent."""
    return [
        [perf.CoSpan(start, end, perf.CoTask(*task)) for start, end, task in own]
        for own in told
    ]


def _seconds(spans: "Sequence[Sequence[perf.CoSpan]]") -> float:
    every = [span for own in spans for span in own]
    return max(span.end for span in every) - min(span.start for span in every)
