"""The memory of a step in four stages, by compiling alone; 10 s a run of 2 cores.

Expect: with more micro-batches GPipe keeps more, and 1F1B does not (`hpcjax table
axonn/schedules`).
"""

import dataclasses

from configs.axonn import training
from hpcjax.models import CausalLmConfig

base = dataclasses.replace(
    training.base,
    model=CausalLmConfig(depth=4, width=32, heads=2),
    train=dataclasses.replace(training.base.train, batch_size=256),
    devices=4,
)
whole = dataclasses.replace(
    base, model=dataclasses.replace(base.model, remat="full"), parallel=None, devices=1
)
