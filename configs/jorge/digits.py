"""Jorge, Shampoo, AdamW and SGD on 8×8 digits with ResNet-8; 10 s a run on 2 cores.

Expect: at the same rate Jorge needs fewer steps than SGD to 3 % validation error,
median of twelve seeds (`jorge/quickstart`). With SGD tuned: `jorge/steps`.
"""

import dataclasses

from hpcjax.data import DigitsConfig
from hpcjax.models import ResNetConfig
from hpcjax.optim import (
    AdamWConfig,
    JorgeFromSgdConfig,
    SgdConfig,
    ShampooConfig,
)
from hpcjax.runs.training import TrainingConfig
from hpcjax.train.config import TrainConfig

sgd = TrainingConfig(
    dataset=DigitsConfig(),
    model=ResNetConfig(depth=8, width=8),
    optimizer=SgdConfig(lr=0.1, momentum=0.9, weight_decay=1e-4),
    train=TrainConfig(steps=300, batch_size=128, eval_every=5),
)
adamw = dataclasses.replace(sgd, optimizer=AdamWConfig(lr=3e-3))
SHAMPOO = ShampooConfig(lr=0.1, weight_decay=1e-3, roots_every=1)
shampoo = dataclasses.replace(sgd, optimizer=SHAMPOO)
JORGE = JorgeFromSgdConfig(
    lr=0.1, momentum=0.9, weight_decay=1e-4, update_every=1, init="grad"
)
jorge = dataclasses.replace(sgd, optimizer=JORGE)
base = jorge
