"""Stencils that see three places and one; 5 s.

Expect: an error below 0.05 with three places.
"""

import dataclasses

from experiments.waves.waves import StencilConfig, WavesConfig
from hpcjax.optim import SgdConfig
from hpcjax.runs.training import TrainingConfig
from hpcjax.train.config import TrainConfig

three = TrainingConfig(
    dataset=WavesConfig(),
    model=StencilConfig(),
    optimizer=SgdConfig(lr=0.1),
    train=TrainConfig(steps=60, batch_size=16, eval_every=20),
)
one = dataclasses.replace(three, model=StencilConfig(width=1))
base = three
smoke = {"train.steps": "4", "train.batch_size": "8"}
