"""Whether choices keep their objective later, and training beside them; simulated."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from experiments.polythrottle import workloads
from experiments.polythrottle.simulator import NOISE, Simulated
from experiments.polythrottle.tuner import CHECKED, choose, search_clocks
from experiments.polythrottle.workloads import Network
from hpcjax import cost, runs
from hpcjax.core import checks, config

SAMPLES, BACKWARD = 24, 3.0  # a training step takes three forward passes
EARLY, LATE = 0.25, 0.7  # seconds, the objectives of the two halves


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A device, how often it is tuned, and a trace.

    Attributes:
      device: that is tuned.
      models: networks, in turns.
      slacks: objectives over the p95 at the greatest clocks, in turns.
      choices: how often it is tuned.
      budget: trials of each.
      queries: batches of a trial.
      served: network of the trace.
      batch: queries that come together in the trace.
      train_batch: examples of a training step.
      interval: seconds between arrivals.
      length: seconds of the trace, whose objective changes after half.
      seed: of all draws.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "models": "[efficientnet_b0]",
        "served": "efficientnet_b4",
        "choices": "1",
        "budget": "6",
        "length": "20.0",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "guarded": "choice: whether fresh queries kept the objective there",
        "unguarded": "choice: the same at the best measured one",
        "admitted always_admitted": "half: training steps, and if all are admitted",
        "p95 always_p95": "half: over the objective",
        "left_out": ": relative error of the fit",
    }

    device: cost.DevicePower
    models: tuple[Network, ...] = (
        *("resnet50", "bert_base", "efficientnet_b0", "efficientnet_b4"),
    )
    slacks: tuple[config.Positive, ...] = (1.25, 1.5, 2.0)
    choices: config.Size = 100
    budget: config.Several = 15
    queries: config.Size = 30
    served: Network = "bert_base"
    batch: config.Size = 8
    train_batch: config.Size = 4
    interval: config.Positive = 0.75
    length: config.Positive = 60.0
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "each half of the trace must have an arrival: length >= 2 interval"
        times = {"length": self.length, "interval": self.interval}
        checks.require(self.length >= 2 * self.interval, rule, **times)

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"choice": range(self.choices), "half": ("early", "late")}


def run(cfg: Config, ctx: "runs.Context | None") -> "runs.Dataset":
    """Tunes and measures afresh; then serves the trace."""
    rows = []
    for choice in range(cfg.choices):
        rows.append(choose_twice(cfg, choice))
        if ctx is not None:
            ctx.record(choice + 1)
    guarded, unguarded = np.array(rows, float).T
    halves, left_out = serve(cfg)
    return runs.simulated(
        {
            "guarded": ("choice", guarded),
            "unguarded": ("choice", unguarded),
            **{name: ("half", values) for name, values in halves.items()},
            "left_out": left_out,
        },
        coords={"choice": range(cfg.choices), "half": ["early", "late"]},
    )


def choose_twice(cfg: Config, choice: int) -> tuple[bool, bool]:
    """Returns whether a choice with the guard, and without, is feasible afresh."""
    model = cfg.models[choice % len(cfg.models)]
    slack = cfg.slacks[choice // len(cfg.models) % len(cfg.slacks)]
    work = workloads.work_of(model)
    device = Simulated(cfg.device, work, (1, 2, 4, 8, 16, 32), (cfg.seed, choice))
    objective = slack * device.measure(device.start, CHECKED).p95
    search, _ = search_clocks(
        device,
        objective,
        budget=cfg.budget,
        batches=cfg.queries,
        seed=cfg.seed + choice,
    )

    def keeps(guard: bool) -> bool:
        found = choose(device, search.rank_feasible(), objective, guard=guard)
        if found is None:
            return False
        return device.measure(found[0], CHECKED).p95 <= objective

    return keeps(True), keeps(False)


def serve(cfg: Config) -> tuple[dict[str, list[float]], float]:
    """Serves the trace, with steps as the fit admits them and with a step always."""
    work = workloads.work_of(cfg.served)
    device = Simulated(cfg.device, work, (1,), (cfg.seed, 2))
    rng = np.random.default_rng((cfg.seed, 3))

    def seconds(batch: int, trained: int) -> float:
        """The processor is shared in time: a step beside takes its time besides."""
        alone = cfg.device.spend(work, {}, batch).seconds
        if trained:
            alone += BACKWARD * cfg.device.spend(work, {}, trained).seconds
        return alone * (1 + NOISE * rng.standard_normal())

    samples = []
    for n in range(SAMPLES):
        batch = int(rng.integers(1, 2 * cfg.batch + 1))
        trained = int(rng.integers(1, 2 * cfg.train_batch + 1)) if n % 2 else 0
        features = (*_features(device, batch), *_features(device, trained, BACKWARD))
        samples.append(cost.Sample(*features, seconds(batch, trained)))
    fit = cost.fit_interference(samples)
    beside = _features(device, cfg.train_batch, BACKWARD)
    expected = fit.cautious(*_features(device, cfg.batch), *beside)

    def objective(start: float) -> float:
        return EARLY if start < cfg.length / 2 else LATE

    halves: dict[str, list[float]] = {}
    for prefix in ("", "always_"):
        always = bool(prefix)
        trace = cost.simulate_trace(
            np.arange(0.0, cfg.length, cfg.interval).tolist(),
            lambda start, always=always: always or expected <= objective(start),
            lambda beside: seconds(cfg.batch, cfg.train_batch if beside else 0),
        )
        late = trace.starts >= cfg.length / 2
        for half, bound in ((~late, EARLY), (late, LATE)):
            admitted = float(trace.admitted[half].sum())
            p95 = float(np.quantile(trace.latencies[half], 0.95)) / bound
            halves.setdefault(f"{prefix}admitted", []).append(admitted)
            halves.setdefault(f"{prefix}p95", []).append(p95)
    return halves, fit.left_out


def _features(
    device: Simulated, batch: int, passes: float = 1.0
) -> tuple[float, float]:
    """Returns FLOPs of a batch, and FLOPs for each byte; none of none."""
    if not batch:
        return 0.0, 0.0
    work = device.work
    flops = float(batch * work.flops.sum())
    moved = float((work.batch_bytes + batch * work.query_bytes).sum())
    return passes * flops, flops / moved
