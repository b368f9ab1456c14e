"""Pipelines of processes that follow their messages, beside fixed orders, measured.

An op computes its stage, then sleeps until its drawn time is over, so that there may be
more processes than cores.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np

from hpcjax import cost, runs
from hpcjax.core import checks, config

if TYPE_CHECKING:
    from hpcjax.runs.outlines import Labels

F1B1, PUBLISHED, DEEP, GPIPE = "1F1B", "G in flight", "2G in flight", "GPipe"
ORDERS = (F1B1, PUBLISHED, DEEP, GPIPE)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A chain of tanh layers in stages, whose ops take times that are drawn.

    Attributes:
      stages: G, a process each.
      layers: of all stages; as many in each.
      width: of a layer.
      rows: examples in a batch.
      micro_batches: m, of a batch.
      jitter: σ of the times' logarithms; GPipe's ops have none.
      forward: seconds of a forward pass in the mean; backward passes take twice that.
      draws: of times, each for all orders.
      patience: seconds that a process waits for another one.
      seed: of the first draw, of parameters and data.
    """

    factory: ClassVar[str] = "experiments.axonn.live_stage:work"
    smoke: ClassVar[Mapping[str, str]] = {
        "stages": "2",
        "layers": "2",
        "micro_batches": "2",
        "rows": "4",
        "draws": "1",
        "forward": "0.001",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "seconds": "order draw: of a batch",
        "simulated": "order draw: what the simulator has for these times",
        "idle": "order draw: share of the time that a process does nothing, mean",
        "distance": "order: of a gradient from jax.grad's, the farthest",
        "summed": "order: the same of gradients that are added up, not averaged",
    }

    stages: config.Size = 4
    layers: config.Size = 4
    width: config.Size = 16
    rows: config.Size = 64
    micro_batches: config.Size = 16
    jitter: config.NotNegative = 0.3
    forward: config.Positive = 0.01
    draws: config.Size = 20
    patience: config.Positive = 60.0
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = f"layers must be a multiple of the {self.stages} stages"
        checks.require(self.layers % self.stages == 0, rule, layers=self.layers)
        rule = f"rows must be a multiple of the {self.micro_batches} micro-batches"
        checks.require(self.rows % self.micro_batches == 0, rule, rows=self.rows)

    def labels(self) -> "Labels":
        """Returns those of the figures' dimensions."""
        return {"order": ORDERS, "draw": range(self.draws)}

    def durations(self, order: str, draw: int) -> np.ndarray:
        """Returns seconds of ops, see `cost.draw_durations`."""
        jitter = 0.0 if order == GPIPE else self.jitter
        size = self.stages, self.micro_batches
        return self.forward * cost.draw_durations(*size, jitter, self.seed + draw)


def simulate(cfg: Config, order: str, draw: int) -> float:
    """Returns seconds of a batch as simulated, messages taking none."""
    times = cfg.durations(order, draw)
    if order == GPIPE:
        return 3 * cfg.forward * (cfg.micro_batches + cfg.stages - 1)
    if order == F1B1:
        return cost.simulate_one_f_one_b(times).makespan
    deep = cfg.stages * (2 if order == DEEP else 1)
    return cost.simulate_messages(times, in_flight=deep).makespan


@runs.measured
def run(cfg: Config, ctx: "runs.Context") -> dict[str, Any]:
    """Measures all orders in turns; leaves those of the last draw as `timeline.png`.

    Raises:
      ProcessLost: a process has died or hangs.
      HpcjaxError: a stage did other work than the schedule's.
    """
    from hpcjax.runs import curves, spans_and_fields

    found = runs.in_processes(
        cfg.find_factory(), cfg, cfg.stages, patience=cfg.patience
    )
    seconds, simulated, idle = np.zeros((3, len(ORDERS), cfg.draws))
    bars = {}
    for (at, order), draw in itertools.product(enumerate(ORDERS), range(cfg.draws)):
        spans = [own["spans"][order][draw] for own in found]
        begin, end, idle[at, draw] = measure(spans)
        seconds[at, draw] = end - begin
        simulated[at, draw] = simulate(cfg, order, draw)
        bars[order] = _bars(spans, begin)
    curves.save(
        spans_and_fields.draw_timelines(bars), ctx.directory.path / "timeline.png"
    )
    far = {
        name: np.array(
            [np.max([own[name][order] for own in found]) for order in ORDERS]
        )
        for name in ("distance", "summed")
    }
    return {"seconds": seconds, "simulated": simulated, "idle": idle, **far}


def measure(spans: Sequence[Sequence[Sequence[Any]]]) -> tuple[float, float, float]:
    """Returns begin and end of a batch, and the mean share that a stage idles.

    Args:
      spans: of each stage, its ops' start, end, kind and micro-batch.
    """
    begin = min(row[0][0] for row in spans)
    end = max(row[-1][1] for row in spans)
    busy = sum(op[1] - op[0] for row in spans for op in row)
    return begin, end, 1 - busy / (len(spans) * (end - begin))


def _bars(
    spans: Sequence[Sequence[Sequence[Any]]], begin: float
) -> tuple["cost.Bar", ...]:
    return tuple(
        cost.Bar(stage, 1e3 * (start - begin), 1e3 * (end - begin), kind, str(number))
        for stage, row in enumerate(spans)
        for start, end, kind, number in row
    )
