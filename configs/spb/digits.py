"""Partial backpropagation on 8×8 digits, ResNet-8, 8 workers; about 1 min a run.

Expect: k = 4 ends within a point of the whole backward pass's validation error, mean of
three seeds, at equal steps (`hpcjax table spb/quality`).
"""

import dataclasses

from experiments.spb.experiment import Config
from hpcjax.models.config import ResNetConfig
from hpcjax.optim.config import SgdConfig
from hpcjax.train.config import TrainConfig

base = Config(
    model=ResNetConfig(depth=8, width=8),
    optimizer=SgdConfig(lr=0.1, momentum=0.9, weight_decay=1e-4),
    k=4,
    workers=8,
    train=TrainConfig(steps=300, batch_size=128, eval_every=50),
)
full = dataclasses.replace(base, k=1)
fixed = dataclasses.replace(base, rotation="fixed")
wrong_divisor = dataclasses.replace(base, method="wrong_divisor")
random_freezing = dataclasses.replace(base, method="random_freezing")
smoke = {
    "train.steps": "2",
    "train.batch_size": "16",
    "model.width": "2",
    "workers": "4",
}
