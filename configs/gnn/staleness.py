"""Digits in a graph of neighbours on 4 devices, whose rows are late; 10 s a run.

180 of 1,797 scans have labels; parts are by chance, so that two thirds of the edges are
between devices.
Expect: 97 % of the others; rows of one step ago cost half a point at most
(`hpcjax table gnn/staleness`).
"""

import dataclasses

from hpcjax.data import PartitionedVerticesConfig
from hpcjax.models import GnnConfig
from hpcjax.optim import AdamWConfig
from hpcjax.runs.training import TrainingConfig
from hpcjax.train.config import TrainConfig

base = TrainingConfig(
    dataset=PartitionedVerticesConfig(partitions=4, method="hash"),
    model=GnnConfig(hidden=64, dropout=0.0),
    optimizer=AdamWConfig(lr=0.01, weight_decay=0.0),
    train=TrainConfig(steps=150, batch_size=4, eval_every=150, checkpoint_every=0),
)


def _late(**fields):
    return dataclasses.replace(base, model=dataclasses.replace(base.model, **fields))


fresh = base
one, two, four = (_late(stale=steps) for steps in (1, 2, 4))
random = _late(stale=2, delay="random")
mean = _late(stale=1, stale_mean=0.95)
never = _late(stale=1, delay="never")
# Logistic regression of the pixels, at a rate by which it has learnt in these steps.
regression = dataclasses.replace(
    _late(layer="mlp", depth=1), optimizer=AdamWConfig(lr=0.1, weight_decay=0.0)
)
