"""A character model of the King James Bible with LAMB, and PipeFisher; 30 s a run.

Needs `hpcjax data fetch kjv`. Two Transformer blocks; the pipeline, of two stages, is
simulated.
Expect: K-FAC reaches the final loss of LAMB in 0.63 of its time, in 1.07 times the
steps of inverses that are never late (`hpcjax table pipefisher/training`).
"""

import dataclasses

from configs.jorge import text
from experiments.pipefisher.training import PipeFisherConfig
from hpcjax.data import CharTextConfig
from hpcjax.models import CausalLmConfig
from hpcjax.optim import CosineConfig, LambConfig
from hpcjax.runs.training import TrainingConfig

needs = ("kjv",)

# NVLAMB: the gradient is clipped to norm one first.
LAMB = LambConfig(lr=1e-2, clip_norm=1.0, stacked=text.BLOCKS, schedule=CosineConfig())
lamb = TrainingConfig(
    dataset=CharTextConfig(corpus="kjv", context=64, validation=0.02),
    model=CausalLmConfig(depth=2, width=64, heads=2),
    optimizer=LAMB,
    train=text.sgd.train,
)
pipefisher = dataclasses.replace(
    lamb, optimizer=PipeFisherConfig(base=LAMB, damping=1e-2)
)
fresh = dataclasses.replace(
    lamb, optimizer=PipeFisherConfig(base=LAMB, damping=1e-2, fresh=True)
)
base = pipefisher
smoke = text.smoke
