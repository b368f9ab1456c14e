"""A two-layer BERT of the King James Bible with LAMB, and PipeFisher; 1 min a run.

Needs `hpcjax data fetch kjv`. The pipeline, of two stages, is simulated.
Expect: not known yet; no table is made of it so far.
"""

import dataclasses

from experiments.pipefisher.training import Config, PipeFisherConfig
from hpcjax.data.config import MaskedTextConfig
from hpcjax.models.config import BertConfig
from hpcjax.optim.config import CosineConfig, LambConfig
from hpcjax.train.config import TrainConfig

needs = ("kjv",)

# NVLAMB: the gradient is clipped to norm one first.
LAMB = LambConfig(
    lr=1e-2, clip_norm=1.0, stacked=("^blocks/",), schedule=CosineConfig()
)
lamb = Config(
    dataset=MaskedTextConfig(corpus="kjv", context=64, vocabulary=1024, copies=1),
    model=BertConfig(depth=2, width=64, heads=2),
    optimizer=LAMB,
    train=TrainConfig(steps=300, batch_size=32, eval_every=100),
)
pipefisher = dataclasses.replace(
    lamb, optimizer=PipeFisherConfig(base=LAMB, damping=1e-2)
)
fresh = dataclasses.replace(
    lamb, optimizer=PipeFisherConfig(base=LAMB, damping=1e-2, fresh=True)
)
base = pipefisher
smoke = {
    "train.steps": "2",
    "train.batch_size": "4",
    "dataset.context": "16",
    "dataset.vocabulary": "60",
    "model.width": "8",
}
