"""The training loop: one for every system, one device or many."""

import collections
import functools
import logging
import time
from collections.abc import Callable, Hashable, Mapping
from typing import Any, Self

import jax
import numpy as np
from jax.sharding import Mesh

from hpcjax import data, optim
from hpcjax.core import per_device, trees
from hpcjax.core.errors import CheckpointCorrupt, ConfigError
from hpcjax.core.method import Around
from hpcjax.sharding.mesh import row_axes
from hpcjax.train.checkpoint import Checkpoints, Restored
from hpcjax.train.config import TrainConfig
from hpcjax.train.guards import SkipGuard, StopRequest
from hpcjax.train.host_step import compile_host_step
from hpcjax.train.recorder import Recorder, check, mark
from hpcjax.train.state import TrainState, init_state, state_shapes
from hpcjax.train.step import (
    NONFINITE,
    STOP,
    UNSCORED,
    list_guarded,
    train_step,
)
from hpcjax.train.stopwatch import Stopwatch
from hpcjax.train.task import Task
from hpcjax.train.validation import make_validator
from hpcjax.train.watchdog import Watchdog

log = logging.getLogger(__name__)

MOST_SHAPES = 12


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

    It continues from the newest checkpoint that can be verified and has all of its
    records, if there is one. On one platform the records of all steps are then bitwise
    those of an uninterrupted run.

    Args:
      task: model, method, objective and data.
      config: length, batch size and intervals.
      seed: of parameters, data order and all draws.
      mesh: devices; its data axes must divide `config.batch_size`.
      recorder: receives `{"step", "seconds", metric: value}` per step, and
        `{"step", "seconds", "val_" + metric: value}` per validation. `seconds` is
        training time without validation, checkpoints and compilation. A step is
        compiled for each shape of a batch, of which `shapes` tells: before the first
        one if the data set knows them, else when such a batch comes.
        If it is a `DurableRecorder`, its records are made durable with each checkpoint,
        and a run goes on only with the records that its checkpoint was saved with.
      checkpoints: where to save; None saves nothing.
      stop: is called at every step, and returns the number of a signal that asks this
        process to stop, or 0. All processes then save and stop after the same step.
      watchdog: is told of every step and validation batch, so that it can end a run
        that hangs.

    Raises:
      ConfigError: the batch cannot be divided, batches have more than 12 shapes, or
        the checkpoint is of a later step than `config.steps`.
      DataFormatError: no checkpoint has the records with which it was saved.
      Diverged: `config.max_skipped` consecutive steps gave non-finite numbers.
      Preempted: `stop` gave a signal; Interrupted for SIGINT.
    """
    began = time.perf_counter()
    task = accumulating(task, config, mesh)
    state, start, extra = resume(task, config, seed, mesh, checkpoints, recorder)
    watch = Stopwatch(recorder.rewind(start), began, watchdog)
    validate = make_validator(task, config, mesh, watch)
    around, stream = task.method.around, local_batches(task, config, seed)
    guard = SkipGuard(list_guarded(state), config.max_skipped, extra.get("skips", 0))
    request, numbers = StopRequest(stop, mesh, task), range(start + 1, config.steps + 1)
    steps = Steps(task, mesh, request, watch, recorder).prepare(state, stream)
    pending: collections.deque[tuple[int, Any]] = collections.deque()

    def emit(keep: int) -> None:
        """Records finished steps, but not the newest `keep`, nor waits for those."""
        while len(pending) > keep:
            number, metrics = pending.popleft()
            values = jax.device_get(metrics)
            request.take(values.pop(STOP, None))
            told = guard.check(number, values.pop(NONFINITE), values.pop(UNSCORED))
            scalars = {name: value.item() for name, value in values.items()} | told
            scalars |= around.tell(number)
            recorder.write({"step": number, "seconds": watch.read(), **scalars})

    with open_reader(task, stream, config.steps).iterate(start=start) as iterator:
        for number, batch in watch.time_waiting(iterator, numbers):
            step, seconds = steps.find(state, batch, number)
            if number == start + 1:
                state = begin(around, state, stream, checkpoints)
                recorder.write({"step": start, **steps.told, **watch.start(seconds)})
            with watch.waiting():
                state, entering = around.enter(state, batch, number)
            state, metrics = step(state, request.place(entering))
            state = around.leave(state, number)
            pending.append((number, metrics))
            # Metrics of step n - 1 are fetched while step n runs on the devices.
            emit(keep=1)
            last = bool(request.signal) or number == config.steps
            saving = checkpoints is not None and (last or is_due(number, config))
            if last or saving:
                emit(keep=0)
                with watch.pause("checkpoint"):
                    state = around.pause(state)
            if number == config.steps or number % config.eval_every == 0:
                emit(keep=0)
                scores = validate(state, number)
                recorder.write({"step": number, **watch.take_spent()})
                recorder.write({"step": number, "seconds": watch.read(), **scores})
            if checkpoints and saving:
                save(checkpoints, number, state, watch, guard, recorder, around)
            if last:
                break
            if saving:
                with watch.pause("checkpoint"):
                    state = begin(around, state, stream, checkpoints)
                recorder.write({"step": number, **watch.take_spent()})
    done = int(state.step)
    if checkpoints and done > start:
        wait_for(checkpoints, watch)
        recorder.write({"step": done, **watch.take_spent()})
    if request.signal and done < config.steps:
        raise request.error(done)
    return state


def save(
    checkpoints: Checkpoints,
    step: int,
    state: TrainState,
    watch: Stopwatch,
    guard: SkipGuard,
    recorder: Recorder,
    around: Around,
) -> None:
    """Saves a state, with what the loop itself must know to go on from it."""
    with watch.pause("checkpoint"):
        kept = {
            "seconds": watch.read(),
            "skips": guard.in_a_row,
            "records": mark(recorder),
            **around.mark(),
        }
        checkpoints.save(step, state, kept)


def wait_for(checkpoints: Checkpoints, watch: Stopwatch) -> None:
    """Waits until the last checkpoint is complete on disk."""
    with watch.pause("checkpoint"):
        checkpoints.wait()


def local_batches(task: Task, config: TrainConfig, seed: int) -> data.Batches:
    """Returns this process's rows of the training batches."""
    return data.batches(
        task.dataset.train,
        config.batch_size,
        seed,
        augment=task.dataset.augment,
        shard=own_shard(task),
    )


def open_reader(task: Task, batches: data.Batches, steps: int) -> data.Reader:
    """Returns what reads the training batches of a run of so many steps.

    Raises:
      ConfigError: the data set cannot be read in the way of the task.
    """
    return batches if task.read is None else task.read(batches, steps)


def own_shard(task: Task) -> tuple[int, int]:
    """Returns this process's place among those that share out a batch."""
    around, index, count = task.method.around, jax.process_index(), jax.process_count()
    return around.rank * count + index, around.size * count


def begin(
    around: Around,
    state: TrainState,
    stream: data.Batches,
    checkpoints: Checkpoints | None,
) -> TrainState:
    """Starts what the host does, for the first time or after a pause.

    Processes with models of their own must all have saved by then: one that deletes an
    older checkpoint before others have the newer one would leave none that all have.
    Nor may what is kept outside of the state change before it is saved.
    """
    if checkpoints is not None and (around.size > 1 or around.mark()):
        checkpoints.wait()
    if around.size > 1:
        around.least(int(state.step))
    return around.start(state, stream)


class Steps:
    """The compiled steps of a run, one for each shape of its batches."""

    def __init__(
        self,
        task: Task,
        mesh: Mesh,
        request: StopRequest,
        watch: Stopwatch,
        recorder: Recorder,
    ) -> None:
        self._task, self._mesh, self._request = task, mesh, request
        self._watch, self._recorder = watch, recorder
        self._made: dict[Hashable, Callable[..., Any]] = {}
        self._spent = 0.0  # on compiling before the first batch

    @property
    def told(self) -> dict[str, int]:
        """How many shapes a step has been compiled for, as a record has it."""
        return {"shapes": len(self._made)}

    def prepare(self, state: TrainState, stream: data.Batches) -> Self:
        """Compiles the steps for all shapes of batches that are known before."""
        if batches := stream.shapes():
            if len(batches) > MOST_SHAPES:
                raise _too_many(f"there are {len(batches)}")
            with self._watch.pause("compile"):
                for number, batch in enumerate(batches, 1):
                    self._spent += self._compile(state, batch, number)[1]
        return self

    def find(
        self, state: TrainState, batch: Any, number: int
    ) -> tuple[Callable[..., Any], float]:
        """Returns the step for a batch, and the seconds that compiling took.

        To these count those of all shapes that were known before; it records those of
        others but the first.

        Raises:
          ConfigError: the batch is of one shape too many.
        """
        shape = trees.shapes(batch)
        if shape in self._made:
            spent, self._spent = self._spent, 0.0
            return self._made[shape], spent
        if not self._made:
            return self._compile(state, batch, number)
        with self._watch.pause("compile"):
            found = self._compile(state, batch, number)
        told = {"step": number - 1, "shapes": 1, **self._watch.take_spent()}
        self._recorder.write(told)
        return found

    def _compile(
        self, state: TrainState, batch: Any, number: int
    ) -> tuple[Callable[..., Any], float]:
        if len(self._made) == MOST_SHAPES:
            raise _too_many(f"batch {number} has one more")
        placed = self._request.place(batch)
        step, seconds = compile_step(self._task, self._mesh, state, placed)
        self._made[trees.shapes(batch)] = step
        return step, seconds


def _too_many(found: str) -> ConfigError:
    return ConfigError(
        f"batches may have {MOST_SHAPES} shapes in a run, for each of which a step is "
        f"compiled: {found}; pad to the rungs of a ladder, graphs.Ladder, and of "
        "dataset=sampled_graph begin it higher, by dataset.spare; of "
        "dataset=mixed_sizes name fewer sizes"
    )


def compile_step(
    task: Task, mesh: Mesh, state: TrainState, batch: Any
) -> tuple[Callable[..., Any], float]:
    """Compiles the step for these shapes; returns it and the seconds that took."""
    began = time.perf_counter()
    if not task.method.around.traced:
        step = compile_host_step(task, mesh, batch)
    else:
        state = task.method.around.trained(state)
        key = ("step", mesh, *(trees.signature(tree) for tree in (state, batch)))
        step = task.once(
            key, lambda: train_step(task, mesh, state).lower(state, batch).compile()
        )
    return step, time.perf_counter() - began


def resume(
    task: Task,
    config: TrainConfig,
    seed: int,
    mesh: Mesh,
    checkpoints: Checkpoints | None,
    recorder: Recorder,
) -> tuple[TrainState, int, Mapping[str, Any]]:
    """Returns the newest good checkpoint's state, step and what was saved beside it.

    If there is none, it is a fresh state, 0 and nothing.

    If all checkpoints have lost their manifests or their records, it does not start
    again from step 0: `restore` raises. Workers in processes of their own go on from
    the newest step that all of them have.
    """
    restored = None
    task.method.around.open(checkpoints and checkpoints.directory)
    like = state_shapes(task, mesh)

    def known(saved: Mapping[str, Any]) -> None:
        check(recorder, saved)
        task.method.around.check(saved)  # last, for it gives up what is newer

    if checkpoints is not None and not checkpoints.empty():
        add = functools.partial(add_new, task, seed, mesh)
        restored = checkpoints.restore(like, mesh=mesh, check=known, complete=add)
    if checkpoints is not None:
        newest = 0 if restored is None else restored.step
        common = task.method.around.least(newest)
        if common < newest:
            restored = _restore_common(checkpoints, like, common, mesh, known)
    if restored is None:
        return init_state(task, seed, mesh), 0, {}
    if restored.step > config.steps:
        raise ConfigError(
            f"steps must be at least the {restored.step} that the run has taken: "
            f"got {config.steps}"
        )
    log.info("continuing from step %d", restored.step)
    return restored.state, restored.step, restored.extra


def add_new(
    task: Task, seed: int, mesh: Mesh, saved: Mapping[str, Any]
) -> Mapping[str, Any]:
    """Returns a checkpoint's arrays with what parts of the run add to the network.

    If it has nothing of that, it is of a run without these parts: they begin as drawn,
    as does what the optimizer keeps of each. Its number of steps is the old run's, so
    that Adam does not correct their moments for having begun at zero.
    """
    ours = {
        path
        for path in trees.flatten(state_shapes(task, mesh))
        if {*path.split("/")} & {*task.model.added}
    }
    if not ours or ours & saved.keys():
        return saved
    log.info("the run before had none of %s: they begin as drawn", sorted(ours))
    first = trees.flatten(init_state(task, seed, mesh))
    return {**saved, **{path: np.asarray(first[path]) for path in ours}}


def _restore_common(
    checkpoints: Checkpoints,
    like: TrainState,
    common: int,
    mesh: Mesh,
    known: Callable[[Mapping[str, Any]], None],
) -> Restored | None:
    """Returns the newest state that all workers have, and forgets what came after it.

    The others take these steps again, and what they save then belongs to no state of
    ours from before. Before the first step that all have saved there is none.

    Raises:
      CheckpointCorrupt: all have saved, and one has nothing any more.
    """
    if common:
        restored = checkpoints.restore(like, common, mesh=mesh, check=known)
    elif len(steps := checkpoints.steps()) > 1:
        # Nobody saves a second time before all have saved the first time.
        raise CheckpointCorrupt(
            f"a worker has no checkpoint any more, this one has those of steps {steps}"
        )
    else:
        log.warning("a worker has no checkpoint: all begin again")
        restored = None
    checkpoints.forget_after(common)
    return restored


def accumulating(task: Task, config: TrainConfig, mesh: Mesh) -> Task:
    """Returns a task whose gradients are computed in `config.accumulate` passes.

    Batches of a `data.ShapedSampler` then divide by devices and passes.

    Raises:
      ConfigError: devices or passes do not divide the batch.
    """
    task = aligned(task, check_batch(task, config, mesh) * config.accumulate)
    if config.accumulate == 1:
        return task

    def accumulate() -> Task:
        gradients = optim.accumulate(task.method.gradients, config.accumulate)
        method = task.method._replace(gradients=gradients)
        return task.replace(method=method)

    return task.once(("accumulating", config.accumulate), accumulate)


def aligned(task: Task, multiple: int) -> Task:
    """Returns a task whose batches have a multiple of so many examples."""
    if not isinstance(task.dataset.train, data.ShapedSampler):
        return task

    def align() -> Task:
        train: Any = task.dataset.train.aligned(multiple)
        return task.replace(dataset=task.dataset._replace(train=train))

    return task.once(("aligned", multiple), align)


def is_due(step: int, config: TrainConfig) -> bool:
    """Returns whether a checkpoint is due after `step`; after the last it always is."""
    every = config.checkpoint_every
    return step == config.steps or (every > 0 and step % every == 0)


def check_batch(task: Task, config: TrainConfig, mesh: Mesh) -> int:
    """Returns how many devices share a batch, those of all processes.

    A batch of more examples than there are is told.

    Raises:
      ConfigError: they cannot share it, or there are no examples.
    """
    for what in ("train", "validation"):
        if not len(getattr(task.dataset, what)):
            raise ConfigError(
                f"the data set must hold at least one example for {what}: got none"
            )
    axes, processes = row_axes(mesh), task.method.around.size
    owners = f"{processes} processes" if processes > 1 else f"axes {axes}"
    devices = per_device.axis_size(mesh, axes) * processes
    config.rows(devices, f"devices of {owners}")
    examples = len(task.dataset.train)
    drawn = isinstance(task.dataset.train, data.Sampler)
    if config.batch_size > examples and not drawn:
        log.warning(
            "batch_size=%d is more than the %d examples: a batch holds some more than "
            "once",
            config.batch_size,
            examples,
        )
    return devices
