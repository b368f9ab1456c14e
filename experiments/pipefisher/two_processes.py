"""A pipeline of two processes, one on each core, with and without K-FAC in its bubbles.

The model is a chain of tanh layers, half of them in each process; the loss is half the
squared error, summed over outputs, mean over rows.
"""

import dataclasses
import itertools
import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from hpcjax.core import checks
from hpcjax.core.errors import HpcjaxError
from hpcjax.runs.config import check_seed

if TYPE_CHECKING:
    import xarray as xr

    from hpcjax import perf
    from hpcjax.hostcomm.local_processes import LocalProcesses
    from hpcjax.perf.host_pipeline import Ran, Row
    from hpcjax.runs.context import Context

STAGES = 2
MODES = ("without", "filled")
WORKER = "experiments.pipefisher.stage_process"
ROOT = pathlib.Path(__file__).resolve().parents[2]
# Float32 against float64: what the two processes made against numpy.
_GRADIENT, _INVERSE = 1e-4, 1e-2


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A model in two stages, and how its steps are measured.

    Attributes:
      width: of every layer.
      layers: of each stage.
      rows: examples in a micro-batch.
      micro_batches: N, in a step.
      gate: what an inversion waits for; see `perf.assign`.
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

    width: int = 256
    layers: int = 8
    rows: int = 3072
    micro_batches: int = 2
    gate: Literal["device", "layer"] = "layer"
    margin: float = 0.05
    damping: float = 0.03
    lr: float = 0.001
    steps: int = 15
    warmup: int = 2
    runs: int = 5
    repetitions: int = 9
    patience: float = 60.0
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        sizes = ("width", "layers", "rows", "micro_batches", "steps", "warmup", "runs")
        counts = {name: getattr(self, name) for name in (*sizes, "repetitions")}
        checks.require_count(1, **counts)
        checks.require_positive(damping=self.damping, patience=self.patience)


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


def run(cfg: Config, ctx: "Context") -> "xr.Dataset":
    """Measures ops, assigns K-FAC's work to the bubbles, then runs both kinds in turns.

    What the processes did is compared with the schedule, gradients and inverses with
    numpy's; a difference is an error. Leaves the last step's or refresh's measured
    timelines as `timeline.png`.

    Returns:
      `utilization`, `seconds` of a step (median) and `cpu`, CPU seconds of a process in
      a second, the larger one, [row, run]; `units`, K-FAC's tasks of a refresh [row];
      `period` and `planned`, the utilization of the simulation.

    Raises:
      ConfigError: fewer than two cores.
      ProcessLost: a process has died or hangs.
      HpcjaxError: the work done was not the schedule's, or not right.
    """
    import xarray as xr

    from hpcjax import perf
    from hpcjax.hostcomm import local_processes
    from hpcjax.runs import curves

    cores = local_processes.free_cores(STAGES)
    with local_processes.start_processes(
        WORKER, cores, folder=ROOT, patience=cfg.patience
    ) as crew:
        filled = plan(cfg, set_up(cfg, crew))
        replies = [
            {mode: measure(cfg, crew, filled, mode) for mode in MODES}
            for _ in range(cfg.runs)
        ]
    found = {
        mode: xr.concat([reply[mode].figures for reply in replies], dim="run")
        for mode in MODES
    }
    rows = {
        f"{mode}: {found[mode]['utilization'].median().item():.1%} busy": reply.bars
        for mode, reply in replies[-1].items()
    }
    curves.save(perf.draw_timelines(rows), ctx.directory.path / "timeline.png")
    table = xr.concat(list(found.values()), dim="row").assign_coords(row=list(MODES))
    return table.assign(period=filled.period, planned=filled.utilization)


def set_up(cfg: Config, crew: "LocalProcesses") -> list[dict[str, float]]:
    """Gives the processes their stages; returns the measured seconds of their ops."""
    settings = [
        {"config": json.dumps(dataclasses.asdict(cfg)), "stage": stage}
        for stage in range(STAGES)
    ]
    crew.ask("stage", settings)
    # All at once, as they will run: memory and caches are shared.
    return [dict(reply.options) for reply in crew.ask("measure", [{}] * STAGES)]


def plan(cfg: Config, measured: Sequence[Mapping[str, float]]) -> "perf.FilledSchedule":
    """Returns K-FAC's work in GPipe's bubbles by measured times.

    Args:
      cfg: the sizes.
      measured: of each stage, seconds of `F`, `B` and, such as `curvA 0`, of a task of
        each kind and layer.
    """
    from hpcjax import perf, sharding

    schedule = sharding.gpipe(STAGES, cfg.micro_batches)
    costs = perf.StageCosts(
        t_f=tuple(each["F"] for each in measured),
        t_b=tuple(each["B"] for each in measured),
    )
    layers = [[perf.Layer(cfg.width + 1, cfg.width)] * cfg.layers] * STAGES
    tasks = [
        task._replace(duration=measured[task.stage][f"{task.kind} {task.layer}"])
        for task in perf.kfac_tasks(schedule, layers, perf.KfacCosts(t_curv=1, t_inv=1))
    ]
    timeline = perf.simulate(schedule, costs)
    return perf.assign(timeline, tasks, margin=cfg.margin, gate=cfg.gate)


@dataclasses.dataclass(frozen=True)
class Measured:
    """What one run gives: its figures, its bars and what the processes hold."""

    figures: "xr.Dataset"
    bars: tuple["perf.timelines.Bar", ...]
    arrays: tuple[Mapping[str, np.ndarray], ...]


def rows_of(filled: "perf.FilledSchedule", mode: str) -> "list[list[Row]]":
    """Returns what each process does in each step of a refresh."""
    devices = range(STAGES)
    if mode == "filled":
        return [list(filled.steps(device)) for device in devices]
    return [[filled.timeline.schedule.orders[d]] * filled.period for d in devices]


def measure(
    cfg: Config, crew: "LocalProcesses", filled: "perf.FilledSchedule", mode: str
) -> Measured:
    """Runs whole refreshes from the first parameters on, and checks what was done."""
    from hpcjax.perf import host_pipeline

    period = filled.period
    first, count = (period * -(-n // period) for n in (cfg.warmup, cfg.steps))
    rows = rows_of(filled, mode)
    asked = [
        {
            "rows": [[host_pipeline.work_to_json(w) for w in row] for row in own],
            "kfac": mode == "filled",
            "warmup": first,
            "steps": first + count,
        }
        for own in rows
    ]
    replies = crew.ask("run", asked)
    arrays = tuple(reply.arrays for reply in replies)
    ran = [
        [
            host_pipeline.Ran(step, start, end, host_pipeline.work_from_json(work))
            for step, start, end, work in reply.options["ran"]
        ]
        for reply in replies
    ]
    for rank, own in enumerate(ran):
        try:
            host_pipeline.check_work(own, rows[rank], first + count)
        except HpcjaxError as error:
            raise HpcjaxError(f"rank {rank}: {error}") from error
    check_gradients(cfg, arrays)
    if mode == "filled":
        check_inverses(cfg, arrays)
    figures = figures_of(filled, ran, [reply.options for reply in replies], first)
    last = [each for own in ran for each in own if each.step >= first + count - period]
    bars = host_pipeline.ran_bars(last, min(each.start for each in last))
    return Measured(figures, bars, arrays)


def figures_of(
    filled: "perf.FilledSchedule",
    ran: "Sequence[Sequence[Ran]]",
    replies: Sequence[Mapping[str, Any]],
    first: int,
) -> "xr.Dataset":
    """Returns the figures of a run from step `first` on."""
    import xarray as xr

    from hpcjax.perf import Task, host_pipeline

    # A step begins where the last process ended the one before.
    ends = np.max([[end for _, end in reply["steps"]] for reply in replies], axis=0)
    measured = [[each for each in own if each.step >= first] for own in ran]
    unplaced = [it.task for it in filled.unplaced]
    share = host_pipeline.busy_share(
        measured, ends[first - 1], ends[-1], without=unplaced
    )
    units = sum(isinstance(each.work, Task) for own in measured for each in own)
    refreshes = (len(ends) - first) // filled.period
    check_one_thread(replies)
    return xr.Dataset(
        {
            "utilization": share,
            "seconds": np.median(np.diff(ends[first - 1 :])),
            "cpu": max(reply["cpu"] for reply in replies),
            "units": units / refreshes,
        }
    )


def check_one_thread(replies: Sequence[Mapping[str, Any]]) -> None:
    """Raises HpcjaxError unless all threads of each process share a core of its own."""
    cores = [set(map(tuple, reply["cores"])) for reply in replies]
    if any(len(own) != 1 or len(next(iter(own))) != 1 for own in cores) or (
        len(set.union(*cores)) != len(cores)
    ):
        raise HpcjaxError(f"each process must have a core: got {cores}")


def check_gradients(cfg: Config, arrays: Sequence[Mapping[str, np.ndarray]]) -> None:
    """Compares the first step's gradients with those without a pipeline.

    Raises:
      HpcjaxError: they differ.
    """
    grads = [a[f"grad {layer}"] for a in arrays for layer in range(cfg.layers)]
    for layer, (found, wanted) in enumerate(zip(grads, gradients(cfg), strict=True)):
        _compare(f"gradient of layer {layer}", found, wanted, _GRADIENT)


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


def check_inverses(cfg: Config, arrays: Sequence[Mapping[str, np.ndarray]]) -> None:
    """Compares the inverses in use with numpy's of the curvature that was accumulated.

    Raises:
      HpcjaxError: they differ.
    """
    for own, side, layer in itertools.product(arrays, "AB", range(cfg.layers)):
        factor = own[f"curvature {side} {layer}"].astype(np.float64)
        wanted = np.linalg.inv(factor + cfg.damping * np.eye(len(factor)))
        found = own[f"inverse {side} {layer}"]
        _compare(f"inverse of {side} of layer {layer}", found, wanted, _INVERSE)


def _compare(name: str, found: np.ndarray, wanted: np.ndarray, most: float) -> None:
    far = float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))
    if not far <= most:
        raise HpcjaxError(f"{name}: relative difference {far:.1e} above {most:.0e}")
