"""The interface between the training loop and a training method.

The loop handles models, data, checkpoints and records, and names no method. In a step
each device differentiates its part of the batch and turns the result into an update; a
`Method` says how. It is composed of parts that do not depend on each other: an
optimizer's transform, whose chain contains the mean of gradients over devices; a
backward pass (`Gradients`); workers that average their models.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

import optax
from jax.sharding import PartitionSpec
from jaxtyping import Array, Float

from hpcjax.core import checks, per_device
from hpcjax.core.keys import BatchKey
from hpcjax.core.model import Model
from hpcjax.core.shards import Specs

# A batch is split over both axes. Devices along the data axis hold the same model,
# those along the worker axis may hold different ones (methods of the room `averaging`).
WORKER_AXIS = "worker"
DATA_AXIS = "data"

Batch = Mapping[str, Any]


class Totals(NamedTuple):
    """Sums over the scored items of a batch; those of its parts can be added.

    Attributes:
      sums: one float32 scalar for each metric; training minimizes `"loss"`.
      count: the number of scored items, float32.
    """

    sums: dict[str, Float[Array, ""]]
    count: Float[Array, ""]

    def means(self) -> dict[str, Float[Array, ""]]:
        """Returns the mean of each metric; NaN where nothing was scored."""
        return {name: total / self.count for name, total in self.sums.items()}


Score = Callable[[Any, Batch], Totals]


class StepInput(NamedTuple):
    """The input of one device's backward pass in one step, inside `shard_map`.

    Attributes:
      model: pure functions `init` and `apply`.
      objective: `(outputs, batch) -> Totals`.
      model_state: running statistics before the step.
      batch: this device's part of the batch.
      key: random key of this step, with the places of this device's rows.
      step: int32, the number of steps taken before.
      axes: the mesh axes that the batch is split over.
      share: what sums over scored items are divided by, see `core.scored.share_out`.
    """

    model: Model
    objective: Score
    model_state: Any
    batch: Batch
    key: BatchKey
    step: Any
    axes: tuple[str, ...]
    share: Float[Array, ""]


class PassResult(NamedTuple):
    """The result of one device's forward and backward pass.

    Attributes:
      grads: gradients of the parameters on this device's part of the batch alone.
      means: the objective's sums over that part by the step's `share`: their mean over
        devices is that of the whole batch.
      model_state: the running statistics after the pass.
      extras: what a transform's `update` gets beside gradients and parameters.
    """

    grads: Any
    means: dict[str, Any]
    model_state: Any
    extras: dict[str, Any]


class Gradients(Protocol):
    """One device's backward pass: `gradients(one_pass, params, state)`."""

    def __call__(self, one_pass: StepInput, params: Any, state: Any) -> PassResult:
        """Differentiates; the optimizer's `state` may say which statistics are due."""
        ...


def _enter(state: Any, batch: Batch, number: int) -> tuple[Any, Batch]:
    """Leaves a state and a batch as they are."""
    del number
    return state, batch


def _keep(state: Any, _: Any = None) -> Any:
    """Leaves a state as it is."""
    return state


def _view(state: Any) -> Callable[[Batch], tuple[Any, Batch]]:
    """Scores all batches with the parameters of a state."""
    return lambda batch: (state.params, batch)


def _see_nothing(state: Any) -> None:
    """Shows gradients nothing of an optimizer's state."""
    del state


def _settle(found: PassResult, seen: Any, unscored: Any) -> PassResult:
    """Leaves averaged gradients as they are."""
    del seen, unscored
    return found


def _is_nowhere(path: str) -> bool:
    """Says of no leaf of an optimizer's state that it lies in the host's memory."""
    del path
    return False


def _tell(number: int) -> dict[str, float]:
    """Tells nothing of a step."""
    del number
    return {}


def _keep_nothing(folder: Any) -> None:
    """Has nothing outside of a state."""
    del folder


class Around(NamedTuple):
    """What a host does around the steps of a run; by default nothing.

    A state is that of the loop, with `step`, `params` and `opt_state`.

    Attributes:
      traced: whether `update` is part of the step's program.
      seen: where it is not, `seen(opt_state)` returns what `gradients` gets of it.
      settle: where it is not, `settle(found, seen, unscored)` returns what `update`
        gets of the averaged gradients of a batch, which may score nothing. It is the
        end of their program, and may add to `extras` `spoiled`, whether the step is to
        be left out.
      on_host: `on_host(path)` says whether a leaf of the optimizer's state lies in the
        host's memory.
      trained: `trained(state)` returns a state, or its shapes, with those leaves as
        shapes that have others while steps are taken than where it is saved.
      start: `start(state, batches)` returns the state in which steps are taken. Called
        before the first step, and to go on after `pause`. Of the `data.Batches` number
        n is what this process gets in step n + 1, for who looks ahead.
      enter: `enter(state, batch, number)` returns state and batch of a step. It fetches
        nothing from the devices, which still take the step before.
      leave: `leave(state, number)` returns the state, once the step is on its way.
      tell: `tell(number)` returns figures of a step for its record, each time once.
      view: `view(state)` returns a function of the batches of a validation, which
        returns the parameters that score a batch, and the batch as they take it.
      pause: `pause(state)` returns it as it can be saved. Called after the last step
        too, which is validated then.
      rank: of this process among those that share a batch with models of their own.
      size: how many these are.
      least: `least(number)` returns the least number that one of them has given; all
        call it alike, and none between `start` and `pause`.
      open: `open(folder)` says where the checkpoints lie, beside which is to be what is
        kept outside of the state; None without any. Called before all others.
      mark: `mark()` returns JSON values that are saved with the state that `pause` has
        returned, by which what is kept outside is found again. It stays as it is until
        the next `start`.
      check: `check(saved)` is given what was saved with a state, and raises
        DataFormatError if what it says of is lost. The last one that passes is that of
        the state with which the run goes on.
      score: `score(state, batches)` yields the `Totals` of each batch of a validation,
        and None where it has come on; None for the objective of what the model puts
        out with the parameters of `view`.
      traces: what this process has done between each start and the next pause, after
        the first step of which it tells.
    """

    traced: bool = True
    seen: Callable[[Any], Any] = _see_nothing
    settle: Callable[[PassResult, Any, Any], PassResult] = _settle
    on_host: Callable[[str], bool] = _is_nowhere
    trained: Callable[[Any], Any] = _keep
    start: Callable[[Any, Any], Any] = _keep
    enter: Callable[[Any, Batch, int], tuple[Any, Batch]] = _enter
    leave: Callable[[Any, int], Any] = _keep
    tell: Callable[[int], dict[str, float]] = _tell
    view: Callable[[Any], Callable[[Batch], tuple[Any, Batch]]] = _view
    pause: Callable[[Any], Any] = _keep
    rank: int = 0
    size: int = 1
    least: Callable[[int], int] = lambda number: number
    open: Callable[[Any], None] = _keep_nothing
    mark: Callable[[], dict[str, Any]] = dict
    check: Callable[[Mapping[str, Any]], None] = _keep_nothing
    score: Callable[[Any, Iterable[Batch]], Iterable[Totals | None]] | None = None
    traces: Sequence[tuple[int, Any]] = ()


def _replicate(params: Any, state: Any) -> tuple[Any, Any]:
    """Returns specifications by which all is replicated but what is `PerDevice`."""
    return per_device.specs(params), per_device.specs(state)


class Method(NamedTuple):
    """A training method: the functions that the training loop calls.

    `init`, `gradients` and `update` are traced, and the latter two run inside
    `shard_map`, where what is in a `PerDevice`, or cut by `specs`, has the shapes of
    one device.

    Attributes:
      mesh_shape: `mesh_shape(devices)` returns the sizes of the mesh's axes by name.
      init: `init(params)` returns the parameters as the method holds them (in a
        `PerDevice` if they differ between devices) and the method's own state.
      gradients: this device's backward pass.
      update: `update(found, state, params)` returns `(params, state)`, the same on all
        devices except for what is in a `PerDevice`; it does all communication.
      facts: figures of the method that are stored with a run's result.
      around: what the host does around the steps.
      specs: `specs(params, state)` returns a `PartitionSpec` for each leaf of both.
      split: `split(model)` returns the model as it is applied to parameters that are
        cut so.
      batch: how entries of a batch are cut, by key; others are by rows alone.
    """

    mesh_shape: Callable[[int], dict[str, int]]
    init: Callable[[Any], tuple[Any, Any]]
    gradients: Gradients
    update: Callable[[PassResult, Any, Any], tuple[Any, Any]]
    facts: Mapping[str, float] = {}
    around: Around = Around()
    specs: Callable[[Any, Any], tuple[Any, Any]] = _replicate
    split: Callable[[Model], Model] = lambda model: model
    batch: Mapping[str, PartitionSpec] = {}


class RunSeed:
    """The seed of a run, for parts that draw by it: `seed()`.

    It knows whether one has asked, for what is composed without it serves runs of all
    seeds. So a part asks when it is built; in a program it would be too late.
    """

    def __init__(self, value: int) -> None:
        self._value, self._asked, self._closed = value, False, False

    def __call__(self) -> int:
        """Returns the seed.

        Raises:
          RuntimeError: all parts have been built.
        """
        if self._closed:
            raise RuntimeError("a part must ask for the run's seed when it is built")
        self._asked = True
        return self._value

    def close(self) -> bool:
        """Lets nobody ask from now on; returns whether somebody has."""
        self._closed = True
        return self._asked


class RunShape(NamedTuple):
    """The run for which the parts of a method are made.

    Attributes:
      model: the model to train.
      batch: shapes and dtypes of the batch that one worker's model gets.
      steps: number of steps of the run.
      workers: number of workers, each with a model of its own.
      devices: number of devices of each worker, which share its model.
      seed: `seed()` is the run's seed.
      layer_flops: `layer_flops(rows)` returns the operations of each layer's backward
        pass on `rows` examples, in the order of `optim.layers_of_model`; of a stack
        those of one of its layers.
      examples: the data set's training examples, for who asks for their order.
    """

    model: Model
    batch: Batch
    steps: int
    workers: int
    devices: int
    seed: RunSeed
    layer_flops: Callable[[int], tuple[float, ...]]
    examples: Any = None


def take_extra_args(
    **given: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Returns the one transform that is given by its name, which takes any keywords.

    Raises:
      ConfigError: it is none, such as `optax.sgd` without a rate; has its name.

    Examples:
      >>> take_extra_args(inner=optax.sgd(0.1)).init({})
      (EmptyState(), EmptyState())
    """
    checks.require_has("an optax transform", ("init", "update"), **given)
    (transform,) = given.values()
    return optax.with_extra_args_support(transform)


class Optimization(NamedTuple):
    """An optimizer and what it asks of the training loop.

    Attributes:
      tx: the transform of averaged gradients.
      gradients: the optimizer's own backward pass; None for the plain one.
      axes: mesh axes that gradients are to be averaged over.
      mesh_shape: `mesh_shape(devices)` returns the sizes of these axes by name.
      facts: see `Method`.
      begin: what parameters are before the first step, such as those of a network that
        is sparse from the start.
      sent: `sent(state of tx, params)` returns masks of the gradients that the step
        needs, so that an exchange spends nothing on others; None where it needs all.
      clip_norm: the largest norm of all gradients, where `tx` leaves it to the method.
    """

    tx: optax.GradientTransformation
    gradients: Gradients | None = None
    axes: str | tuple[str, ...] = DATA_AXIS
    mesh_shape: Callable[[int], dict[str, int]] = lambda devices: {DATA_AXIS: devices}
    facts: Mapping[str, float] = {}
    begin: Callable[[Any], Any] = lambda params: params
    sent: Callable[[Any, Any], Any] | None = None
    clip_norm: float | None = None


class Backward(NamedTuple):
    """A special backward pass and the averaging that its gradients need.

    Attributes:
      mean: `mean(axes)` returns the transform that averages gradients over mesh axes.
      gradients: the backward pass.
      facts: see `Method`.
    """

    mean: Callable[[Any], optax.GradientTransformation]
    gradients: Gradients
    facts: Mapping[str, float] = {}


class Parallel(NamedTuple):
    """How one model is spread over devices.

    Between steps each device holds its part of every parameter, as `held` says. The
    optimizer works on parts that are cut at least so far, as `stepped` says: gradients,
    moments and updates.

    Attributes:
      mesh_shape: `mesh_shape(devices)` returns the sizes of the mesh's axes by name.
      held: how parameters are cut.
      stepped: how what the optimizer sees is cut.
      split: see `Method`.
      axes: mesh axes that batches are split over, and gradients averaged; none where
        `gradients` returns averaged ones.
      facts: see `Method`.
      gradients: its own backward pass; None for the plain one.
      batch: see `Method`. Where there is any, examples are cut and parameters are not:
        training goes on as with whole examples, over these axes.
    """

    mesh_shape: Callable[[int], dict[str, int]]
    held: Specs
    stepped: Specs
    split: Callable[[Model], Model]
    axes: tuple[str, ...] = (DATA_AXIS,)
    facts: Mapping[str, float] = {}
    gradients: Gradients | None = None
    batch: Mapping[str, PartitionSpec] = {}
