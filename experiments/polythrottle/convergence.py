"""How near 15 trials come to the least energy, by how points are chosen; simulated."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar, NamedTuple

import numpy as np

from experiments.polythrottle import workloads
from experiments.polythrottle.simulator import Measured, Simulated
from experiments.polythrottle.workloads import Network
from hpcjax import bo, cost, runs
from hpcjax.core import config

NEAR, TOLERANCE, PENALTY = 0.05, 1.03, 4.0
STRATEGIES = ("constrained", "random", "GPU clock", "penalty", "unconstrained")
SCALED = ("peak", "bandwidth", "idle_w", "gpu_w", "mem_w", "cpu_w", "launch_s")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A device, networks and objectives.

    Attributes:
      device: whose clocks are searched.
      models: networks that are served.
      slacks: objectives, over the latency at the greatest clocks of one query.
      draws: of each, with seeds of their own.
      budget: trials.
      batches: that may be chosen.
      scaled: draws every constant of the device between half and twice its value.
      seed: of all draws.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "models": "[efficientnet_b0]",
        "slacks": "[3.0]",
        "draws": "1",
        "budget": "7",
        "batches": "[1,2]",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "excess": "strategy model slack draw: true energy over that of the grid's best",
        "feasible": "strategy model slack draw: whether latency is within it",
        "breaking": "strategy model slack draw: trials measured beyond it",
        "best": "strategy model slack draw trial: excess so far; infinity is 10",
        "map": "model gpu_mhz mem_mhz: joules of a query",
    }

    device: cost.DevicePower
    models: tuple[Network, ...] = (
        *("resnet50", "bert_base", "efficientnet_b0", "efficientnet_b4"),
    )
    slacks: tuple[config.Positive, ...] = (1.5, 2.0, 3.0)
    draws: config.Size = 3
    budget: config.Several = 15
    batches: tuple[config.Size, ...] = (1, 2, 4, 8, 16, 32)
    scaled: bool = False
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {
            "strategy": STRATEGIES,
            "model": self.models,
            "slack": self.slacks,
            "draw": range(self.draws),
            "trial": range(1, self.budget + 1),
            "gpu_mhz": self.device.gpu_mhz,
            "mem_mhz": self.device.mem_mhz,
        }


class Case(NamedTuple):
    """What is searched once.

    Attributes:
      device: with noise of its own.
      joules: of all points of its grid, without noise, and
      seconds: latencies.
      objective: seconds.
      seed: of the strategy.
    """

    device: Simulated
    joules: np.ndarray
    seconds: np.ndarray
    objective: float
    seed: int


def run(cfg: Config, ctx: "runs.Context | None") -> "runs.Dataset":
    """Searches every case by every strategy."""
    dims = "strategy", "model", "slack", "draw"
    shape = (*map(len, (STRATEGIES, cfg.models, cfg.slacks)), cfg.draws)
    columns = {name: np.empty(shape) for name in ("excess", "feasible", "breaking")}
    best = np.empty((*shape, cfg.budget))
    for place in np.ndindex(shape):
        strategy, model, slack, draw = place
        case = make_case(cfg, cfg.models[model], cfg.slacks[slack], draw, strategy)
        places, measured = STRATEGY[STRATEGIES[strategy]](case, cfg.budget)
        found = judge(case, places, measured, cfg.budget)
        best[place] = found.pop("best")
        for name, value in found.items():
            columns[name][place] = value
        if ctx is not None:
            ctx.record(int(np.ravel_multi_index(place, shape)) + 1)
    labels = (STRATEGIES, cfg.models, cfg.slacks, range(cfg.draws))
    clocks = {"gpu_mhz": cfg.device.gpu_mhz, "mem_mhz": cfg.device.mem_mhz}
    return runs.simulated(
        {
            **{name: (dims, values) for name, values in columns.items()},
            "best": ((*dims, "trial"), best),
            "map": (("model", *clocks), [_map(cfg, model) for model in cfg.models]),
        },
        coords={
            **{dim: list(own) for dim, own in zip(dims, labels, strict=True)},
            "trial": range(1, cfg.budget + 1),
            **{name: list(values) for name, values in clocks.items()},
        },
    )


def make_case(
    cfg: Config, model: Network, slack: float, draw: int, strategy: int
) -> Case:
    """Returns a case; the noise of two strategies differs, and nothing else."""
    device = scale(cfg.device, cfg.seed + draw) if cfg.scaled else cfg.device
    number = cfg.models.index(model)
    noise = (cfg.seed, draw, number, int(100 * slack), strategy)
    made = Simulated(device, workloads.work_of(model), cfg.batches, noise)
    joules, seconds = made.spend_all()
    objective = slack * made.spend(made.start).seconds
    return Case(made, joules, seconds, objective, cfg.seed + draw)


def scale(device: "cost.DevicePower", seed: int) -> "cost.DevicePower":
    """Returns a device with each constant between half and twice its own."""
    factors = 2 ** np.random.default_rng(seed).uniform(-1, 1, len(SCALED))
    pairs = zip(SCALED, factors, strict=True)
    scaled = {name: getattr(device, name) * float(factor) for name, factor in pairs}
    return dataclasses.replace(device, **scaled)


def judge(
    case: Case, places: list[int], measured: list[Measured], budget: int
) -> dict[str, Any]:
    """Returns how good the best measured point is, without noise."""
    within = np.array([each.p95 <= case.objective for each in measured])
    value = np.where(within, [each.joules for each in measured], np.inf)
    least = np.where(case.seconds <= case.objective, case.joules, np.inf).min()
    excess = np.append(case.joules[places] / least - 1, 10.0)
    winners = [
        int(np.argmin(value[:n])) if within[:n].any() else len(places)
        for n in range(1, len(places) + 1)
    ]
    best = np.take(excess, winners)
    last = places[winners[-1]] if within.any() else None
    feasible = last is not None and case.seconds[last] <= TOLERANCE * case.objective
    return {
        "excess": best[-1],
        "feasible": float(feasible),
        "breaking": float((~within).sum()),
        # A search that has measured all it can stays at what it has found.
        "best": np.append(best, np.full(budget - len(best), best[-1])),
    }


def _search(
    case: Case, budget: int, *, penalty: float = 0.0, **options: Any
) -> tuple[list[int], list[Measured]]:
    """Searches, with the objective as a constraint or as a penalty of the value."""
    bounds = {} if penalty else {"p95": case.objective}
    grid, start = case.device.grid, case.device.start
    search = bo.ConstrainedSearch(grid, bounds, case.seed, start=start, **options)
    measured = []
    for _ in range(min(budget, len(grid))):
        point = search.ask()
        found = case.device.measure(point, 1)
        measured.append(found)
        over = max(1.0, found.p95 / case.objective) ** penalty
        search.tell(point, found.joules * over, **dict.fromkeys(bounds, found.p95))
    return [grid.place(point) for point in search.points], measured


def _visit(case: Case, places: list[int]) -> tuple[list[int], list[Measured]]:
    points = map(case.device.grid.point, places)
    return places, [case.device.measure(point, 1) for point in points]


def _random(case: Case, budget: int) -> tuple[list[int], list[Measured]]:
    """Draws points without repeating one, after the same start."""
    grid = case.device.grid
    start = grid.place(case.device.start)
    drawn = np.random.default_rng(case.seed).permutation(len(grid))
    return _visit(case, [start, *drawn[drawn != start].tolist()][:budget])


def _gpu_clock(case: Case, budget: int) -> tuple[list[int], list[Measured]]:
    """Measures the GPU's clocks, from the greatest, with all else at the start."""
    start, grid = case.device.start, case.device.grid
    values = reversed(grid.values["gpu_mhz"])
    places = [grid.place({**start, "gpu_mhz": value}) for value in values]
    return _visit(case, places[:budget])


def _map(cfg: Config, model: Network) -> np.ndarray:
    device = Simulated(cfg.device, workloads.work_of(model), (1,), (0,))
    return device.spend_all()[0].reshape(len(cfg.device.gpu_mhz), -1)


STRATEGY = {
    "constrained": _search,
    "random": _random,
    "GPU clock": _gpu_clock,
    "penalty": lambda case, budget: _search(case, budget, penalty=PENALTY),
    "unconstrained": lambda case, budget: _search(
        case, budget, acquisition=bo.unconstrained_improvement
    ),
}
