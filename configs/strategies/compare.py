"""A language model on eight simulated devices, in every way; 1 min a run of 2 cores.

100 steps of SGD with momentum, on one device in `alone`. `missing` forgets the mean
of data parallelism, `summed` sums gradients where ZeRO averages them, `keyed` draws
by device.
Expect: the losses of one device to 1e-5 (`hpcjax table strategies/compare`).
"""

import dataclasses

from hpcjax.data import CharTextConfig
from hpcjax.models import CausalLmConfig
from hpcjax.optim import SgdConfig
from hpcjax.runs import ProgramConfig
from hpcjax.sharding import ZeroConfig
from hpcjax.train.config import TrainConfig

base = ProgramConfig(
    dataset=CharTextConfig(context=8),
    model=CausalLmConfig(depth=4, width=64, heads=4),
    optimizer=SgdConfig(lr=0.1, momentum=0.9),
    train=TrainConfig(batch_size=32, steps=100),
    devices=8,
    taken=100,
)
alone = dataclasses.replace(base, devices=1)
summed = dataclasses.replace(
    base, parallel=ZeroConfig(), broken="experiments.strategies.controls:summed"
)
missing = dataclasses.replace(base, broken="experiments.strategies.controls:missing")
keyed = dataclasses.replace(base, broken="experiments.strategies.controls:keyed")
smoke = {
    "devices": "1",
    "parallel": "none",
    "broken": "",
    "model.depth": "2",
    "model.width": "16",
    "dataset.context": "4",
    "train.batch_size": "8",
    "taken": "2",
}
