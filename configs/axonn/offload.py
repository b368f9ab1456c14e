"""Optimizer state in tiles of 20,000, on the device or the host; up to 20 s
a run.

Expect: what a device holds besides parameters and gradients does not grow with the
model where the state is the host's, and losses are AdamW's (`hpcjax table
axonn/offload`).
"""

import dataclasses

from experiments.axonn.offload import Config
from hpcjax.data import CharTextConfig
from hpcjax.models import CausalLmConfig
from hpcjax.optim import AdamWConfig, LossScale, TiledConfig
from hpcjax.train.config import TrainConfig

adamw = Config(
    dataset=CharTextConfig(context=8),
    model=CausalLmConfig(depth=2, width=56, heads=4),
    optimizer=AdamWConfig(lr=1e-3),
    train=TrainConfig(batch_size=8, steps=10),
)
device = dataclasses.replace(adamw, state=TiledConfig(tile=20_000))
host = dataclasses.replace(adamw, state=TiledConfig(tile=20_000, space="host"))
float16 = dataclasses.replace(
    adamw,
    state=TiledConfig(
        tile=20_000, space="host", dtype="float16", loss_scale=LossScale()
    ),
)
bfloat16 = dataclasses.replace(
    adamw, state=TiledConfig(tile=20_000, space="host", dtype="bfloat16")
)
other = dataclasses.replace(adamw, state=TiledConfig(tile=6_000, space="host"))
loop = dataclasses.replace(adamw, slices=20_000)
base = host
