"""Heat on a plate of three materials, 32×32: which of three filters applies where.

A quarter of a minute a run on 2 cores. `:smoe` learns three filters and a map of them.
`:cnn` and `:coord_conv` have two convolutions with 16 channels between them, give the
change of a field, and take three times the steps; rates and steps are those of the
least error on the validation part. `:locally_connected` has a filter for each point.
`:end_to_end` trains gates by the task's gradient, `:undamped` lets experts learn
from places that others serve.
Expect: SMoE finds all three stencils, and where each applies; the others do not
(`hpcjax table smoe/heat`).
"""

import dataclasses

from experiments.smoe.heat import Config
from hpcjax.data import HeatConfig
from hpcjax.layers.routing_config import Damping, RoutingLoss
from hpcjax.models import CnnConfig, LocallyConnectedConfig, SmoeConfig
from hpcjax.optim import AdamWConfig, CosineConfig
from hpcjax.train.config import TrainConfig

smoe = Config(
    dataset=HeatConfig(size=32, runs=50, holdout_runs=20, steps=20),
    model=SmoeConfig(
        routing_loss=RoutingLoss(quantile=0.4),
        damping=Damping(quantile=0.9),
        filter_scale=0.06,
        gate_scale=0.1,
    ),
    optimizer=AdamWConfig(lr=0.05, weight_decay=0.0, schedule=CosineConfig()),
    train=TrainConfig(steps=2_000, batch_size=8, eval_every=2_000, checkpoint_every=0),
)
undamped = dataclasses.replace(
    smoe, model=dataclasses.replace(smoe.model, damping=None)
)
end_to_end = dataclasses.replace(
    smoe,
    model=dataclasses.replace(smoe.model, weighted=True, routing_loss=None),
)
cnn = dataclasses.replace(
    smoe,
    model=CnnConfig(widths=(16,), residual=True),
    optimizer=dataclasses.replace(smoe.optimizer, lr=0.003),
    train=dataclasses.replace(smoe.train, steps=6_000, eval_every=6_000),
)
coord_conv = dataclasses.replace(
    cnn, model=dataclasses.replace(cnn.model, coordinates=True)
)
locally_connected = dataclasses.replace(smoe, model=LocallyConnectedConfig())
base = smoe
