"""EMOS and networks on ensembles of Lorenz's model of 1996, without any file; 5 s.

Expect: the raw ensemble's CRPS is 0.55, EMOS's 7 % less.
"""

import dataclasses

from hpcjax.data import Lorenz96Config
from hpcjax.models import EmosConfig, FieldCnnConfig, PointMlpConfig, RawConfig
from hpcjax.optim import AdamWConfig, CosineConfig
from hpcjax.runs.training import TrainingConfig
from hpcjax.train.config import TrainConfig

emos = TrainingConfig(
    dataset=Lorenz96Config(),
    model=EmosConfig(),
    optimizer=AdamWConfig(lr=0.01, weight_decay=0.0, schedule=CosineConfig()),
    train=TrainConfig(steps=200, batch_size=10, eval_every=100),
)
raw = dataclasses.replace(emos, model=RawConfig())
mlp = dataclasses.replace(emos, model=PointMlpConfig())
lenet = dataclasses.replace(emos, model=FieldCnnConfig())
base = emos
