"""What a process of `two_processes` does: the passes of one stage, and its K-FAC."""

import contextlib
import functools
import gc
import os
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from experiments.pipefisher.two_processes import (
    MODES,
    STAGES,
    Config,
    batch,
    check_gradients,
    check_inverses,
    initial,
    lengths,
    plan,
    rows_of,
)
from hpcjax import hostcomm, perf
from hpcjax.cost import FilledSchedule, Task
from hpcjax.cost.kfac_work import side
from hpcjax.hostcomm import Transport
from hpcjax.optim import kfac
from hpcjax.perf.host_pipeline import work_to_json
from hpcjax.sharding import Op, gpipe
from hpcjax.sharding.schedules import Kind

Arrays = list[jax.Array]
SideLayer = tuple[str, int]
_OPTIONS = kfac.KfacOptions(method="inverse")


def forward(kernels: Arrays, x: jax.Array) -> Arrays:
    """Returns the input of every layer, and the output of the last one."""
    kept = [x]
    for kernel in kernels:
        kept.append(jnp.tanh(kept[-1] @ kernel[:-1] + kernel[-1]))
    return kept


def backward(
    kernels: Arrays, kept: Arrays, given: jax.Array, grads: Arrays, ends: frozenset[str]
) -> tuple[Arrays, Arrays, jax.Array | None]:
    """Adds a micro-batch's gradients.

    Args:
      kernels: of the stage.
      kept: what `forward` returned.
      given: gradient of the output; at the last stage the targets.
      grads: what was added up before.
      ends: `"first"`, `"last"`: at which end of the pipeline the stage is.

    Returns:
      Sums of gradients, gradients of each layer's output before the activation, and
      that of the stage's input, None at the first stage.
    """
    rows = given.shape[0]
    error = (kept[-1] - given) / rows if "last" in ends else given
    errors, added = [], []
    for place in reversed(range(len(kernels))):
        error = error * (1 - kept[place + 1] ** 2)
        errors.append(error)
        both = jnp.vstack([kept[place].T @ error, error.sum(0)])
        added.append(grads[place] + both)
        if place or "first" not in ends:
            error = error @ kernels[place][:-1].T
    return added[::-1], errors[::-1], None if "first" in ends else error


def curvature(total: jax.Array, rows: jax.Array, which: str) -> jax.Array:
    """Adds the mean of r rᵀ over rows, of inputs [r; 1] with `which="A"`."""
    if which == "A":
        return total + kfac.Statistic(use_bias=True)(rows, rows)["a"]
    # Of single examples' gradients, not of their share in the mean.
    each = rows * rows.shape[0]
    return total + kfac.Statistic(use_bias=False)(each, each)["g"]


def inverse(total: jax.Array, damping: jax.Array) -> jax.Array:
    """Returns (total + damping·I)⁻¹."""
    factors = {"a": total, "g": total}
    return kfac.decompose(_OPTIONS, factors, damping, ("a",))["inverse_a"]


def update(
    kernels: Arrays, grads: Arrays, inverses: dict[SideLayer, jax.Array], lr: jax.Array
) -> Arrays:
    """Returns kernels after a step along gradients, or A⁻¹ ∇ B⁻¹ with inverses."""
    made = []
    for layer, (kernel, grad) in enumerate(zip(kernels, grads, strict=True)):
        step = grad
        if inverses:
            items = {
                "inverse_a": inverses["A", layer],
                "inverse_g": inverses["B", layer],
            }
            step = kfac.precondition(_OPTIONS, items, grad, 0.0)
        made.append(kernel - lr * step)
    return made


class Stage:
    """Parameters of a stage, its part of the data, and what K-FAC keeps of it."""

    def __init__(self, cfg: Config, stage: int) -> None:
        # Ops run in the thread that calls them, so that they end when they seem to.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
        self.cfg, self.stage = cfg, stage
        inputs, targets = batch(cfg)
        self.inputs = jax.device_put(inputs)
        self.targets = jax.device_put(targets)
        ends = {"first": stage == 0, "last": stage == STAGES - 1}
        chosen = frozenset(name for name, there in ends.items() if there)
        self._forward = jax.jit(forward)
        self._backward = jax.jit(functools.partial(backward, ends=chosen))
        self._curvature = jax.jit(curvature, static_argnames="which")
        self._inverse, self._update = jax.jit(inverse), jax.jit(update)
        shape = cfg.width + 1, cfg.width
        self._no_grads = [jnp.zeros(shape)] * cfg.layers
        self.sides = [(s, layer) for s in "AB" for layer in range(cfg.layers)]
        self.begin(kfac=False)

    def begin(self, *, kfac: bool) -> None:
        """Starts again from the first parameters, with or without K-FAC."""
        cfg, mine = self.cfg, self.stage * self.cfg.layers
        self.kfac = kfac
        self.kernels = [
            jax.device_put(kernel) for kernel in initial(cfg)[mine : mine + cfg.layers]
        ]
        self.kept: dict[int, Arrays] = {}
        # Of the first step of a refresh: rows of micro-batches, what they add up to.
        self.saved: dict[tuple[str, int, int], jax.Array] = {}
        self.totals: dict[SideLayer, jax.Array] = {}
        self.pending: dict[SideLayer, jax.Array] = {}
        self.active: dict[SideLayer, jax.Array] = {}
        self.saving = False
        self.grads = self.first_grads = self._no_grads

    def begin_refresh(self) -> None:
        """Forgets the last refresh's curvature; the coming step's rows are kept."""
        if self.kfac:
            self.saving, self.totals = True, self.zeros()

    def zeros(self) -> dict[SideLayer, jax.Array]:
        """Returns no curvature of every factor."""
        width = self.cfg.width
        sizes = {"A": width + 1, "B": width}
        return {(s, n): jnp.zeros((sizes[s], sizes[s])) for s, n in self.sides}

    def run_op(self, op: Op, received: np.ndarray | None) -> np.ndarray | None:
        """Does a forward or backward pass; returns what another stage needs."""
        m = op.micro_batch
        if op.kind == "F":
            x = self.inputs[m] if received is None else received
            kept = self._forward(self.kernels, x)
            self.kept[m] = jax.block_until_ready(kept)
            self._save("A", m, kept)
            return np.asarray(kept[-1])
        given = self.targets[m] if received is None else received
        made = self._backward(self.kernels, self.kept.pop(m), given, self.grads)
        self.grads, errors, error = jax.block_until_ready(made)
        self._save("B", m, errors)
        return None if error is None else np.asarray(error)

    def run_task(self, task: Task) -> None:
        """Adds a micro-batch's curvature, or inverts."""
        which = side(task.kind)
        if task.kind.startswith("curv"):
            self._add(which, task.layer, task.unit)
        else:
            self._invert(which, task.layer, self.totals, self.pending)

    def flush(self, step: int) -> None:
        """Makes new inverses the ones in use, preconditions and updates."""
        if step == 0:
            self.first_grads = self.grads
            self._refresh_at_once()
        self.active |= self.pending
        self.pending = {}
        # Steps after the first of a refresh save nothing.
        self.saving = False
        rate = self.cfg.lr / self.cfg.micro_batches
        made = self._update(self.kernels, self.grads, self.active, rate)
        self.kernels = jax.block_until_ready(made)
        self.grads = self._no_grads

    def _refresh_at_once(self) -> None:
        if not self.kfac:
            return
        totals, pending = self.totals, self.pending
        self.totals, fresh = self.zeros(), {}
        for which, layer in self.sides:
            for m in range(self.cfg.micro_batches):
                self._add(which, layer, m)
            self._invert(which, layer, self.totals, fresh)
        self.totals, self.pending = totals, fresh | pending

    def _add(self, which: str, layer: int, m: int) -> None:
        rows = self.saved[which, layer, m]
        total = self._curvature(self.totals[which, layer], rows, which)
        self.totals[which, layer] = jax.block_until_ready(total)

    def _invert(
        self,
        which: str,
        layer: int,
        totals: Mapping[SideLayer, jax.Array],
        into: dict[SideLayer, jax.Array],
    ) -> None:
        mean = totals[which, layer] / self.cfg.micro_batches
        made = self._inverse(mean, self.cfg.damping)
        into[which, layer] = jax.block_until_ready(made)

    def _save(self, which: str, m: int, rows: Sequence[jax.Array]) -> None:
        if self.saving:
            for layer in range(self.cfg.layers):
                self.saved[which, layer, m] = rows[layer]

    def arrays(self) -> dict[str, np.ndarray]:
        """Returns parameters, the first step's gradients, curvature and inverses."""
        count = self.cfg.micro_batches
        found = {f"kernel {n}": kernel for n, kernel in enumerate(self.kernels)}
        found |= {f"grad {n}": sums / count for n, sums in enumerate(self.first_grads)}
        for (which, layer), total in self.totals.items():
            found[f"curvature {which} {layer}"] = total / count
        for (which, layer), made in self.active.items():
            found[f"inverse {which} {layer}"] = made
        return {name: np.asarray(array) for name, array in found.items()}


def work(transport: Transport, cfg: Config) -> dict[str, Any]:
    """Measures the ops of a stage, then runs both kinds in turns.

    Returns:
      `seconds` of each kind of op and task, and `runs`: of each what `run` returns, by
      mode.
    """
    stage = Stage(cfg, transport.rank)
    own = measure(stage)
    # All at once, as they will run: memory and caches are shared.
    table = hostcomm.allgather(transport, np.array(list(own.values())))
    filled = plan(cfg, [dict(zip(own, row, strict=True)) for row in table])
    runs = [
        {mode: run(transport, stage, filled, mode) for mode in MODES}
        for _ in range(cfg.runs)
    ]
    return {"seconds": own, "runs": runs}


def measure(stage: Stage) -> dict[str, float]:
    """Returns median seconds of every kind of op and task, alone in this process."""
    cfg, rank = stage.cfg, stage.stage
    stage.begin(kfac=True)
    stage.begin_refresh()
    given = np.asarray(stage.inputs[0])
    ends = {("F", 0), ("B", STAGES - 1)}

    def passing(kind: Kind) -> Callable[[], Any]:
        received = None if (kind, rank) in ends else given
        return lambda: stage.run_op(Op(rank, kind, rank, 0), received)

    forward, once = passing("F"), passing("B")
    forward()
    kept = dict(stage.kept)

    def back() -> Any:
        stage.kept = dict(kept)  # the pass takes them away
        return once()

    back()  # leaves what the tasks need
    thunks: dict[str, Callable[[], Any]] = {"F": forward, "B": back}
    for kind in ("curvA", "curvB", "invA", "invB"):
        for layer in range(cfg.layers):
            task = Task(rank, kind, 0, rank, layer, 0, 0)
            thunks[f"{kind} {layer}"] = functools.partial(stage.run_task, task)
    measured = perf.compare(thunks, "F", repetitions=cfg.repetitions, warmup=1)
    seconds = measured["seconds"].median("repetition")
    return {name: float(seconds.sel(candidate=name)) for name in thunks}


def run(
    transport: Transport, stage: Stage, filled: FilledSchedule, mode: str
) -> dict[str, Any]:
    """Takes the steps of whole refreshes from the first parameters on.

    What was done is compared with the schedule, gradients and inverses with numpy's.

    Returns:
      `ran`, ops and tasks with their times; `steps`, when each began and ended; `cpu`,
      seconds of this process in a second; and `cores` of its threads.

    Raises:
      HpcjaxError: the work done was not the schedule's, or not right.
    """
    cfg, rows = stage.cfg, rows_of(filled, mode)[stage.stage]
    warmup, steps = lengths(cfg, filled.period)
    stage.begin(kfac=mode == "filled")
    pipeline = perf.HostPipeline(
        gpipe(STAGES, cfg.micro_batches),
        transport,
        perf.DeviceWork(
            run_op=stage.run_op, run_task=stage.run_task, flush=stage.flush
        ),
    )
    clocks = 0.0, 0.0
    gc.collect()
    gc.disable()
    for number in range(steps):
        if number == warmup:
            clocks = time.process_time(), time.perf_counter()
        if number % len(rows) == 0:
            stage.begin_refresh()
        pipeline.step(number, rows[number % len(rows)])
    cpu = time.process_time() - clocks[0]
    wall = time.perf_counter() - clocks[1]
    gc.enable()
    perf.check_work(pipeline.spans, rows, steps)
    arrays = stage.arrays()
    check_gradients(cfg, stage.stage, arrays)
    if stage.kfac:
        check_inverses(cfg, arrays)
    return {
        "ran": [[*each[:3], work_to_json(each.work)] for each in pipeline.spans],
        "steps": pipeline.steps,
        "cpu": cpu / wall,
        "cores": cores_of_threads(),
    }


def cores_of_threads() -> list[list[int]]:
    """Returns the cores on which each thread of this process may run."""
    found = []
    for thread in map(int, os.listdir("/proc/self/task")):
        # A thread may end while others are looked at.
        with contextlib.suppress(ProcessLookupError):
            found.append(sorted(os.sched_getaffinity(thread)))
    return found
