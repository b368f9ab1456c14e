"""A language model spread over eight devices by ZeRO; half a minute a run of 2 cores.

The step of AdamW is read; `sgd` takes 20 steps of SGD with momentum beside one
device's, and `summed` with gradients that are summed, not averaged.
Expect: at stage 3 a device holds an eighth of the state, 0.375 times the parameters'
bytes with AdamW, and sends three times these (`hpcjax table strategies/zero`).
"""

import dataclasses

from hpcjax.data import CharTextConfig
from hpcjax.models import CausalLmConfig
from hpcjax.optim import AdamWConfig, SgdConfig
from hpcjax.runs import ProgramConfig
from hpcjax.sharding import ZeroConfig
from hpcjax.train.config import TrainConfig

base = ProgramConfig(
    dataset=CharTextConfig(context=8),
    model=CausalLmConfig(depth=6, width=256, heads=4),
    optimizer=AdamWConfig(lr=1e-3),
    train=TrainConfig(batch_size=8, steps=20),
    memory=2**30,
)
sgd = dataclasses.replace(
    base, optimizer=SgdConfig(lr=0.05, momentum=0.9), memory=0, taken=20
)
summed = dataclasses.replace(
    sgd, parallel=ZeroConfig(), broken="experiments.strategies.controls:summed"
)
smoke = {
    "model.depth": "2",
    "model.width": "16",
    "dataset.context": "4",
    "memory": "500000",
    "taken": "2",
}
