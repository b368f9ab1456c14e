"""The compiled step of a training config: what it holds, sends and learns.

A row of a table of what spreads a model over devices is a config and its overrides;
what is a system's own it adds by formulas. `hpcjax run --dry-run` reads the same step.
Importing this module imports no JAX.
"""

import contextlib
import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, NamedTuple

import numpy as np

from hpcjax.core import checks, config
from hpcjax.core.errors import ConfigError
from hpcjax.runs import results, training

if TYPE_CHECKING:
    from jax.sharding import Mesh
    from jax.stages import Compiled, Lowered

    from hpcjax import data, perf, train
    from hpcjax.runs.context import Context
    from hpcjax.runs.outlines import Figures, Labels
    from hpcjax.train.config import TrainConfig

KINDS = (
    *("all-reduce", "reduce-scatter", "all-gather", "all-to-all"),
    "collective-permute",
)
AXES = "data", "worker", "depth", "row", "col", "expert", "stage"
SEVERAL = "several"  # the label of what is sent along more than one axis
PARTS = LOOP, REST = "loop", "rest"


@dataclasses.dataclass(frozen=True, kw_only=True)
class ProgramConfig(training.TrainingConfig):
    """A training run whose step is compiled and read, and taken a few times.

    Attributes:
      axes: of meshes, which label what is sent.
      devices: that share the step, simulated or not; 0 for those of the run.
      memory: bytes of a device, for the deepest model of which a step fits; 0 does not
        look for it.
      taken: steps after which loss and parameters are compared with those of one
        device; 0 takes none. Of workers with models of their own nothing is compared.
      broken: `"module:function"`, a context in which the step is made and taken, such
        as one that breaks what is claimed, for a negative control.
    """

    axes: ClassVar[tuple[str, ...]] = AXES

    devices: config.Count = 0
    memory: Annotated[float, config.AtLeast(0.0)] = 0.0
    taken: config.Count = 0
    broken: str = ""

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.memory:
            rule, deep = "memory is that of a model with a depth", vars(self.model)
            checks.require("depth" in deep, rule, memory=self.memory, model=self.model)

    @property
    def figures(self) -> Mapping[str, str]:
        """What is read, and what is asked for besides."""
        of = "axis kind part"
        found = {
            "psi": ": bytes of the whole model's parameters",
            "state temporaries": ": bytes of a device, between steps and besides",
            "sent": f"{of}: bytes that a device sends in a step, by rings",
            "operands": f"{of}: bytes that collectives take, each counted once",
            "arrays asked": f"{of}: that they take, as compiled and as JAX asks for",
            "block": "axis kind: bytes that one turn of the loops sends, by rings",
            "rounds": ": messages that a device sends one after another in a step",
        }
        if self.memory:
            found["depth"] = ": the most blocks of which a step fits into the memory"
        if self.taken:
            found["losses"] = "number: of each step"
            found["loss"] = ": of the last step"
        if self.taken and self.averaging is None:
            found["distance apart"] = ": from one device, of loss and parameters"
        return found

    def labels(self) -> "Labels":
        """Returns what tells collectives apart; a part is what is in a loop or not.

        And the numbers of the steps that are taken.
        """
        apart = {"axis": (*self.axes, SEVERAL), "kind": KINDS, "part": PARTS}
        return {**apart, "number": range(1, self.taken + 1)} if self.taken else apart

    @property
    def uses(self) -> tuple[str, ...]:
        """The functions that a run calls by their names, for its digest."""
        return (self.broken,) if self.broken else ()

    def check_devices(self, devices: int) -> None:
        """Raises ConfigError if so many devices, or its own, cannot share a batch."""
        super().check_devices(self.devices or devices)


class Step(NamedTuple):
    """A training step on some devices.

    Attributes:
      mesh: of the devices.
      state: shapes and shardings of the state.
      lowered: `(state, batch) -> (state, metrics)`, with "loss" among these.
      compiled: the same.
      params: shapes of the whole model's parameters.
      start: returns the first state, with `params`.
      batches: by number.
      cut: how entries of a batch are cut that are not by rows alone.
    """

    mesh: "Mesh"
    state: Any
    lowered: "Lowered"
    compiled: "Compiled"
    params: Any
    start: Callable[[], Any]
    batches: "data.Batches"
    cut: Mapping[str, Any] = {}


Maker = Callable[[ProgramConfig, pathlib.Path, int], Step]


@results.simulated
def run(cfg: ProgramConfig, ctx: "Context") -> "Figures":
    """Reads the step of the training loop, and takes it beside that of one device."""
    return read(cfg, ctx)


def read(cfg: ProgramConfig, ctx: "Context", make: Maker | None = None) -> "Figures":
    """Returns the figures, for experiments that add their own.

    Args:
      cfg: the run.
      ctx: its devices, unless the config says how many, and its data.
      make: `make(cfg, data_root, devices)` returns the step; None for the loop's.

    Raises:
      ConfigError: parts that do not fit each other or the devices, an axis that is not
        among the config's, no context `broken`, or a memory that nothing fits into.
    """
    from hpcjax import perf
    from hpcjax.core import trees

    make, devices = make or compose, cfg.devices or ctx.mesh.size
    with _context(cfg.broken):
        step = make(cfg, ctx.data_root, devices)
        found: dict[str, Any] = {
            "psi": trees.num_bytes(step.params),
            "state": perf.argument_memory(step.compiled),
            "temporaries": perf.temporary_memory(step.compiled),
            **_count(cfg, step),
        }
        if cfg.memory:
            found["depth"] = _find_deepest(cfg, ctx.data_root, devices, make)
        ours = _take(step, cfg.taken) if cfg.taken else ()
    if ours:
        found |= {"losses": np.array(ours[0]), "loss": ours[0][-1]}
    compared = ours and cfg.averaging is None
    return found | (_compare(*ours, *_take_alone(cfg, ctx)) if compared else {})


def compose(cfg: ProgramConfig, data_root: pathlib.Path, devices: int) -> Step:
    """Returns the step of the training loop."""
    from hpcjax.core.method import Around

    task = training.task(cfg, data_root, devices)
    rule = "steps are taken of what no host changes between them"
    plain = task.method.around == Around()
    checks.require(plain or not cfg.taken, rule, taken=cfg.taken)
    mesh = task.mesh(devices)
    return compile_step(task, cfg.train, mesh, cfg.seed, cfg.taken)


def compile_step(
    task: "train.Task",
    config: "TrainConfig",
    mesh: "Mesh",
    seed: int = 0,
    taken: int = 0,
) -> Step:
    """Returns the compiled step of a task; see `compile_lowered`."""
    import jax

    from hpcjax import train
    from hpcjax.train.host_step import lower_gradients
    from hpcjax.train.loop import local_batches

    task = train.accumulating(task, config, mesh)
    state = task.method.around.trained(train.state_shapes(task, mesh))
    batch = train.batch_shapes(task, config.batch_size, mesh)
    if task.method.around.traced:
        lowered = train.train_step(task, mesh, state).lower(state, batch)
    else:
        lowered = lower_gradients(task, mesh, batch)
    return Step(
        mesh=mesh,
        state=state,
        lowered=lowered,
        compiled=compile_lowered(lowered, taken),
        params=jax.eval_shape(task.model.init, jax.random.key(0))[0],
        start=functools.partial(train.init_state, task, seed, mesh),
        batches=local_batches(task, config, seed),
        cut=task.method.batch,
    )


def compile_lowered(lowered: "Lowered", taken: int) -> "Compiled":
    """Compiles a program; quickly if few steps are taken: it sends the same bytes."""
    import jax

    from hpcjax.core import compat

    quick = compat.quick_compilation(jax.default_backend()) if taken < 5 else {}
    return lowered.compile(compiler_options=quick)


def _count(cfg: ProgramConfig, step: Step) -> dict[str, np.ndarray]:
    """Returns what collectives are, by axis, kind and part."""
    from hpcjax import perf

    sizes = [len(cfg.axes) + 1, len(KINDS), len(PARTS)]
    sent, operands, arrays, asked = np.zeros((4, *sizes))
    block, rounds = np.zeros(sizes[:2]), 0
    for at, each, by_rings in _collectives(cfg, step.mesh, step.compiled):
        sent[at] += each.times * by_rings
        operands[at] += each.bytes
        arrays[at] += _count_arrays(each)
        block[at[:2]] += by_rings * (PARTS[at[2]] == LOOP)
        rounds += each.times * perf.ring_rounds(each, step.mesh)
    for at, each, _ in _collectives(cfg, step.mesh, step.lowered):
        asked[at] += _count_arrays(each)
    counted = {"sent": sent, "operands": operands, "arrays": arrays}
    return {**counted, "asked": asked, "block": block, "rounds": np.asarray(rounds)}


def _count_arrays(each: "perf.Collective") -> int:
    """Counts arrays: XLA merges all-reduces, and parts the array of an all-to-all."""
    return each.operands if each.kind == "all-reduce" else 1


def _collectives(
    cfg: ProgramConfig, mesh: "Mesh", program: "Compiled | Lowered"
) -> "Iterator[tuple[tuple[int, int, int], perf.Collective, float]]":
    """Yields (place in the figures, collective, bytes that a device sends by rings).

    Groups of one device send nothing, and are left out.
    """
    from hpcjax import perf

    axes = (*cfg.axes, SEVERAL)
    for each in perf.collectives(program):
        along = perf.axes_of(each, mesh)
        devices = math.prod(mesh.shape[axis] for axis in along)
        if devices > 1:
            axis = along[0] if len(along) == 1 else SEVERAL
            checks.require_choice("axis of the mesh", axis, axes)
            checks.require_choice("kind of a collective", each.kind, KINDS)
            part = LOOP if each.times > 1 or not each.bounded else REST
            place = axes.index(axis), KINDS.index(each.kind), PARTS.index(part)
            yield place, each, each.bytes * perf.sent_per_byte(each.kind, devices)


Taken = tuple[list[float], dict[str, np.ndarray]]


def _take(step: Step, steps: int) -> Taken:
    """Returns the losses of some steps, and parameters after them, by path."""
    import jax

    from hpcjax import sharding
    from hpcjax.core import trees

    state, losses = step.start(), []
    for number in range(steps):
        batch = sharding.place_batch(step.batches[number], step.mesh, step.cut)
        state, metrics = step.compiled(state, batch)
        losses.append(float(metrics["loss"]))
    return losses, trees.flatten(jax.device_get(state.params))


def _take_alone(cfg: ProgramConfig, ctx: "Context") -> Taken:
    """Returns what one device finds by itself, without what belongs to several."""
    given = {f.name: getattr(cfg, f.name) for f in dataclasses.fields(ProgramConfig)}
    given |= {"parallel": None, "exchange": None, "devices": 1, "memory": 0.0}
    return _take_steps(ProgramConfig(**given | {"broken": ""}), ctx.data_root)


@functools.lru_cache(maxsize=1)  # the rows of a table share it
def _take_steps(cfg: ProgramConfig, data_root: pathlib.Path) -> Taken:
    return _take(compose(cfg, data_root, 1), cfg.taken)


def _compare(
    losses: list[float],
    ours: dict[str, Any],
    wanted: list[float],
    theirs: dict[str, Any],
) -> dict[str, Any]:
    """Returns how far the loss and the farthest parameter are from one device's.

    The largest ‖a − b‖ / (‖b‖ + √size / 10): biases near zero count by their size.
    """
    each = [
        np.linalg.norm(ours[p] - b) / (np.linalg.norm(b) + 0.1 * np.sqrt(b.size))
        for p, b in theirs.items()
    ]
    distance = abs(losses[-1] - wanted[-1]) / abs(wanted[-1])
    # NaN if one is, which Python's `max` might pass over.
    return {"distance": distance, "apart": float(np.max(each))}


def _find_deepest(
    cfg: ProgramConfig, data_root: pathlib.Path, devices: int, make: Maker
) -> int:
    """Returns the most blocks of which a step fits, in groups where the model has."""
    from hpcjax import perf

    group = getattr(cfg.model, "group", 1)

    def deepen(groups: int) -> "Compiled":
        model = dataclasses.replace(cfg.model, depth=groups * group)
        deep = dataclasses.replace(cfg, model=model, taken=0)
        return make(deep, data_root, devices).compiled

    try:
        return perf.largest_model(deepen, cfg.memory) * group
    except ConfigError as error:
        fit = ", ".join(_find_fitting(cfg, data_root, devices, make)) or "none"
        raise ConfigError(f"{error}; of ZeRO's stages would fit: {fit}") from error


def _find_fitting(
    cfg: ProgramConfig, data_root: pathlib.Path, devices: int, make: Maker
) -> Iterator[str]:
    """Yields the stages of ZeRO of which a step of the least depth fits."""
    from hpcjax import perf
    from hpcjax.sharding import ZeroConfig

    apart = cfg.averaging or cfg.exchange or cfg.backward
    model = dataclasses.replace(cfg.model, depth=getattr(cfg.model, "group", 1))
    for stage in () if apart or devices == 1 else (1, 2, 3):
        way = ZeroConfig(stage=stage)
        told = dataclasses.replace(cfg, model=model, parallel=way, taken=0)
        if perf.peak_memory(make(told, data_root, devices).compiled) <= cfg.memory:
            yield f"parallel.stage={stage}"


def _context(place: str) -> contextlib.AbstractContextManager[Any]:
    """Returns the context that a config names; one that does nothing by default."""
    try:
        return config.find_function(place or "contextlib:nullcontext")()
    except (ImportError, AttributeError, ValueError) as error:
        raise ConfigError(
            f'broken must be "module:function", a context: got {place!r}, {error}'
        ) from error
