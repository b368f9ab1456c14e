"""A language model in stages on eight simulated devices; 1 min a run of 2 cores.

The step of AdamW is read; `sgd` takes 200 steps of SGD with momentum, and `summed`
with gradients of micro-batches that are summed. `data` shares out the batch alone.
Expect: the losses of one device to 1e-5 (`hpcjax table axonn/training`).
"""

import dataclasses

from experiments.axonn.pipeline import Config
from hpcjax.data import CharTextConfig
from hpcjax.models import CausalLmConfig
from hpcjax.optim import AdamWConfig, SgdConfig
from hpcjax.sharding import PipelineConfig
from hpcjax.train.config import TrainConfig

base = Config(
    dataset=CharTextConfig(context=8),
    model=CausalLmConfig(depth=4, width=64, heads=4),
    optimizer=AdamWConfig(lr=1e-3),
    parallel=PipelineConfig(stages=4, micro_batches=8),
    train=TrainConfig(batch_size=32, steps=200),
    devices=8,
)
data = dataclasses.replace(base, parallel=None)
sgd = dataclasses.replace(base, optimizer=SgdConfig(lr=0.05, momentum=0.9), taken=200)
summed = dataclasses.replace(sgd, broken="experiments.axonn.controls:summed")
alone = dataclasses.replace(sgd, parallel=None, devices=1)
accumulated = dataclasses.replace(
    alone, train=dataclasses.replace(alone.train, accumulate=8)
)
