"""What a training step holds and sends when its model is spread over devices."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, NamedTuple

import numpy as np

from hpcjax import core, data, perf, runs, sharding, train
from hpcjax.core import compat, config
from hpcjax.core.parts import Part
from hpcjax.models import CausalLmConfig
from hpcjax.optim import AdamWConfig, SgdConfig
from hpcjax.runs.training import with_stacks

FLOAT = 4  # bytes of a float32


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A language model, spread over the devices of the run in one way.

    Attributes:
      parallel: how; none for data-parallel training, each device with all of it.
      annotated: the peer instead: one program of `jit`, in which only the parameters'
        shardings are given and the compiler chooses what is sent.
      summed: broken on purpose: gradients are summed where they should be averaged.
      model: the network.
      characters: of its vocabulary.
      context: length of a sequence.
      rows: sequences of a batch, over all devices.
      memory: bytes of a device, for the deepest model whose step fits.
      steps: of SGD with momentum, after which parameters are compared.
      seed: of parameters and tokens.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "model.depth": "2",
        "model.width": "16",
        "context": "4",
        "memory": "500000",
        "steps": "2",
    }

    parallel: Annotated[Any, Part("parallel", optional=True)] = None
    annotated: bool = False
    summed: bool = False
    model: CausalLmConfig = CausalLmConfig(depth=6, width=256, heads=4)
    characters: config.Several = 64
    context: config.Several = 8
    rows: config.Size = 8
    memory: config.Size = 2**30
    steps: config.Size = 20
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        core.checks.require(
            not (self.annotated and (self.parallel or self.summed)),
            "the annotated program is spread by its annotations, and not broken",
            parallel=self.parallel,
            summed=self.summed,
        )


def outline(cfg: Config) -> "runs.Outline":
    """Returns the form of a result."""
    names = ("state", "temporaries", "sent", "depth", "distance")
    return runs.outline(dict.fromkeys(names, ""))


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Reads the compiled step of AdamW, and trains by SGD with momentum.

    Returns:
      In units of the parameters' bytes Ψ, of one device: `state`, the arguments of the
      step, and its `temporaries`. What it sends by rings, `sent`, in Ψ (N − 1)/N.
      `depth`, the most blocks of which a step fits into the memory. `distance` of the
      parameters from those of one device, see `_distance`.
    """
    import jax

    devices = ctx.mesh.size
    adam = AdamWConfig(lr=1e-3)
    step = _prepare(cfg, adam, devices).compiled
    share = (devices - 1) / devices or 1.0  # one device sends nothing
    unit = FLOAT * core.trees.num_params(jax.eval_shape(_model(cfg).init, _key(cfg))[0])

    def deepen(depth: int) -> Any:
        model = dataclasses.replace(cfg.model, depth=depth)
        deep = dataclasses.replace(cfg, model=model)
        return _prepare(deep, adam, devices).compiled

    alone = dataclasses.replace(cfg, parallel=None, annotated=False, summed=False)
    sgd = SgdConfig(lr=0.05, momentum=0.9)
    ours, theirs = (
        _prepare(each, sgd, count, quick=False).train(cfg.steps)
        for each, count in ((cfg, devices), (alone, 1))
    )
    return runs.simulated(
        {
            "state": perf.argument_memory(step) / unit,
            "temporaries": perf.temporary_memory(step) / unit,
            "sent": perf.ring_bytes(step, devices) / (share * unit),
            "depth": perf.largest_model(deepen, cfg.memory),
            "distance": _distance(ours, theirs),
        }
    )


def _distance(ours: Any, theirs: Any) -> float:
    """Returns the largest ‖a − b‖ / (‖b‖ + √size / 10) of two trees' arrays.

    It is at most 10⁻⁵ where ‖a − b‖ ≤ 10⁻⁵ ‖b‖ + 10⁻⁶ √size: rounding of biases that
    are nearly zero counts by their size.
    """
    leaves = (core.trees.flatten(tree).values() for tree in (ours, theirs))
    return max(
        float(np.linalg.norm(a - b) / (np.linalg.norm(b) + 0.1 * np.sqrt(b.size)))
        for a, b in zip(*leaves, strict=True)
    )


class Prepared(NamedTuple):
    """A compiled step, and `train(steps)`, which returns the parameters after some."""

    compiled: Any
    train: Callable[[int], Any]


def _prepare(cfg: Config, optimizer: Any, devices: int, quick: bool = True) -> Prepared:
    """Compiles a step; quickly, if it is only read."""
    import jax

    make = _annotate if cfg.annotated else _compose
    lowered, start = make(cfg, optimizer, devices)
    options = compat.quick_compilation(jax.default_backend()) if quick else {}
    compiled = lowered.compile(compiler_options=options)

    def train_some(steps: int) -> Any:
        state, batch = start()
        for _ in range(steps):
            state, _ = compiled(state, batch)
        return jax.device_get(state.params)

    return Prepared(compiled, train_some)


def _model(cfg: Config) -> Any:
    return cfg.model.make((cfg.context,), cfg.characters, core.Policy())


def _key(cfg: Config) -> Any:
    import jax

    return jax.random.key(cfg.seed)


def _dataset(cfg: Config) -> Any:
    return data.noise_tokens(cfg.rows, cfg.context, cfg.characters, seed=cfg.seed)


def _batch(cfg: Config) -> Any:
    return _dataset(cfg).train.gather(np.arange(cfg.rows))


def _compose(cfg: Config, optimizer: Any, devices: int) -> tuple[Any, Any]:
    """Returns the step of the training loop, lowered, and what makes its arguments."""
    model, dataset = _model(cfg), _dataset(cfg)
    parallel = with_stacks(cfg.parallel, cfg.model.stacks)
    method = train.compose(
        model,
        dataset,
        optimizer,
        parallel=parallel,
        batch_size=cfg.rows,
        steps=cfg.steps,
        devices=devices,
    )
    if cfg.summed:
        method = method._replace(gradients=_sum(method.gradients, devices))
    task = train.supervised(model, method, dataset)
    mesh = task.mesh(devices)
    state = train.state_shapes(task, mesh)
    step = train.train_step(task, mesh, state)

    def start() -> Any:
        return (
            train.init_state(task, cfg.seed, mesh),
            sharding.place_batch(_batch(cfg), mesh),
        )

    return step.lower(state, train.batch_shapes(task, cfg.rows, mesh)), start


def _sum(gradients: Any, devices: int) -> Any:
    """Returns a backward pass whose gradients' mean over devices is their sum."""

    def summed(*args: Any) -> Any:
        import jax

        found = gradients(*args)
        grads = jax.tree.map(lambda g: g * devices, found.grads)
        return found._replace(grads=grads)

    return summed


class State(NamedTuple):
    """The state of the annotated program."""

    params: Any
    opt_state: Any


def _annotate(cfg: Config, optimizer: Any, devices: int) -> tuple[Any, Any]:
    """Returns the peer's step, as `_compose` does ours.

    The fully sharded preset of `sharding.parameter_shardings` says where parameters and
    moments are; activations are kept split by rows.
    """
    import jax
    import optax
    from jax.sharding import NamedSharding, PartitionSpec

    mesh = sharding.data_mesh(devices)
    tx, dataset = optimizer.make(cfg.steps), _dataset(cfg)
    model = dataclasses.replace(cfg.model, batch_axis=core.DATA_AXIS)
    model = model.make((cfg.context,), cfg.characters, core.Policy())

    def init() -> State:
        params, _ = model.init(core.derive(_key(cfg), "init"))
        return State(params, tx.init(params))

    def loss(params: Any, batch: Any) -> Any:
        outputs, _ = model.apply(params, {}, batch["x"], train=True)
        return dataset.objective(outputs, batch).means()["loss"]

    def step(state: State, batch: Any) -> tuple[State, Any]:
        value, grads = jax.value_and_grad(loss)(state.params, batch)
        updates, opt_state = tx.update(grads, state.opt_state, state.params)
        return State(optax.apply_updates(state.params, updates), opt_state), value

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
    rows = NamedSharding(mesh, PartitionSpec(core.DATA_AXIS))
    given = jax.tree.map(
        lambda like, place: jax.ShapeDtypeStruct(
            like.shape, like.dtype, sharding=place
        ),
        (shapes, _batch(cfg)),
        (places, dict.fromkeys(("x", "y"), rows)),
    )
    with jax.set_mesh(mesh):
        jitted = jax.jit(step, donate_argnums=0, out_shardings=(places, whole))
        lowered = jitted.lower(*given)

    def start() -> Any:
        return (
            jax.jit(init, out_shardings=places)(),
            sharding.place_batch(_batch(cfg), mesh),
        )

    return lowered, start
