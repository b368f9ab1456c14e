"""A character model of the King James Bible with LAMB, and PipeFisher; 1 min a run.

Needs `hpcjax data fetch kjv`. Two Transformer blocks; the pipeline, of two stages, is
simulated. 2,000 steps.
Expect: see `hpcjax table pipefisher/training`.
"""

import dataclasses

from configs.jorge import text
from experiments.pipefisher.training import PipeFisherConfig
from hpcjax.optim import CosineConfig, LambConfig
from hpcjax.runs.training import TrainingConfig
from hpcjax.train.config import TrainConfig

needs = ("kjv",)

# NVLAMB: the gradient is clipped to norm one first.
LAMB = LambConfig(lr=1e-2, clip_norm=1.0, stacked=text.BLOCKS, schedule=CosineConfig())
lamb = TrainingConfig(
    dataset=text.sgd.dataset,
    model=text.sgd.model,
    optimizer=LAMB,
    train=TrainConfig(steps=2000, batch_size=32, eval_every=100),
)
pipefisher = dataclasses.replace(
    lamb, optimizer=PipeFisherConfig(base=LAMB, damping=1e-2)
)
fresh = dataclasses.replace(
    lamb, optimizer=PipeFisherConfig(base=LAMB, damping=1e-2, fresh=True)
)
base = pipefisher
