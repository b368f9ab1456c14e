"""VGG-16 of an eighth of the width on Fashion-MNIST, 8 devices; 2 min a run, 2 cores.

Needs `hpcjax data fetch fashion-mnist`. The exchanges of `oktopk/digits`, after 64
dense steps, on 60 000 pictures padded to 32×32, of which 2 000 others are held out.
Expect: the accuracy of Ok-Topk is within one point of the dense exchange's
(`oktopk/fashion`), which one epoch does not reach: 2.3 points below.
"""

import dataclasses

from hpcjax.collectives import (
    DenseConfig,
    GaussianKConfig,
    GTopkConfig,
    OkTopkConfig,
    TopKConfig,
)
from hpcjax.data import FashionMnistConfig
from hpcjax.models import VggConfig
from hpcjax.optim import CosineConfig, SgdConfig
from hpcjax.runs.training import TrainingConfig
from hpcjax.train.config import TrainConfig

needs = ("fashion-mnist",)

dense = TrainingConfig(
    dataset=FashionMnistConfig(pad=2, validation_limit=2000),
    model=VggConfig(depth=16, width=8),
    optimizer=SgdConfig(
        lr=0.1, momentum=0.9, weight_decay=1e-4, schedule=CosineConfig()
    ),
    exchange=DenseConfig(),
    train=TrainConfig(steps=480, batch_size=128, eval_every=120),
)
# The paper's VGG, too, begins with dense steps.
SPARSE = {"density": 0.02, "dense_steps": 64}
top_k = dataclasses.replace(dense, exchange=TopKConfig(**SPARSE))
gtopk = dataclasses.replace(dense, exchange=GTopkConfig(**SPARSE))
gaussian_k = dataclasses.replace(dense, exchange=GaussianKConfig(**SPARSE))
ok_topk = dataclasses.replace(dense, exchange=OkTopkConfig(**SPARSE))
base = ok_topk
