"""Training with partial backpropagation, and with what it could be confused with.

All workers are on one device, one after the other; what they compute is what as many
devices would.
"""

import dataclasses
import functools
import pathlib
from typing import TYPE_CHECKING, Any, Literal

from hpcjax import train
from hpcjax.core import checks
from hpcjax.data.config import DigitsConfig
from hpcjax.models.config import MlpConfig, ResNetConfig
from hpcjax.optim.config import SgdConfig
from hpcjax.runs.config import TrainingConfig

if TYPE_CHECKING:
    import optax
    import xarray as xr

    from hpcjax import optim
    from hpcjax.runs.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(TrainingConfig):
    """One training run.

    Attributes:
      dataset: what is learned.
      model: what learns it.
      optimizer: sees the average over workers.
      method: "partial" averages over contributors; "wrong_divisor" over all workers;
        "random_freezing" goes all the way back in every worker, then leaves out blocks
        at random, as many gradients on average as "partial" does.
      k: blocks and roles; 1 is ordinary data parallelism.
      workers: P; each normalises with its own statistics.
      rotation: whether roles move on from worker to worker.
      dense_steps: first steps in which all go all the way back.
      cuts: first layer of each block but the first; empty for equal backward cost.
    """

    dataset: DigitsConfig = DigitsConfig()
    model: ResNetConfig | MlpConfig = ResNetConfig(depth=8, width=8)
    optimizer: SgdConfig = SgdConfig(lr=0.1)
    method: Literal["partial", "wrong_divisor", "random_freezing"] = "partial"
    k: int = 4
    workers: int = 8
    rotation: Literal["rotate", "fixed"] = "rotate"
    dense_steps: int = 0
    cuts: tuple[int, ...] = ()

    def __post_init__(self) -> None:
        super().__post_init__()
        checks.require_count(1, k=self.k, workers=self.workers)
        good = self.workers % self.k == 0
        rule = "workers must be a multiple of k"
        checks.require(good, rule, workers=self.workers, k=self.k)
        fits = len(self.cuts) in (0, self.k - 1)
        checks.require(fits, "cuts must be k - 1 or none", cuts=self.cuts, k=self.k)


@functools.lru_cache(maxsize=4)
def costed_layers(
    model: ResNetConfig | MlpConfig, inputs: tuple[int, ...], outputs: int, rows: int
) -> "tuple[tuple[optim.Layer, ...], tuple[float, ...]]":
    """Returns a model's layers, and the cost of each one's backward pass in FLOPs."""
    import jax
    import jax.numpy as jnp

    from hpcjax import optim, perf

    made = model.make(inputs, outputs)
    params, state = jax.eval_shape(made.init, jax.random.key(0))
    x = jax.ShapeDtypeStruct((rows, *inputs), "float32")

    def loss(params: Any, state: Any, x: Any) -> Any:
        logits, _ = made.apply(params, state, x, train=True)
        return jnp.sum(jax.nn.log_softmax(logits)[:, 0])

    layers = optim.layers_of_model(made, x)
    return layers, perf.backward_flops(loss, layers, params, state, x)


def cut(cfg: Config, inputs: tuple[int, ...], outputs: int) -> "tuple[Any, float]":
    """Returns the blocks, and the mean share of the backward pass that workers do."""
    from hpcjax import optim

    rows = cfg.train.batch_size // cfg.workers
    layers, costs = costed_layers(cfg.model, inputs, outputs, rows)
    cuts = cfg.cuts or optim.partition(costs, cfg.k)
    edges = (*cuts, len(layers))
    reached = [sum(costs[start:]) for start in (0, *cuts)]
    return optim.cut_layers(layers, edges[:-1]), sum(reached) / (cfg.k * sum(costs))


def task(cfg: Config, data_root: pathlib.Path, devices: int = 1) -> "train.Task":
    """Puts data, model, roles and optimizer together.

    Raises:
      ConfigError: the devices do not divide the workers.
    """
    import optax

    from hpcjax import optim

    rule = "devices must divide the workers"
    good = cfg.workers % devices == 0
    checks.require(good, rule, workers=cfg.workers, devices=devices)
    dataset = cfg.dataset.load(data_root)
    model = cfg.model.make(dataset.inputs, dataset.outputs)
    blocks, _ = cut(cfg, dataset.inputs, dataset.outputs)
    optimizer, whole = cfg.optimizer.make(cfg.train.steps), blocks
    if cfg.method == "wrong_divisor":
        shrunk = [number / cfg.k for number in range(1, cfg.k + 1)]
        optimizer = optax.chain(optim.scale_blocks(blocks, shrunk), optimizer)
    elif cfg.method == "random_freezing":
        optimizer = optax.chain(freeze(blocks, cfg.seed), optimizer)
        whole = optim.Blocks((sum(blocks.paths, ()),))
    backward = optim.PartialBackward(
        blocks=whole,
        rotation=cfg.rotation,
        dense_steps=cfg.dense_steps,
        mode="zeros",
        workers=cfg.workers // devices,
    )
    return train.supervised(model, optimizer, dataset, backward=backward)


def freeze(blocks: "optim.Blocks", seed: int) -> "optax.GradientTransformation":
    """Leaves out each block's gradient at random; (k + 1) / 2k of them are kept."""
    import jax
    import jax.numpy as jnp
    import optax

    from hpcjax.core import keys, trees

    number, k = blocks.numbers(), len(blocks.paths)

    def init(params):
        del params
        return optax.EmptyState()

    def update(updates, state, params=None, *, step=0, **extra_args):
        del params, extra_args
        key = keys.derive(jax.random.key(seed), "freeze", step)
        kept = jax.random.bernoulli(key, (k + 1) / (2 * k), (k,))
        masked = {
            path: jnp.where(kept[number[path] - 1], leaf, 0)
            for path, leaf in trees.flatten(updates).items()
        }
        return trees.unflatten(updates, masked), state

    return optax.GradientTransformationExtraArgs(init, update)


def run(cfg: Config, ctx: "Context") -> "xr.Dataset":
    """Trains.

    Returns:
      The history, and `share`: of a whole backward pass, mean over workers.
    """
    history = ctx.train(
        task(cfg, ctx.data_root, ctx.mesh.size), cfg.train, seed=cfg.seed
    )
    dataset = cfg.dataset.load(ctx.data_root)
    _, share = cut(cfg, dataset.inputs, dataset.outputs)
    return history.assign(share=share if cfg.method != "random_freezing" else 1.0)
