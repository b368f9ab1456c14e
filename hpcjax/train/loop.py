"""The training loop: one for every system, one device or many."""

import collections
import logging
import time
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import Mesh

from hpcjax import data
from hpcjax.core import per_device
from hpcjax.core.errors import ConfigError
from hpcjax.sharding.mesh import data_axes, place_batch
from hpcjax.train.checkpoint import Checkpoints
from hpcjax.train.config import TrainConfig
from hpcjax.train.guards import SkipGuard, StopRequest
from hpcjax.train.recorder import Recorder
from hpcjax.train.state import TrainState, init_state, state_shapes
from hpcjax.train.step import NONFINITE, STOP, eval_step, guarded, train_step
from hpcjax.train.stopwatch import Stopwatch
from hpcjax.train.task import Task
from hpcjax.train.watchdog import Watchdog

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
    watchdog: Watchdog | None = None,
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
      watchdog: told of every step and validation batch, so that it can end a run that
        stands still.

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
    watch = Stopwatch(recorder.rewind(start), began, watchdog)
    validate = validator(task, config, mesh, watch)
    batches = own_batches(task, config, seed)
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
        for number, batch in zip(numbers, watch.waiting(iterator, start), strict=False):
            placed = place_batch({**batch, **request.flags()}, mesh)
            if number == start + 1:
                step, seconds = compile_step(step, state, placed)
                watch.start()
                spent = {"compile_seconds": seconds, **watch.spent()}
                recorder.write({"step": start, **spent})
            state, metrics = step(state, placed)
            pending.append((number, metrics))
            last = number == config.steps
            emit(keep=0 if last else 1)  # step n runs while n - 1 is fetched
            if last or number % config.eval_every == 0:
                emit(keep=0)
                with watch.paused("validation"):
                    scores = validate(state, number)
                recorder.write({"step": number, **watch.spent()})
                recorder.write({"step": number, "seconds": watch.read(), **scores})
            stopping = bool(request.signal) and not last
            if checkpoints and (stopping or due(number, config)):
                emit(keep=0)
                with watch.paused("checkpoint"):
                    checkpoints.save(number, state, {"seconds": watch.read()})
            if stopping or last:
                emit(keep=0)
                break
            if checkpoints and due(number, config):
                recorder.write({"step": number, **watch.spent()})
    done = int(state.step)
    if checkpoints:
        with watch.paused("checkpoint"):
            checkpoints.wait()
        if done > start:
            recorder.write({"step": done, **watch.spent()})
    if request.signal and done < config.steps:
        raise request.error(done)
    return state


def own_batches(task: Task, config: TrainConfig, seed: int) -> data.Batches:
    """Returns this process's rows of the training batches."""
    return data.batches(
        task.dataset.train,
        config.batch_size,
        seed,
        augment=task.augment,
        shard=(jax.process_index(), jax.process_count()),
    )


def compile_step(
    step: Any, state: TrainState, batch: Any
) -> tuple[Callable[..., Any], float]:
    """Compiles the step for exactly these shapes; also returns how long that took."""
    began = time.perf_counter()
    compiled = step.lower(state, batch).compile()
    return compiled, time.perf_counter() - began


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
    axes = data_axes(mesh)
    devices = per_device.axis_size(mesh, axes)
    if config.batch_size % devices:
        raise ConfigError(
            f"batch_size must divide by the {devices} devices of axes {axes}: "
            f"got {config.batch_size}"
        )


def validator(
    task: Task, config: TrainConfig, mesh: Mesh, watch: Stopwatch
) -> Callable[[TrainState, int], dict[str, float]]:
    """Returns a function giving the means over the whole validation set, `val_` names.

    It takes the state, and the step that this is after.

    Sums are added in float64 on the host, so they do not depend on the batch size
    beyond float32 rounding within a batch.
    """
    score = eval_step(task, mesh)
    shard = (jax.process_index(), jax.process_count())

    def validate(state: TrainState, step: int) -> dict[str, float]:
        sums: dict[str, float] = collections.defaultdict(float)
        count = 0.0
        whole = data.whole(task.dataset.validation, config.batch_size, shard=shard)
        for batch in watch.validating(whole, step):
            totals = jax.device_get(
                score(state.params, state.model_state, place_batch(batch, mesh))
            )
            count += float(totals.count)
            for name, value in totals.sums.items():
                sums[name] += float(value)
        return {f"val_{name}": total / count for name, total in sums.items()}

    return validate
