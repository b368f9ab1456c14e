"""Every transform of the room at a small size, for the contract suite of the tests."""

import functools

from hpcjax.collectives import OkTopkConfig, PowerSgdConfig
from hpcjax.optim._graft import graft
from hpcjax.optim._jorge import scale_by_jorge
from hpcjax.optim._lamb import lamb, scale_by_trust_ratio
from hpcjax.optim._shampoo import scale_by_shampoo
from hpcjax.optim.all_reduce import all_reduce_mean
from hpcjax.optim.config import CosineConfig, JorgeFromSgdConfig, SgdConfig
from hpcjax.optim.exchange import exchange_gradients
from hpcjax.optim.first_order import adamw, clip_global_norm, scale_by_momentum, sgd
from hpcjax.optim.full_precision import in_full_precision
from hpcjax.optim.learning_rates import with_schedule
from hpcjax.optim.second_order import jorge, shampoo
from hpcjax.optim.weight_decay import add_weight_decay

REGISTRY = {
    "add_weight_decay": lambda: add_weight_decay(1e-3),
    "adamw": lambda: adamw(0.1),
    "all_reduce_mean": all_reduce_mean,
    "clip_global_norm": lambda: clip_global_norm(1.0),
    "exchange_gradients": lambda: exchange_gradients(
        OkTopkConfig(density=0.3, tau_prime=2)
    ),
    "exchange_gradients_low_rank": lambda: exchange_gradients(PowerSgdConfig(rank=2)),
    "graft": lambda: graft(scale_by_momentum(0.5), scale_by_momentum(0.9)),
    "graft_global": lambda: graft(
        scale_by_momentum(0.5), scale_by_momentum(0.9), layerwise=False
    ),
    "in_full_precision": lambda: in_full_precision(scale_by_momentum()),
    "jorge": lambda: jorge(0.05, update_every=1),
    "jorge_blocks": lambda: jorge(0.05, update_every=2, block_size=4, order=3),
    "jorge_grad_init": lambda: jorge(0.05, update_every=3, init="grad"),
    "jorge_one_sided": lambda: jorge(0.05, update_every=1, max_dim=3, order=1),
    "jorge_symmetrized": lambda: jorge(0.05, update_every=2, symmetrize=True),
    "jorge_from_sgd": lambda: JorgeFromSgdConfig(lr=0.05, update_every=2).make(1000),
    "lamb": lambda: lamb(0.05),
    "lamb_stacked": lambda: lamb(0.05, clip_norm=1.0, stacked=("kernel|3",)),
    "scale_by_jorge": functools.partial(scale_by_jorge, update_every=2),
    "scale_by_momentum": scale_by_momentum,
    "scale_by_shampoo": functools.partial(scale_by_shampoo, roots_every=2),
    "scale_by_trust_ratio": scale_by_trust_ratio,
    "sgd": lambda: sgd(0.1, weight_decay=1e-4, clip_norm=10.0),
    "sgd_config": lambda: SgdConfig(lr=0.1, schedule=CosineConfig()).make(1000),
    "sgd_nesterov": lambda: sgd(0.1, nesterov=True),
    "shampoo": lambda: shampoo(0.05, roots_every=2),
    "shampoo_newton": lambda: shampoo(0.05, roots_every=2, root="newton"),
    "shampoo_blocks": lambda: shampoo(0.05, roots_every=2, block_size=4, b2=1.0),
    "with_schedule": lambda: with_schedule(sgd, lambda step: 0.1 + 0 * step),
}
