"""Every transform of this room, built at a small size.

`test_contract.py` runs `contract.CHECKS` on each entry of `REGISTRY`.
"""

from functools import partial
from typing import Any

import jax.numpy as jnp
import optax

from hpcjax.collectives import OkTopkConfig, PowerSgdConfig
from hpcjax.core import parts
from hpcjax.core.model import LayerSpec, Model
from hpcjax.optim import contract, kfac, sparsify
from hpcjax.optim._graft import graft
from hpcjax.optim._jorge import scale_by_jorge
from hpcjax.optim._lamb import lamb, scale_by_trust_ratio
from hpcjax.optim._shampoo import scale_by_shampoo
from hpcjax.optim.all_reduce import all_reduce_mean
from hpcjax.optim.exchange import exchange_gradients
from hpcjax.optim.first_order import (
    adagrad,
    adamw,
    clip_global_norm,
    row_adagrad,
    scale_by_momentum,
    scale_by_smoothed_norm,
    sgd,
)
from hpcjax.optim.first_order_config import SgdConfig
from hpcjax.optim.freezing import freeze_at_random
from hpcjax.optim.from_sgd_config import JorgeFromSgdConfig
from hpcjax.optim.full_precision import in_full_precision
from hpcjax.optim.layer_blocks import Blocks
from hpcjax.optim.learning_rates import with_schedule
from hpcjax.optim.partial_backward import (
    PartialBackward,
    contributor_mean,
    scale_blocks,
)
from hpcjax.optim.pipedream import keep_versions
from hpcjax.optim.row_wise import scale_by_adagrad, scale_by_row_adagrad
from hpcjax.optim.schedule_config import CosineConfig
from hpcjax.optim.second_order import jorge, shampoo
from hpcjax.optim.shards import update_shards
from hpcjax.optim.weight_decay import add_weight_decay


def _plan() -> kfac.Plan:
    """Returns the K-FAC plan for the layers of `contract.parameters`."""
    geometry = {"kernel_size": (2, 2), "strides": (1, 1), "dilation": (1, 1)}
    conv = {"inputs": 2, "outputs": 3, "padding": "SAME", **geometry}
    layers = (
        LayerSpec("conv", "conv", conv),
        LayerSpec("dense", "dense", {"inputs": 8, "outputs": 3, "use_bias": False}),
    )
    unused: Any = None
    model = Model(unused, unused, layers)
    return kfac.plan(model, skip=("^(empty|scale)$",))


def _statistics() -> dict[str, Any]:
    """Returns the extra arguments of K-FAC's `update`: statistics of one batch.

    A rank-one matrix plus a positive diagonal is symmetric positive definite, as the
    factors of a real batch are up to the damping.
    """

    def factor(n: int, tilt: float) -> jnp.ndarray:
        column = jnp.linspace(-1.0, tilt, n)
        return jnp.outer(column, column) + jnp.diag(jnp.linspace(0.5, 2.0, n))

    taps = {
        block.path: {"a": factor(block.a, 0.5), "g": factor(block.g, 2.0)}
        for block in _plan().blocks
    }
    return {"taps": taps, "loss_terms": 4}


_VISIBLE = {0: [(0, 0, "A"), (0, 0, "B"), (0, 1, "A")], 1: [(0, 1, "B")]}
_BLOCKS = Blocks((("conv/kernel", "conv/bias"), ("dense/kernel", "empty", "scale")))

REGISTRY = {
    "add_weight_decay": partial(add_weight_decay, 1e-3),
    "adamw": partial(adamw, 0.1),
    "all_reduce_mean": partial(all_reduce_mean),
    "clip_global_norm": partial(clip_global_norm, 1.0),
    "contributor_mean": partial(
        contributor_mean, PartialBackward(blocks=_BLOCKS, mode="zeros", workers=2)
    ),
    "dynamic": partial(sparsify.dynamic, sgd(0.1), steps=100, every=1),
    "exchange_gradients": partial(
        exchange_gradients, OkTopkConfig(density=0.3, tau_prime=2)
    ),
    "exchange_gradients_low_rank": partial(exchange_gradients, PowerSgdConfig(rank=2)),
    "freeze_at_random": partial(freeze_at_random, _BLOCKS, 0),
    "graft": partial(graft, scale_by_momentum(0.5), scale_by_momentum(0.9)),
    "graft_global": partial(
        graft, scale_by_momentum(0.5), scale_by_momentum(0.9), layerwise=False
    ),
    "in_full_precision": partial(in_full_precision, scale_by_momentum()),
    "jorge": partial(jorge, 0.05, update_every=1),
    "jorge_blocks": partial(jorge, 0.05, update_every=2, block_size=4, order=3),
    "jorge_grad_init": partial(jorge, 0.05, update_every=3, init="grad"),
    "jorge_one_sided": partial(jorge, 0.05, update_every=1, max_dim=3, order=1),
    "jorge_symmetrized": partial(jorge, 0.05, update_every=2, symmetrize=True),
    "jorge_from_sgd": lambda: JorgeFromSgdConfig(lr=0.05, update_every=2).make(1000),
    "keep_versions": partial(
        keep_versions,
        {
            path: (2 if path.startswith("conv") else 0,)
            for path in sum(_BLOCKS.paths, ())
        },
    ),
    "lamb": partial(lamb, 0.05),
    "lamb_stacked": partial(lamb, 0.05, clip_norm=1.0, stacked=("kernel|3",)),
    "prune": partial(
        sparsify.prune,
        sgd(0.1),
        distribution=sparsify.Uniform(sparsity=0.5),
        schedule=sparsify.OneShot(),
    ),
    "adagrad": partial(adagrad, 0.05),
    "row_adagrad": partial(row_adagrad, 0.05),
    "scale_blocks": partial(scale_blocks, _BLOCKS, (0.5, 1.0)),
    "scale_by_jorge": partial(scale_by_jorge, update_every=2),
    "scale_by_kfac": partial(kfac.scale_by_kfac, _plan(), inv_update_steps=2),
    "scale_by_momentum": partial(scale_by_momentum),
    "scale_by_pipefisher": partial(kfac.scale_by_pipefisher, _plan(), _VISIBLE),
    "scale_by_adagrad": partial(scale_by_adagrad),
    "scale_by_row_adagrad": partial(scale_by_row_adagrad),
    "scale_by_shampoo": partial(scale_by_shampoo, roots_every=2),
    "scale_by_smoothed_norm": partial(scale_by_smoothed_norm),
    "scale_by_trust_ratio": partial(scale_by_trust_ratio),
    "sgd": partial(sgd, 0.1, weight_decay=1e-4, clip_norm=10.0),
    "sgd_config": lambda: SgdConfig(lr=0.1, schedule=CosineConfig()).make(1000),
    "sgd_smoothed": lambda: SgdConfig(lr=0.1, smooth_norm=0.9).make(1000),
    "sgd_nesterov": partial(sgd, 0.1, nesterov=True),
    "shampoo": partial(shampoo, 0.05, roots_every=2),
    "shampoo_newton": partial(shampoo, 0.05, roots_every=2, root="newton"),
    "shampoo_blocks": partial(shampoo, 0.05, roots_every=2, block_size=4, b2=1.0),
    "update_shards": partial(update_shards, sgd(0.1), {}, axes=None),
    "with_schedule": lambda: with_schedule(sgd, lambda step: 0.1 + 0 * step),
}

# Every optimizer that a training config can name is tested too, with its default
# options, unless it is listed above. Configs with `build`, such as K-FAC's, make more
# than a transform; their transform is in the list under its own name.
for _name, _part in parts.classes("optimizer").items():
    if _name not in REGISTRY and not hasattr(_part, "build"):
        REGISTRY[_name] = partial(lambda part: part().make(1000), _part)

# Transforms that are built for `contract.parameters` and no other tree, with a function
# that returns the extra arguments of their `update`.
EXTRA_ARGS = {
    "contributor_mean": lambda: {"step": 0},
    "freeze_at_random": lambda: {"step": 0},
    "keep_versions": dict,
    "scale_blocks": dict,
    "scale_by_kfac": _statistics,
    "scale_by_pipefisher": _statistics,
}
# Transforms that communicate by themselves: the version to use inside `shard_map`,
# which must give the same updates as the single-device version of `REGISTRY`.
SHARDED = {
    "scale_by_jorge": lambda: optax.chain(
        all_reduce_mean("data"), scale_by_jorge(update_every=2, axis_name="data")
    ),
    "scale_by_shampoo": lambda: optax.chain(
        all_reduce_mean("data"), scale_by_shampoo(roots_every=2, axis_name="data")
    ),
    "scale_by_kfac": lambda: optax.chain(
        all_reduce_mean("data"),
        kfac.scale_by_kfac(_plan(), inv_update_steps=2, axis_name="data"),
    ),
}


def subject(name: str) -> contract.Subject:
    """Returns a transform of the registry and the arguments to test it with."""
    make = REGISTRY[name]
    fixed = name in EXTRA_ARGS
    return contract.Subject(
        make(),
        params=contract.parameters() if fixed else None,
        extra_args=EXTRA_ARGS[name]() if fixed else {},
        sharded=SHARDED[name]() if name in SHARDED else None,
        factory=make if isinstance(make, partial) else None,
    )
