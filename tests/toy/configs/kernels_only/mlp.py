"""A perceptron whose kernels four devices share out; seconds.

Expect: a bit more than a quarter of the state.
"""

import dataclasses

from experiments.kernels_only.spread import KernelsConfig
from hpcjax.models import MlpConfig
from hpcjax.optim import SgdConfig
from hpcjax.runs.program import ProgramConfig
from hpcjax.train.config import TrainConfig

base = ProgramConfig(
    model=MlpConfig(widths=(64,)),
    optimizer=SgdConfig(lr=0.1, momentum=0.9),
    parallel=KernelsConfig(),
    train=TrainConfig(batch_size=8, steps=3),
    devices=4,
    taken=3,
)
doubled = dataclasses.replace(base, broken="experiments.kernels_only.spread:doubled")
smoke = {"taken": "1"}
