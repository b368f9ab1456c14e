"""Partial backpropagation on 8×8 digits, ResNet-8, 8 workers; about 1 min a run.

Expect: k = 4 ends within a point of the whole backward pass's validation error, mean of
three seeds, at equal steps (`hpcjax table spb/quality`).
"""

import dataclasses

from hpcjax.models import ResNetConfig
from hpcjax.optim import PartialBackwardConfig, RandomFreezingConfig, SgdConfig
from hpcjax.runs.training import TrainingConfig
from hpcjax.train.config import TrainConfig

SPB = PartialBackwardConfig(k=4, workers=8)
base = TrainingConfig(
    model=ResNetConfig(depth=8, width=8),
    optimizer=SgdConfig(lr=0.1, momentum=0.9, weight_decay=1e-4),
    backward=SPB,
    train=TrainConfig(steps=300, batch_size=128, eval_every=50),
)
full = dataclasses.replace(base, backward=dataclasses.replace(SPB, k=1))
fixed = dataclasses.replace(base, backward=dataclasses.replace(SPB, rotation="fixed"))
random_freezing = dataclasses.replace(
    base, backward=RandomFreezingConfig(k=4, workers=8)
)
smoke = {"backward.workers": "4"}
