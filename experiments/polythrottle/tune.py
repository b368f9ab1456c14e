"""Clocks and batch that use the least energy a query within a latency objective."""

import contextlib
import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, Literal

from experiments.gradcomp.networks import PUBLISHED
from experiments.polythrottle import workloads
from experiments.polythrottle.forward import compile_batches
from experiments.polythrottle.simulator import Here, Simulated
from experiments.polythrottle.tuner import Tuned, tune
from experiments.polythrottle.workloads import Network
from hpcjax import cost, perf, runs
from hpcjax.core import checks, config, user_cache
from hpcjax.core.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A network, a device, and an objective.

    Attributes:
      device: whose clocks and energy are simulated; unused with a counter.
      model: the network that is served.
      slack: the objective over the p95 at the greatest clocks and the least batch.
      objective_ms: the objective itself; None for that of `slack`.
      budget: trials of the search.
      queries: batches of a trial.
      batches: that may be chosen.
      counter: "none" simulates; "rapl" or "nvml" measure this machine.
      knobs: clocks of this machine that are set, of /sys: such as "policy0".
      allow_write: whether they may be, which needs root.
      seconds: least length of a measurement on this machine.
      seed: of search and noise.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "model": "efficientnet_b0",
        "budget": "6",
        "queries": "8",
        "batches": "[1,2]",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "joules": ": a query at the chosen point, measured once more",
        "p95 objective": ": seconds",
        "default": ": joules at the greatest clocks",
        "saving": ": over the default",
        "feasible": ": whether the objective is kept",
        "trial_joules trial_p95 trial_batch": "trial: of each trial",
    }

    device: cost.DevicePower
    model: Network = "bert_base"
    slack: config.Positive = 1.5
    objective_ms: config.Positive | None = None
    budget: config.Size = 15
    queries: config.Size = 30
    batches: tuple[config.Size, ...] = (1, 2, 4, 8, 16, 32)
    counter: Literal["none", "rapl", "nvml"] = "none"
    knobs: tuple[str, ...] = ()
    allow_write: bool = False
    seconds: config.Positive = 2.0
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.require(bool(self.batches), "batches must not be empty", given=())
        rule = "knobs are set on this machine only, with allow_write=true"
        good = not self.knobs or (self.allow_write and self.counter != "none")
        checks.require(good, rule, knobs=self.knobs, counter=self.counter)
        if self.counter != "none":  # of the others there are only formulas
            checks.require_choice("model", self.model, tuple(PUBLISHED))

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"trial": self.budget}


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Tunes, and says what was chosen."""
    with open_device(cfg) as device:
        greatest = device.measure(device.start, cfg.queries)
        given = cfg.objective_ms
        objective = cfg.slack * greatest.p95 if given is None else 1e-3 * given
        found = tune(
            device,
            objective,
            budget=cfg.budget,
            batches=cfg.queries,
            seed=cfg.seed,
        )
    saving = 1 - found.checked.joules / greatest.joules
    told = ", ".join(f"{name}={value:g}" for name, value in found.point.items())
    how = "" if found.feasible else "not within the objective: "
    ctx.say(
        f"{how}{told}: {found.checked.joules:.4g} J a query ({device.source}), "
        f"{100 * saving:.1f} % less than at the greatest clocks; "
        f"p95 {1e3 * found.checked.p95:.4g} of {1e3 * objective:.4g} ms"
    )
    return _result(found, objective, greatest.joules, device.source, told)


def _result(
    found: Tuned, objective: float, default: float, source: str, told: str
) -> "runs.Dataset":
    figures = {
        "joules": found.checked.joules,
        "p95": found.checked.p95,
        "objective": objective,
        "default": default,
        "saving": 1 - found.checked.joules / default,
        "feasible": float(found.feasible),
        "trial_joules": ("trial", [each.joules for each in found.measured]),
        "trial_p95": ("trial", [each.p95 for each in found.measured]),
        "trial_batch": ("trial", [each["batch"] for each in found.trials]),
    }
    attrs = {"chosen": told}
    if not found.feasible:
        attrs["failed"] = "no trial keeps the objective: the nearest is given"
    make = runs.measured if source == "measured" else runs.simulated
    trials = {"trial": range(len(found.trials))}
    return make(figures, coords=trials, attrs=attrs)


@contextlib.contextmanager
def open_device(cfg: Config) -> Iterator[Any]:
    """Yields the device; on leaving, this machine's clocks are as they were."""
    if cfg.counter == "none":
        work = workloads.work_of(cfg.model)
        yield Simulated(cfg.device, work, cfg.batches, (cfg.seed, 1))
        return
    counter = perf.open_counter(cfg.counter)
    calls = compile_batches(cfg.model, cfg.batches, cfg.seed)
    with contextlib.ExitStack() as stack:
        clocks = None
        if cfg.knobs:
            clocks = stack.enter_context(
                perf.Sysfs(journal_path(), allow_write=cfg.allow_write)
            )
        yield Here(calls, counter, clocks, cfg.knobs, cfg.seconds)


def journal_path() -> pathlib.Path:
    """Returns where the clocks' original values are kept; the same for all runs."""
    folder = user_cache.find()
    if folder is None:
        raise ConfigError("clocks are set only where a user has a folder of caches")
    return folder / "clocks.json"
