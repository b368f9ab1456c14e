"""The step of a network on samples in blocks, beside the halos of its layers."""

import dataclasses
import pathlib
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar, NamedTuple

from hpcjax import core, data, runs, sharding
from hpcjax.runs import program


class State(NamedTuple):
    """The state of the peer's program."""

    params: Any
    state: Any
    opt_state: Any


AXES = "data", *sharding.SPACE_AXES


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(program.ProgramConfig):
    """A network whose samples are cut in space.

    Attributes:
      annotated: whether the compiler cuts it, told the sharding of samples alone.
    """

    axes: ClassVar[tuple[str, ...]] = AXES

    annotated: bool = False

    @property
    def figures(self) -> Mapping[str, str]:
        """What is read, and what the rule says."""
        return {**super().figures, "rule": ": analytical: bytes of halos in a step"}


@runs.simulated
def run(cfg: Config, ctx: "runs.Context") -> "runs.Figures":
    """Reads the step, and takes it beside one device's."""
    found = program.read(cfg, ctx, annotate if cfg.annotated else None)
    return {**found, "rule": rule(cfg, cfg.devices or ctx.mesh.size)}


def rule(cfg: Config, devices: int) -> int:
    """Returns bytes of halos, of the windows of one device's forward pass.

    Each is exchanged forward, and back its slopes; those of the samples are not wanted.
    What is whole before the first window that blocks do not divide is gathered.
    """
    import jax

    cut = cfg.parallel
    own = cfg.dataset.load(pathlib.Path())
    made = cfg.model.make(own.inputs, own.outputs)
    params, state = jax.eval_shape(made.init, jax.random.key(0))
    rows = cfg.train.batch_size * cut.blocks // devices
    x = jax.ShapeDtypeStruct((rows, *own.inputs), "float32")
    traced = jax.make_jaxpr(lambda p, s, x: made.apply(p, s, x, train=False))
    total = 0
    for number, (shape, *window) in enumerate(_windows(traced(params, state, x).jaxpr)):
        sent = _halos(shape, *window, counts=(cut.height, cut.width))
        if sent is None:
            break
        total += sent * (2 if number else 1)
    return total


def _windows(jaxpr: Any) -> Iterator[tuple[Any, ...]]:
    """Yields shape, kernel, strides and padding of convolutions and pools, in order."""
    for eqn in jaxpr.eqns:
        shape = eqn.invars[0].aval.shape if eqn.invars else ()
        name, told = eqn.primitive.name, eqn.params
        if name == "conv_general_dilated":
            kernel = eqn.invars[1].aval.shape[:2]
            yield shape, kernel, told["window_strides"], told["padding"]
        elif name == "reduce_window_max":
            inner = [told[key][1:-1] for key in ("window_dimensions", "window_strides")]
            yield shape, *inner, told["padding"][1:-1]
        for value in told.values():
            inside = getattr(value, "jaxpr", value)
            if hasattr(inside, "eqns"):
                yield from _windows(inside)


def _halos(
    shape: Any, kernel: Any, strides: Any, padding: Any, counts: tuple[int, ...]
) -> int | None:
    """Returns bytes of halos of one window; None if blocks do not divide it."""
    rows, *sides, channels = shape
    block, total = [side // n for side, n in zip(sides, counts, strict=True)], 0
    for at, count in enumerate(counts):
        if count > 1:
            if block[at] % strides[at]:
                return None
            low = padding[at][0]
            high = kernel[at] - low - strides[at]
            wide = low + max(0, high)
            total += wide * rows * channels * 4 * block[1 - at]
            block[at] += low + high
    return total


def annotate(
    cfg: program.ProgramConfig, data_root: pathlib.Path, devices: int
) -> program.Step:
    """Returns the peer's step: one program of `jit`, told where samples are."""
    import jax
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    from hpcjax.train.task import rows_like

    own, size, cut = cfg.dataset.load(data_root), cfg.train.batch_size, cfg.parallel
    counts = devices // cut.blocks, 1, cut.height, cut.width
    mesh = sharding.make_mesh(dict(zip(AXES, counts, strict=True)))
    model, tx = (
        cfg.model.make(own.inputs, own.outputs),
        cfg.optimizer.make(cfg.train.steps),
    )

    def init() -> Any:
        params, state = model.init(core.derive(jax.random.key(cfg.seed), "init"))
        return State(params, state, tx.init(params))

    def loss(params: Any, state: Any, batch: Any) -> Any:
        outputs, _ = model.apply(params, state, batch["x"], train=True)
        return own.objective(outputs, batch).means()["loss"]

    def step(held: Any, batch: Any) -> Any:
        value, grads = jax.value_and_grad(loss)(held.params, held.state, batch)
        updates, opt_state = tx.update(grads, held.opt_state, held.params)
        new = optax.apply_updates(held.params, updates)
        return held._replace(params=new, opt_state=opt_state), {"loss": value}

    spec = PartitionSpec("data", "space_h", "space_w")
    whole, blocks = NamedSharding(mesh, PartitionSpec()), NamedSharding(mesh, spec)
    batch = rows_like(own, size)
    shapes = jax.eval_shape(init)
    given = jax.tree.map(
        lambda like, place: jax.ShapeDtypeStruct(
            like.shape, like.dtype, sharding=place
        ),
        (shapes, batch),
        (jax.tree.map(lambda _: whole, shapes), dict.fromkeys(batch, blocks)),
    )
    lowered = jax.jit(step, donate_argnums=0, out_shardings=whole).lower(*given)
    return program.Step(
        mesh=mesh,
        state=given[0],
        lowered=lowered,
        compiled=program.compile_lowered(lowered, cfg.taken),
        params=shapes.params,
        start=jax.jit(init, out_shardings=whole),
        batches=data.batches(own.train, size, cfg.seed),
        cut=dict.fromkeys(batch, spec),
    )
