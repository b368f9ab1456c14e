"""A language model of eight blocks, whose step is compiled in every way; 10 s a way.

Expect: state and bytes of the formulas (`hpcjax table strategies/survey`).
"""

import dataclasses

from configs.strategies import zero
from hpcjax.train.config import TrainConfig

base = dataclasses.replace(
    zero.base,
    model=dataclasses.replace(zero.base.model, depth=8),
    train=TrainConfig(batch_size=32, steps=20),
    devices=8,
    memory=0.0,
)
smoke = {**zero.smoke, "devices": "1", "memory": "0", "taken": "0"}
