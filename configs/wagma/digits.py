"""A small network on digits, eight workers, 300 steps; 15 s on 2 cores.

`hpcjax run wagma/digits --devices 8`; a variant for each way to average.
Expect: WAGMA's accuracy is within one point of allreduce's, mean of three seeds
(`hpcjax table wagma/accuracy`).
"""

import dataclasses

from experiments.wagma.digits import Config
from hpcjax.averaging import (
    AdpsgdConfig,
    DpsgdConfig,
    EagerConfig,
    LateConfig,
    LocalSgdConfig,
    SgpConfig,
    WagmaConfig,
)
from hpcjax.models import MlpConfig
from hpcjax.optim import SgdConfig, StepDecayConfig
from hpcjax.train.config import TrainConfig

allreduce = Config(
    model=MlpConfig(widths=(64,)),
    optimizer=SgdConfig(lr=0.1, momentum=0.9, schedule=StepDecayConfig(at=(0.5, 0.75))),
    train=TrainConfig(steps=300, batch_size=128, eval_every=100),
)
LATE = LateConfig(base=0.02, delay=0.2, seconds=0.005)
wagma = dataclasses.replace(allreduce, averaging=WagmaConfig(tau=10, late=LATE))
eager = dataclasses.replace(allreduce, averaging=EagerConfig(mode="solo", late=LATE))
local_sgd = dataclasses.replace(allreduce, averaging=LocalSgdConfig(period=10))
dpsgd = dataclasses.replace(allreduce, averaging=DpsgdConfig())
adpsgd = dataclasses.replace(allreduce, averaging=AdpsgdConfig())
sgp = dataclasses.replace(allreduce, averaging=SgpConfig())
base = wagma
smoke = {"train.steps": "4"}
