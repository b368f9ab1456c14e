"""A perceptron of 5,000 numbers on digits of 8×8, 8 devices; 5 s a run on 2 cores.

Each variant exchanges 2 % of the gradient in another way (`:dense` all of it), from the
first step on. `hpcjax run oktopk/digits:ok_topk --devices 8` has eight devices; one
alone sparsifies its own gradient.
Expect: the accuracy of Ok-Topk is within one point of the dense exchange's, mean of
three seeds, and without residuals it is not (`oktopk/accuracy`).
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
from hpcjax.models import MlpConfig
from hpcjax.optim import CosineConfig, SgdConfig
from hpcjax.runs.training import TrainingConfig
from hpcjax.train.config import TrainConfig

dense = TrainingConfig(
    dataset=DigitsConfig(),
    model=MlpConfig(widths=(64,)),
    optimizer=SgdConfig(lr=0.3, momentum=0.0, schedule=CosineConfig()),
    exchange=DenseConfig(),
    train=TrainConfig(steps=600, batch_size=128, eval_every=100),
)
SPARSE = {"density": 0.02}
top_k = dataclasses.replace(dense, exchange=TopKConfig(**SPARSE))
gtopk = dataclasses.replace(dense, exchange=GTopkConfig(**SPARSE))
gaussian_k = dataclasses.replace(dense, exchange=GaussianKConfig(**SPARSE))
ok_topk = dataclasses.replace(dense, exchange=OkTopkConfig(**SPARSE))
base = ok_topk
