"""ResNet-8 with shared weights on Fashion-MNIST of 14×14; 30 s a run on 2 cores.

Needs `hpcjax data fetch fashion-mnist`. 10,000 images, each pixel the mean of four.
`:unshared` has its own kernels; `sharing.budget` is the share of their 74,512 weights
that all layers have together.
Expect: with a quarter of the weights the error is within 2 points of the unshared
network's; with a twentieth it is below that of a narrower network of as many
parameters (`hpcjax table ssn/fashion`).
"""

import dataclasses

from hpcjax.compress import SharingConfig
from hpcjax.data import FashionMnistConfig
from hpcjax.models import ResNetConfig
from hpcjax.optim import CosineConfig, SgdConfig
from hpcjax.runs.training import TrainingConfig
from hpcjax.train.config import TrainConfig

needs = ("fashion-mnist",)

unshared = TrainingConfig(
    dataset=FashionMnistConfig(limit=10_000, validation_limit=2_000, pool=2),
    model=ResNetConfig(depth=8, width=16),
    optimizer=SgdConfig(lr=0.1, momentum=0.9, schedule=CosineConfig()),
    train=TrainConfig(steps=400, batch_size=128, eval_every=100),
)
shared = dataclasses.replace(unshared, sharing=SharingConfig())
base = shared
