"""The training loop: one for every system, one device or many."""

import collections
import contextlib
import logging
import signal
import time
from collections.abc import Callable, Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from hpcjax import data
from hpcjax.core.errors import ConfigError, Diverged, Interrupted, Preempted
from hpcjax.sharding.mesh import DATA_AXIS, place_batch
from hpcjax.train.checkpoint import Checkpoints
from hpcjax.train.config import TrainConfig
from hpcjax.train.recorder import Recorder
from hpcjax.train.state import TrainState, init_state, state_shapes
from hpcjax.train.step import NONFINITE, STOP, eval_step, guarded, train_step
from hpcjax.train.task import Task

log = logging.getLogger(__name__)


def fit(
    task: Task,
    config: TrainConfig,
    *,
    seed: int,
    mesh: Mesh,
    recorder: Recorder,
    checkpoints: Checkpoints | None = None,
    stop: Callable[[], int] = lambda: 0,
) -> TrainState:
    """Trains `task` for `config.steps` steps and returns the last state.

    Continues from the newest good checkpoint, if `checkpoints` holds one; on one
    platform the records of every step are then the same bits as without interruption.

    Args:
      task: what is trained.
      config: length, batch size and intervals.
      seed: of parameters, data order and every draw.
      mesh: devices; `config.batch_size` must divide by its data axis.
      recorder: receives `{"step", "seconds", metric: value}` per step, and
        `{"step", "seconds", "val_" + metric: value}` per validation. `seconds` is
        training time: validation, checkpoints and compilation are not in it.
      checkpoints: where to save; None saves nothing.
      stop: asked at every step for the number of a signal that wants this process to
        stop, 0 for none. All processes then stop after the same step, and save.

    Raises:
      ConfigError: the batch cannot be divided, or the checkpoint is of a later step
        than `config.steps`.
      Diverged: `config.max_skipped` consecutive steps gave non-finite numbers.
      Preempted: `stop` gave a signal; Interrupted for SIGINT.
    """
    began = time.perf_counter()
    check_batch(task, config, mesh)
    state, start = resume(task, config, seed, mesh, checkpoints)
    step = train_step(task, mesh, state)
    validate = validator(task, config, mesh)
    watch = Stopwatch(recorder.rewind(start), began)
    batches = data.batches(
        task.dataset.train,
        config.batch_size,
        seed,
        augment=task.augment,
        shard=(jax.process_index(), jax.process_count()),
    )
    guard = SkipGuard(guarded(state), config.max_skipped)
    request = StopRequest(stop, mesh)
    pending: collections.deque[tuple[int, Any]] = collections.deque()

    def emit(keep: int) -> None:
        """Records finished steps; blocks only on those older than the newest `keep`."""
        while len(pending) > keep:
            number, metrics = pending.popleft()
            values = jax.device_get(metrics)
            request.agree(values.pop(STOP, None))
            guard.check(number, values.pop(NONFINITE))
            scalars = {name: value.item() for name, value in values.items()}
            recorder.write({"step": number, "seconds": watch.read(), **scalars})

    with batches.iterate(start=start) as iterator:
        numbers = range(start + 1, config.steps + 1)
        for number, batch in zip(numbers, watch.waiting(iterator), strict=False):
            placed = place_batch({**batch, **request.flags()}, mesh)
            if number == start + 1:
                step = compile_step(step, state, placed, recorder)
                watch.start()
            state, metrics = step(state, placed)
            pending.append((number, metrics))
            last = number == config.steps
            emit(keep=0 if last else 1)  # step n runs while n - 1 is fetched
            if last or number % config.eval_every == 0:
                emit(keep=0)
                with watch.paused("validation"):
                    scores = validate(state)
                recorder.write({"step": number, "seconds": watch.read(), **scores})
            stopping = bool(request.signal) and not last
            if checkpoints and (stopping or due(number, config)):
                emit(keep=0)
                with watch.paused("checkpoint"):
                    checkpoints.save(number, state, {"seconds": watch.read()})
            if stopping or last or due(number, config):
                recorder.write({"step": number, **watch.spent()})
            if stopping:
                break
    if checkpoints:
        checkpoints.wait()
    if request.signal and int(state.step) < config.steps:
        raise request.error(int(state.step))
    return state


def compile_step(
    step: Any, state: TrainState, batch: Any, recorder: Recorder
) -> Callable[..., Any]:
    """Compiles the step for exactly these shapes and records how long that took."""
    began = time.perf_counter()
    compiled = step.lower(state, batch).compile()
    seconds = time.perf_counter() - began
    recorder.write({"step": int(state.step), "compile_seconds": seconds})
    return compiled


def resume(
    task: Task,
    config: TrainConfig,
    seed: int,
    mesh: Mesh,
    checkpoints: Checkpoints | None,
) -> tuple[TrainState, int]:
    """Returns the newest good checkpoint's state and step, or a fresh state and 0.

    A run that has lost all its manifests is not begun anew: `restore` refuses it.
    """
    if checkpoints is None or checkpoints.empty():
        return init_state(task, seed, mesh), 0
    restored = checkpoints.restore(state_shapes(task, mesh), mesh=mesh)
    if restored.step > config.steps:
        raise ConfigError(
            f"steps must be at least the {restored.step} that the run has taken: "
            f"got {config.steps}"
        )
    log.info("continuing from step %d", restored.step)
    return restored.state, restored.step


def due(step: int, config: TrainConfig) -> bool:
    """Says whether a checkpoint is to be written after `step`; the last always is."""
    every = config.checkpoint_every
    return step == config.steps or (every > 0 and step % every == 0)


def check_batch(task: Task, config: TrainConfig, mesh: Mesh) -> None:
    """Raises ConfigError for a batch that devices or data cannot serve."""
    devices = mesh.shape[DATA_AXIS]
    if config.batch_size % devices:
        raise ConfigError(
            f"batch_size must divide by the {devices} devices of axis {DATA_AXIS!r}: "
            f"got {config.batch_size}"
        )


def validator(
    task: Task, config: TrainConfig, mesh: Mesh
) -> Callable[[TrainState], dict[str, float]]:
    """Returns a function giving the means over the whole validation set, `val_` names.

    Sums are added in float64 on the host, so they do not depend on the batch size
    beyond float32 rounding within a batch.
    """
    score = eval_step(task, mesh)
    shard = (jax.process_index(), jax.process_count())

    def validate(state: TrainState) -> dict[str, float]:
        sums: dict[str, float] = collections.defaultdict(float)
        count = 0.0
        whole = data.whole(task.dataset.validation, config.batch_size, shard=shard)
        for batch in whole:
            totals = jax.device_get(
                score(state.params, state.model_state, place_batch(batch, mesh))
            )
            count += float(totals.count)
            for name, value in totals.sums.items():
                sums[name] += float(value)
        return {f"val_{name}": total / count for name, total in sums.items()}

    return validate


class SkipGuard:
    """Counts consecutive steps with non-finite numbers, and stops the run.

    Args:
      names: what the entries of the step's `NONFINITE` stand for.
      limit: how many such steps in a row stop it.
    """

    def __init__(self, names: list[str], limit: int) -> None:
        self.names, self.limit, self.in_a_row = names, limit, 0

    def check(self, step: int, nonfinite: np.ndarray) -> None:
        """Takes the counts of one step; logs the arrays that were hit."""
        if not nonfinite.any():
            self.in_a_row = 0
            return
        self.in_a_row += 1
        hit = [name for name, count in zip(self.names, nonfinite, strict=True) if count]
        log.warning("step %d skipped: not finite: %s", step, hit)
        if self.in_a_row >= self.limit:
            raise Diverged(
                f"{self.limit} consecutive steps gave non-finite numbers, the last "
                f"step {step} in {hit[:5]}; what the checkpoints hold is finite"
            )


class StopRequest:
    """Whether to stop, agreed between processes.

    One process asks its `stop`. Several ask theirs and exchange the answers within the
    step, so that all read the same of the same step; a process that stopped alone would
    leave the others waiting in the next exchange.
    """

    def __init__(self, stop: Callable[[], int], mesh: Mesh) -> None:
        self._stop, self.signal = stop, 0
        self._alone, self._rows = jax.process_count() == 1, len(mesh.local_devices)

    def flags(self) -> dict[str, np.ndarray]:
        """Returns what the batch carries to the other processes."""
        if self._alone:
            return {}
        return {STOP: np.full(self._rows, self._stop(), np.int32)}

    def agree(self, exchanged: np.ndarray | None) -> None:
        """Takes what a step exchanged, if it did."""
        self.signal = self._stop() if exchanged is None else int(exchanged)

    def error(self, step: int) -> Preempted:
        """Returns the error with which a run ends that was stopped after `step`."""
        kind = Interrupted if self.signal == signal.SIGINT else Preempted
        return kind(f"{signal.Signals(self.signal).name}: stopped after step {step}")


class Stopwatch:
    """Seconds of training, and what else the time went into.

    Args:
      seconds: of training in earlier sessions of the run.
      began: when this session began, by `time.perf_counter`.
    """

    def __init__(self, seconds: float, began: float) -> None:
        self._seconds, self._began = seconds, began
        self._started: float | None = None
        self._others: dict[str, float] = collections.defaultdict(float)
        self._told = seconds

    def start(self) -> None:
        """Begins to count; what came before was initialisation."""
        self._started = time.perf_counter()
        self._others.clear()
        self._others["init"] = self._started - self._began

    def read(self) -> float:
        """Returns the seconds of training so far."""
        if self._started is None:
            return self._seconds
        return self._seconds + time.perf_counter() - self._started

    @contextlib.contextmanager
    def paused(self, what: str) -> Iterator[None]:
        """Returns a context whose duration counts as `what` and not as training."""
        self._seconds, self._started = self.read(), None
        began = time.perf_counter()
        try:
            yield
        finally:
            self._started = time.perf_counter()
            self._others[what] += self._started - began

    def waiting(self, batches: Iterator[Any]) -> Iterator[Any]:
        """Yields batches; the time each one takes counts as `data`."""
        while True:
            began = time.perf_counter()
            batch = next(batches, None)
            self._others["data"] += time.perf_counter() - began
            if batch is None:
                return
            yield batch

    def spent(self) -> dict[str, float]:
        """Returns what the time since the last call went into.

        Names are `spent_init_seconds`, `_data_`, `_compute_`, `_validation_` and
        `_checkpoint_`; compute is training without waiting for data.
        """
        now = self.read()
        others, self._others = self._others, collections.defaultdict(float)
        compute = now - self._told - others["data"]
        self._told = now
        return {
            f"spent_{name}_seconds": seconds
            for name, seconds in {**others, "compute": compute}.items()
        }
