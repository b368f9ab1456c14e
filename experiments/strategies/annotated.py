"""The peer of ZeRO: one program of `jit`, told the shardings of parameters alone."""

import dataclasses
import pathlib
from typing import Any, NamedTuple

from hpcjax import core, data, runs, sharding
from hpcjax.core import checks
from hpcjax.runs import program


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(program.ProgramConfig):
    """A training run in which the compiler chooses what is sent."""

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "the annotated program is spread by its annotations"
        checks.require(self.parallel is None, rule, parallel=self.parallel)


class State(NamedTuple):
    """The state of the annotated program."""

    params: Any
    opt_state: Any


@runs.simulated
def run(cfg: Config, ctx: "runs.Context") -> "runs.Figures":
    """Reads the peer's program, and takes it beside that of one device."""
    return program.read(cfg, ctx, annotate)


def annotate(
    cfg: program.ProgramConfig, data_root: pathlib.Path, devices: int
) -> program.Step:
    """Returns the peer's step.

    The fully sharded preset of `sharding.parameter_shardings` says where parameters and
    moments are; activations are kept split by rows.
    """
    import jax
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    from hpcjax.train.task import rows_like

    mesh, dataset = sharding.data_mesh(devices), cfg.dataset.load(data_root)
    tx, size = cfg.optimizer.make(cfg.train.steps), cfg.train.batch_size
    model = dataclasses.replace(cfg.model, batch_axis=core.DATA_AXIS)
    model = model.make(dataset.inputs, dataset.outputs, core.Policy())

    def init() -> State:
        params, _ = model.init(core.derive(jax.random.key(cfg.seed), "init"))
        return State(params, tx.init(params))

    def loss(params: Any, batch: Any) -> Any:
        outputs, _ = model.apply(params, {}, batch["x"], train=True)
        return dataset.objective(outputs, batch).means()["loss"]

    def step(state: State, batch: Any) -> tuple[State, Any]:
        value, grads = jax.value_and_grad(loss)(state.params, batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        new = State(optax.apply_updates(state.params, updates), opt_state)
        return new, {"loss": value}

    shapes = jax.eval_shape(init)
    cut = sharding.parameter_shardings(shapes.params, mesh, "fsdp")
    whole = NamedSharding(mesh, PartitionSpec())
    moments = optax.tree.map_params(
        tx,
        lambda _, own: own,
        shapes.opt_state,
        cut,
        transform_non_params=lambda _: whole,
    )
    places = State(cut, moments)
    batch = rows_like(dataset, size)
    rows = NamedSharding(mesh, PartitionSpec(core.DATA_AXIS))
    given = jax.tree.map(
        lambda like, place: jax.ShapeDtypeStruct(
            like.shape, like.dtype, sharding=place
        ),
        (shapes, batch),
        (places, jax.tree.map(lambda _: rows, batch)),
    )
    with jax.set_mesh(mesh):
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(places, whole))
        lowered = jitted.lower(*given)
    return program.Step(
        mesh=mesh,
        state=given[0],
        lowered=lowered,
        compiled=program.compile_lowered(lowered, cfg.taken),
        params=shapes.params,
        start=jax.jit(init, out_shardings=places),
        batches=data.batches(dataset.train, size, cfg.seed),
    )
