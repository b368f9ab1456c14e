"""Jorge and SGD on a character language model of the King James Bible; 1 min a run.

Needs `hpcjax data fetch kjv`. Two Transformer blocks of width 32, 32 characters, 4,000
steps: as many as SGD's tuned schedule needs to be one that falls.
Expect: see `hpcjax table jorge/steps`.
"""

import dataclasses

from configs.jorge import digits
from hpcjax.data import CharTextConfig
from hpcjax.models import CausalLmConfig
from hpcjax.train.config import TrainConfig

needs = ("kjv",)

sgd = dataclasses.replace(
    digits.sgd,
    dataset=CharTextConfig(corpus="kjv", context=32, validation=0.01),
    model=CausalLmConfig(depth=2, width=32, heads=2),
    train=TrainConfig(steps=4000, batch_size=32, eval_every=100),
)
adamw = dataclasses.replace(sgd, optimizer=digits.adamw.optimizer)
BLOCKS = ("^blocks/",)  # stacked on axis 0
SHAMPOO = dataclasses.replace(digits.SHAMPOO, stacked=BLOCKS)
shampoo = dataclasses.replace(sgd, optimizer=SHAMPOO)
JORGE = dataclasses.replace(digits.JORGE, stacked=BLOCKS)
jorge = dataclasses.replace(sgd, optimizer=JORGE)
base = jorge
