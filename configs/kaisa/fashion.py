"""K-FAC, SGD and AdamW on Fashion-MNIST with ResNet-8, batch 512; 30 s a run, 2 cores.

Needs `hpcjax data fetch fashion-mnist`. 10,000 images of 7x7, each pixel the mean of
sixteen, 20 epochs.
Expect: see `hpcjax table kaisa/steps`.
"""

import dataclasses

from configs.kaisa import digits
from hpcjax.data import FashionMnistConfig
from hpcjax.train.config import TrainConfig

needs = ("fashion-mnist",)

sgd = dataclasses.replace(
    digits.sgd,
    dataset=FashionMnistConfig(limit=10_000, validation_limit=2_000, pool=4),
    train=TrainConfig(steps=400, batch_size=512, eval_every=10),
)
adamw = dataclasses.replace(sgd, optimizer=digits.adamw.optimizer)
kfac = dataclasses.replace(sgd, optimizer=digits.KFAC)
base = kfac
