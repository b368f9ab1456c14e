"""Jorge and SGD on 10,000 images of Fashion-MNIST, ResNet-8, 30 epochs; 1 min a run.

Needs `hpcjax data fetch fashion-mnist`. In place of the paper's ImageNet; images of
14x14, each pixel the mean of four.
Expect: see `hpcjax table jorge/steps`.
"""

import dataclasses

from configs.jorge import digits
from hpcjax.data import FashionMnistConfig
from hpcjax.train.config import TrainConfig

needs = ("fashion-mnist",)

sgd = dataclasses.replace(
    digits.sgd,
    dataset=FashionMnistConfig(limit=10_000, validation_limit=2_000, pool=2),
    train=TrainConfig(steps=2340, batch_size=128, eval_every=78),
)
adamw = dataclasses.replace(sgd, optimizer=digits.adamw.optimizer)
shampoo = dataclasses.replace(sgd, optimizer=digits.shampoo.optimizer)
jorge = dataclasses.replace(sgd, optimizer=digits.jorge.optimizer)
base = jorge
