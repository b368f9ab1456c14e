"""The largest base of a mixture of experts of which a training step fits."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar

from hpcjax import core, cost, data, optim, perf, runs, sharding, train
from hpcjax.core import compat, config
from hpcjax.models import CausalLmConfig, ExpertsConfig, TransformerOptions
from hpcjax.optim import AdamWConfig
from hpcjax.runs.training import with_stacks

if TYPE_CHECKING:
    from jax.stages import Compiled

FLOAT = 4
_EXPERTS = TransformerOptions(experts=ExpertsConfig(count=4, top_k=1, every=2))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A mixture of experts on simulated devices; nothing is run.

    Attributes:
      devices: of all parallelisms.
      tensor: that share a matrix.
      expert: that share out the experts.
      memory: bytes of a device.
      model: the network; its depth is what is looked for, in groups of blocks.
      characters: of its vocabulary.
      context: length of a sequence.
      rows: sequences of a batch.
      gathered: broken: the formula believes that each device has all experts.
      seed: is not used.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "devices": "2",
        "tensor": "1",
        "expert": "2",
        "model.width": "16",
        "context": "4",
        "memory": "300000",
        "rows": "2",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "depth": ": the most blocks of which a step of AdamW fits into the memory",
        "base": ": parameters of that model without experts",
        "held": ": bytes that a device gives the update of two groups of blocks",
        "formula": ": what the formula says of these",
    }

    devices: config.Size = 32
    tensor: config.Size = 1
    expert: config.Size = 4
    memory: config.Positive = 4 * 2.0**30
    model: CausalLmConfig = CausalLmConfig(
        width=1024, heads=8, options=_EXPERTS, remat="collectives"
    )
    characters: config.Several = 64
    context: config.Several = 8
    rows: config.Size = 32
    gathered: bool = False
    seed: config.Seed = 0


@runs.simulated
def run(cfg: Config) -> "runs.Figures":
    """Compiles steps of AdamW of deeper and deeper models.

    The update is given parameters, gradients and state.
    """
    group = cfg.model.group
    most = perf.largest_model(lambda count: _compile_step(cfg, count), cfg.memory)
    plain = dataclasses.replace(cfg.model.options, experts=None)
    base = dataclasses.replace(cfg.model, depth=most * group, options=plain)
    layout = sharding.Layout.of(cfg.devices, cfg.tensor, cfg.expert)
    told = layout._replace(expert=1) if cfg.gathered else layout
    formula = cost.ted_memory(
        _model(cfg, 2),
        told,
        held=2 * FLOAT,
        stepped=2 * FLOAT,
        stacked=cfg.model.stacks,
    )
    return {
        "depth": float(most * group),
        "base": float(core.trees.num_params(_shapes(_make(cfg, base)))),
        "held": float(perf.argument_memory(_compile_update(cfg, layout))),
        "formula": formula,
    }


def _make(cfg: Config, model: CausalLmConfig) -> "core.Model":
    return model.make((cfg.context,), cfg.characters, core.Policy())


def _model(cfg: Config, groups: int) -> "core.Model":
    own = dataclasses.replace(cfg.model, depth=groups * cfg.model.group)
    return _make(cfg, own)


def _shapes(model: "core.Model") -> Any:
    import jax

    return jax.eval_shape(model.init, jax.random.key(0))[0]


def _compile_step(cfg: Config, groups: int) -> "Compiled":
    """Returns the step of training a model of so many groups of blocks."""
    import jax

    model = _model(cfg, groups)
    dataset = data.noise_tokens(cfg.rows, cfg.context, cfg.characters, seed=0)
    parallel = sharding.TedConfig(tensor=cfg.tensor, expert=cfg.expert)
    method = train.compose(
        model,
        dataset,
        AdamWConfig(lr=1e-3),
        parallel=with_stacks(parallel, cfg.model.stacks),
        batch_size=cfg.rows,
        steps=1,
        devices=cfg.devices,
    )
    task = train.supervised(model, method, dataset)
    mesh = task.mesh(cfg.devices)
    state = train.state_shapes(task, mesh)
    shapes = train.batch_shapes(task, cfg.rows, mesh)
    lowered = train.train_step(task, mesh, state).lower(state, shapes)
    options = compat.quick_compilation(jax.default_backend())
    return lowered.compile(compiler_options=options)


def _compile_update(cfg: Config, layout: "sharding.Layout") -> "Compiled":
    """Returns the update of two groups: (gradients, state, parameters) are given."""
    import jax

    from hpcjax.core import shards

    model = _model(cfg, 2)
    shapes = _shapes(model)
    parallel = sharding.spread_experts(model, layout, stacked=cfg.model.stacks)
    mesh = sharding.make_mesh(parallel.mesh_shape(cfg.devices))
    tx = optim.update_shards(
        optim.adamw(1e-3), parallel.stepped, held=parallel.held, axes=parallel.axes
    )
    state = jax.eval_shape(tx.init, shapes)
    of_params = shards.spec_tree(parallel.held, shapes)
    specs = of_params, shards.state_specs(tx, shapes, state, parallel.stepped)

    def update(grads: Any, state: Any, params: Any) -> Any:
        return tx.update(grads, state, params)

    mapped = jax.shard_map(
        update, mesh=mesh, in_specs=(*specs, of_params), out_specs=specs
    )
    return jax.jit(mapped).lower(shapes, state, shapes).compile()
