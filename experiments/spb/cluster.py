"""Jobs of a simulated cluster under five policies, and without partial passes."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

import numpy as np

from hpcjax import cost, hostcomm, runs
from hpcjax.core import checks, config

if TYPE_CHECKING:
    from matplotlib.figure import Figure

# What is compared: the policy, and the roles at most.
WHOLE = "jigsaw, k = 1"
ROWS = ("jigsaw", "las", "gang_fifo", "gang_srtf", "spb_gang", WHOLE)
FIGURES = (
    *("busy", "switching", "held", "makespan"),
    *("mean", "late", "slowdown", "pair"),
)
_HOUR = 3600.0


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """GPUs and the jobs that want them; times in seconds.

    Attributes:
      gpus: of the cluster.
      memory: bytes of each.
      bandwidth: bytes per second at which a GPU gets a state that it does not hold.
      switch: in which a GPU turns to another job, as a share of `seconds`.
      trace: file of jobs; None: they are drawn.
      layout: of the file: "csv" with the columns job_id,submit,gpus,duration, "philly"
        for its cluster_job_log, "pai" for its task table.
      jobs: that are drawn.
      rate: of them that come in a second.
      seconds: of an iteration with the whole backward pass; the median of jobs drawn.
      forward: the forward pass's share of it.
      spread: standard deviation of the logarithm of seconds and iterations drawn.
      iterations: the least and the most.
      k: roles at most.
      bytes: of a worker's state.
      sync: of the join of more than one worker, as a share of `seconds`.
      quantum: for which a gang keeps its GPUs at least.
      seed: of the draws.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "gpus": "16",
        "jobs": "6",
        "iterations": "[2,6]",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "busy switching held": "policy: GPU-hours",
        "makespan": "policy: hours",
        "mean late": "policy: hours from arrival to end; the 95th percentile",
        "slowdown": "policy: the mean",
        "pair": "policy: seconds of two jobs of 10 iterations on two GPUs",
        "derived bound": ": share of computing that roles save, and of infinitely many",
    }

    gpus: config.Size = 64
    memory: config.Positive = 16e9
    bandwidth: config.Positive = 25e9
    switch: config.NotNegative = 0.01
    trace: str | None = None
    layout: Literal["csv", "philly", "pai"] = "csv"
    jobs: config.Size = 300
    rate: config.Positive = 0.15
    seconds: config.Positive = 1.0
    forward: config.Share = 1 / 3
    spread: config.NotNegative = 0.5
    iterations: tuple[int, int] = (100, 400)
    k: config.Size = 4
    bytes: config.NotNegative = 1e9
    sync: config.NotNegative = 0.0
    quantum: config.Positive = 60.0
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        low, high = self.iterations
        good = 1 <= low <= high
        checks.require(good, "iterations must rise from 1", iterations=self.iterations)

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"policy": list(ROWS)}


def run(cfg: Config, ctx: "runs.Context | None") -> "runs.Dataset":
    """Simulates the same jobs under every policy.

    Leaves as `timeline.png` the pair of jobs that can be computed by hand, and as
    `shares.png` what GPUs do.
    """
    gpus, jobs = cluster_of(cfg), {k: jobs_of(cfg, k) for k in (1, cfg.k)}
    made, pair = {}, {}
    for row in ROWS:
        policy, k = ("jigsaw", 1) if row == WHOLE else (row, cfg.k)
        made[row] = cost.simulate_cluster(jobs[k], gpus, policy, quantum=cfg.quantum)
        pair[row] = cost.simulate_cluster(
            pair_of(k=min(k, 2)), cost.Cluster(gpus=2), policy
        )
    if ctx is not None:
        _draw(made, pair, ctx.directory.path)
    own = [figures(made[row], jobs[1]) | {"pair": pair[row].makespan} for row in ROWS]
    columns = {name: ("policy", [each[name] for each in own]) for name in FIGURES}
    return runs.simulated(
        {**columns, "derived": derived(jobs[cfg.k]), "bound": (1 - cfg.forward) / 2},
        coords={"policy": list(ROWS)},
    )


def cluster_of(cfg: Config) -> "cost.Cluster":
    """Returns the cluster of a config."""
    return cost.Cluster(
        gpus=cfg.gpus,
        memory=cfg.memory,
        switch=cfg.switch * cfg.seconds,
        link=hostcomm.MessageCost.of_rate(cfg.bandwidth),
    )


def jobs_of(cfg: Config, k: int) -> "list[cost.Job]":
    """Returns the jobs of a config, with so many roles at most."""
    assumed = cost.Assumed(cfg.seconds, cfg.forward, k, cfg.bytes)
    if cfg.trace is not None:
        there = pathlib.Path(cfg.trace).is_file()
        checks.require(there, "trace must be the path of a file", trace=cfg.trace)
        read = {"csv": cost.read_csv_jobs, "philly": cost.read_philly_jobs}
        jobs = read.get(cfg.layout, cost.read_pai_jobs)(cfg.trace, assumed)
    else:
        jobs = cost.generate_jobs(
            cfg.jobs,
            cfg.rate,
            cfg.seed,
            assumed=assumed,
            median=float(np.sqrt(np.prod(cfg.iterations))),
            spread=cfg.spread,
            limits=cfg.iterations,
        )
    sync = cfg.sync * cfg.seconds
    return [
        dataclasses.replace(job, sync=sync if job.workers > 1 else 0.0) for job in jobs
    ]


def pair_of(k: int) -> "list[cost.Job]":
    """Returns two jobs of two workers, whose times can be computed by hand."""
    return [
        cost.Job(name=name, forward=1, backward=2, k=k, replicas=2 // k, iterations=10)
        for name in ("first", "second")
    ]


def figures(made: "cost.ClusterRun", jobs: "list[cost.Job]") -> dict[str, float]:
    """Returns a run's figures but `pair`; see `run`."""
    waited = [made.completion[job.name] - job.arrival for job in jobs]
    return {
        "busy": made.busy / _HOUR,
        "switching": made.switching / _HOUR,
        "held": made.held / _HOUR,
        "makespan": made.makespan / _HOUR,
        "mean": float(np.mean(waited)) / _HOUR,
        "late": float(np.quantile(waited, 0.95)) / _HOUR,
        "slowdown": float(np.mean(list(made.slowdown.values()))),
    }


def derived(jobs: "list[cost.Job]") -> float:
    """Returns the share of GPU time that roles save, b (k − 1) / 2k of a worker's."""
    work = [job.iterations * job.workers for job in jobs]
    whole = [
        n * (job.forward + job.backward) for n, job in zip(work, jobs, strict=True)
    ]
    saved = [
        n * job.backward * (job.k - 1) / (2 * job.k)
        for n, job in zip(work, jobs, strict=True)
    ]
    return sum(saved) / sum(whole)


def _draw(
    made: "Mapping[str, cost.ClusterRun]",
    pair: "Mapping[str, cost.ClusterRun]",
    folder: pathlib.Path,
) -> None:
    from hpcjax.runs import curves, spans_and_fields

    rows = {row: pair[row].bars() for row in ("jigsaw", "gang_fifo")}
    curves.save(
        spans_and_fields.draw_timelines(rows, unit="s"), folder / "timeline.png"
    )
    curves.save(draw_shares(made), folder / "shares.png")


def draw_shares(made: "Mapping[str, cost.ClusterRun]") -> "Figure":
    """Draws GPU-hours of computing, of switching, and idle until the last job ends."""
    from hpcjax.runs import curves, panels

    parts = {
        "busy": [each.busy for each in made.values()],
        "switching": [each.switching for each in made.values()],
        "idle": [
            each.gpus * each.makespan - each.busy - each.switching
            for each in made.values()
        ],
    }
    figure, ((axes,),) = panels.open_figure(panels.AROUND + 0.3 * len(made))
    left = np.zeros(len(made))
    for place, (label, seconds) in enumerate(parts.items()):
        hours, look = np.array(seconds) / _HOUR, panels.look_of_part(place)
        axes.barh(list(made), hours, left=left, label=label, **look)
        left += hours
    axes.invert_yaxis()
    axes.set_xlabel("GPU-hours")
    curves.add_legend(figure)
    return figure
