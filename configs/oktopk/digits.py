"""VGG-16 of an eighth of the width on digits of 32×32, 8 devices; 2 min on 2 cores.

Each variant exchanges 2 % of the gradient in another way (`:dense` all of it), after 64
dense steps. `hpcjax run oktopk/digits:ok_topk --devices 8` has eight devices; one alone
sparsifies its own gradient.
Expect: the accuracy of Ok-Topk is within one point of the dense exchange's, mean of
three seeds (`oktopk/accuracy`).
"""

import dataclasses

from hpcjax.collectives import (
    DenseConfig,
    GaussianKConfig,
    GTopkConfig,
    OkTopkConfig,
    TopKConfig,
)
from hpcjax.data import DigitsConfig
from hpcjax.models import VggConfig
from hpcjax.optim import CosineConfig, SgdConfig
from hpcjax.runs.training import TrainingConfig
from hpcjax.train.config import TrainConfig

dense = TrainingConfig(
    dataset=DigitsConfig(scale=4),
    model=VggConfig(depth=16, width=8),
    optimizer=SgdConfig(
        lr=0.1, momentum=0.9, weight_decay=1e-4, schedule=CosineConfig()
    ),
    exchange=DenseConfig(),
    train=TrainConfig(steps=240, batch_size=128, eval_every=40),
)
# The paper's VGG, too, begins with dense steps.
SPARSE = {"density": 0.02, "dense_steps": 64}
top_k = dataclasses.replace(dense, exchange=TopKConfig(**SPARSE))
gtopk = dataclasses.replace(dense, exchange=GTopkConfig(**SPARSE))
gaussian_k = dataclasses.replace(dense, exchange=GaussianKConfig(**SPARSE))
ok_topk = dataclasses.replace(dense, exchange=OkTopkConfig(**SPARSE))
base = ok_topk
smoke = {
    "train.steps": "2",
    "train.batch_size": "16",
    "model.depth": "11",
    "model.width": "1",
}
