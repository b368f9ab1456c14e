"""A pipeline of two processes, one on each core, with and without K-FAC in its bubbles.

The model is a chain of tanh layers, half of them in each process; the loss is half the
squared error, summed over outputs, mean over rows.
"""

import dataclasses
import functools
import itertools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from hpcjax import cost, hostcomm, perf, runs, sharding
from hpcjax.core import config
from hpcjax.core.errors import HpcjaxError

if TYPE_CHECKING:
    from hpcjax.perf.host_pipeline import Row
    from hpcjax.runs.outlines import Labels

STAGES = 2
MODES = ("without", "filled")
# Float32 against float64: what the two processes made against numpy.
_GRADIENT, _INVERSE = 1e-4, 1e-2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A model in two stages, and how its steps are measured.

    Attributes:
      width: of every layer.
      layers: of each stage.
      rows: examples in a micro-batch.
      micro_batches: N, in a step.
      gate: what an inversion waits for; see `cost.assign`.
      margin: share of its measured time that a task needs besides.
      damping: added to every factor.
      lr: learning rate of the steps.
      steps: measured in a run at least; whole refreshes are.
      warmup: steps at least before these.
      runs: of each kind, in turns.
      repetitions: how often each op is timed before the work is assigned.
      patience: seconds that a process waits for the other one.
      seed: of parameters and data.
    """

    factory: ClassVar[str] = "experiments.pipefisher.stage:work"
    smoke: ClassVar[Mapping[str, str]] = {
        "width": "16",
        "layers": "2",
        "rows": "32",
        "steps": "2",
        "warmup": "1",
        "runs": "2",
        "repetitions": "3",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "utilization": "row run: of the processes",
        "seconds": "row run: of a step, median",
        "cpu": "row run: CPU seconds of a process in a second, the larger one",
        "units": "row run: K-FAC's tasks of a refresh",
        "period": ": steps of a refresh",
        "planned": ": the utilization of the simulation",
    }

    width: config.Size = 256
    layers: config.Size = 8
    rows: config.Size = 3072
    micro_batches: config.Size = 2
    gate: Literal["device", "layer"] = "layer"
    margin: float = 0.05
    damping: config.Positive = 0.03
    lr: float = 0.001
    steps: config.Size = 15
    warmup: config.Size = 2
    runs: config.Size = 5
    repetitions: config.Size = 9
    patience: config.Positive = 60.0
    seed: config.Seed = 0

    def labels(self) -> "Labels":
        """Returns those of the figures' dimensions."""
        return {"row": MODES, "run": self.runs}


def initial(cfg: Config) -> list[np.ndarray]:
    """Returns every layer's kernel, `[width + 1, width]`, the bias its last row."""
    rng = np.random.Generator(np.random.Philox(cfg.seed))
    shape = cfg.width + 1, cfg.width
    return [
        (rng.standard_normal(shape) / np.sqrt(cfg.width)).astype(np.float32)
        for _ in range(STAGES * cfg.layers)
    ]


def batch(cfg: Config) -> tuple[np.ndarray, np.ndarray]:
    """Returns inputs and targets, `[micro_batches, rows, width]`."""
    rng = np.random.Generator(np.random.Philox(cfg.seed + 1))
    shape = cfg.micro_batches, cfg.rows, cfg.width
    inputs = rng.standard_normal(shape, np.float32)
    return inputs, np.tanh(rng.standard_normal(shape, np.float32))


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Measures ops, assigns K-FAC's work to the bubbles, then runs both kinds in turns.

    What the processes did is compared with the schedule, gradients and inverses with
    numpy's; a difference is an error. Leaves the last step's or refresh's measured
    timelines as `timeline.png`.

    Raises:
      ConfigError: fewer than two cores.
      ProcessLost: a process has died or hangs.
      HpcjaxError: the work done was not the schedule's, or not right.
    """
    import xarray as xr

    from hpcjax.runs import curves, spans_and_fields

    found = runs.in_processes(
        cfg.find_factory(),
        cfg,
        STAGES,
        cores=hostcomm.free_cores(STAGES),
        patience=cfg.patience,
    )
    filled = plan(cfg, [own["seconds"] for own in found])
    first, _ = lengths(cfg, filled.period)
    told = {mode: [[r[mode] for r in own["runs"]] for own in found] for mode in MODES}
    table = xr.concat(
        [
            xr.concat(
                [figures_of(filled, each, first) for each in zip(*own, strict=True)],
                dim="run",
            )
            for own in told.values()
        ],
        dim="row",
    ).assign_coords(row=list(MODES))
    busy = table["utilization"].median("run")
    rows = {
        f"{mode}: {busy.sel(row=mode).item():.1%} busy": last_bars(
            filled, [own[-1] for own in told[mode]]
        )
        for mode in MODES
    }
    curves.save(
        spans_and_fields.draw_timelines(rows), ctx.directory.path / "timeline.png"
    )
    return table.assign(period=filled.period, planned=filled.utilization)


def plan(cfg: Config, measured: Sequence[Mapping[str, float]]) -> "cost.FilledSchedule":
    """Returns K-FAC's work in GPipe's bubbles by measured times.

    Args:
      cfg: the sizes.
      measured: of each stage, seconds of `F`, `B` and, such as `curvA 0`, of a task of
        each kind and layer.
    """
    schedule = sharding.gpipe(STAGES, cfg.micro_batches)
    costs = cost.StageCosts(
        t_f=tuple(each["F"] for each in measured),
        t_b=tuple(each["B"] for each in measured),
    )
    layers = [[cost.Layer(cfg.width + 1, cfg.width)] * cfg.layers] * STAGES
    tasks = [
        task._replace(duration=measured[task.stage][f"{task.kind} {task.layer}"])
        for task in cost.kfac_tasks(schedule, layers, cost.KfacCosts(t_curv=1, t_inv=1))
    ]
    timeline = cost.simulate(schedule, costs)
    return cost.assign(timeline, tasks, margin=cfg.margin, gate=cfg.gate)


def lengths(cfg: Config, period: int) -> tuple[int, int]:
    """Returns steps to warm up, and with those that are measured: whole refreshes."""
    warmup, steps = (period * -(-least // period) for least in (cfg.warmup, cfg.steps))
    return warmup, warmup + steps


def rows_of(filled: "cost.FilledSchedule", mode: str) -> "list[list[Row]]":
    """Returns what each process does in each step of a refresh."""
    devices = range(STAGES)
    if mode == "filled":
        return [list(filled.steps(device)) for device in devices]
    return [[filled.timeline.schedule.orders[d]] * filled.period for d in devices]


def ran_of(told: Mapping[str, Any], first: int) -> "list[perf.WorkSpan]":
    """Returns what a process did from step `first` on."""
    from hpcjax.perf.host_pipeline import work_from_json

    return [
        perf.WorkSpan(step, start, end, work_from_json(work))
        for step, start, end, work in told["ran"]
        if step >= first
    ]


def last_bars(
    filled: "cost.FilledSchedule", told: Sequence[Mapping[str, Any]]
) -> tuple["cost.Bar", ...]:
    """Returns what is drawn of the last refresh; `told` as for `figures_of`."""
    first = len(told[0]["steps"]) - filled.period
    last = [each for own in told for each in ran_of(own, first)]
    return perf.work_bars(last, min(each.start for each in last))


def figures_of(
    filled: "cost.FilledSchedule", told: Sequence[Mapping[str, Any]], first: int
) -> "runs.Dataset":
    """Returns the figures of a run from step `first` on.

    Args:
      filled: the schedule.
      told: what `stage.run` has returned in each process.
      first: step, from 0.
    """
    check_one_thread(told)
    # A step begins where the last process ended the one before.
    ends = np.max([[end for _, end in own["steps"]] for own in told], axis=0)
    ran = [ran_of(own, first) for own in told]
    unplaced = [it.task for it in filled.unplaced]
    share = perf.busy_share(ran, ends[first - 1], ends[-1], without=unplaced)
    units = sum(isinstance(each.work, cost.Task) for own in ran for each in own)
    return runs.measured(
        {
            "utilization": share,
            "seconds": np.median(np.diff(ends[first - 1 :])),
            "cpu": max(own["cpu"] for own in told),
            "units": units / ((len(ends) - first) // filled.period),
        }
    )


def check_one_thread(replies: Sequence[Mapping[str, Any]]) -> None:
    """Raises HpcjaxError unless all threads of each process share a core of its own."""
    cores = [set(map(tuple, reply["cores"])) for reply in replies]
    if any(len(own) != 1 or len(next(iter(own))) != 1 for own in cores) or (
        len(set.union(*cores)) != len(cores)
    ):
        raise HpcjaxError(f"each process must have a core: got {cores}")


def check_gradients(cfg: Config, stage: int, arrays: Mapping[str, np.ndarray]) -> None:
    """Compares a stage's gradients of the first step with those without a pipeline.

    Raises:
      HpcjaxError: they differ.
    """
    wanted = gradients(cfg)[stage * cfg.layers :][: cfg.layers]
    for layer, grad in enumerate(wanted):
        name = f"gradient of layer {layer} of stage {stage}"
        _compare(name, arrays[f"grad {layer}"], grad, _GRADIENT)


@functools.cache
def gradients(cfg: Config) -> list[np.ndarray]:
    """Returns gradients of the whole batch at the initial parameters, in float64."""
    kernels = [kernel.astype(np.float64) for kernel in initial(cfg)]
    x, target = (each.reshape(-1, cfg.width).astype(np.float64) for each in batch(cfg))
    inputs = []
    for kernel in kernels:
        inputs.append(np.hstack([x, np.ones((len(x), 1))]))
        x = np.tanh(inputs[-1] @ kernel)
    found, error, output = [], (x - target) / len(x), x
    for kernel, given in zip(kernels[::-1], inputs[::-1], strict=True):
        error = error * (1 - output**2)
        found.append(given.T @ error)
        error, output = error @ kernel[:-1].T, given[:, :-1]
    return found[::-1]


def check_inverses(cfg: Config, arrays: Mapping[str, np.ndarray]) -> None:
    """Compares the inverses in use with numpy's of the curvature that was accumulated.

    Raises:
      HpcjaxError: they differ.
    """
    for side, layer in itertools.product("AB", range(cfg.layers)):
        factor = arrays[f"curvature {side} {layer}"].astype(np.float64)
        wanted = np.linalg.inv(factor + cfg.damping * np.eye(len(factor)))
        found = arrays[f"inverse {side} {layer}"]
        _compare(f"inverse of {side} of layer {layer}", found, wanted, _INVERSE)


def _compare(name: str, found: np.ndarray, wanted: np.ndarray, most: float) -> None:
    far = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
    if not far <= most:
        raise HpcjaxError(f"{name}: relative difference {far:.1e} above {most:.0e}")
