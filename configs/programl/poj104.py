"""What POJ-104's programs compute, by a gated graph network; 3 minutes a run.

For which `pip install 'hpcjax[ir]'`; nothing else is to be downloaded.
Expect: a third of unseen files right and more, of 104 classes with six files each to
learn from, and less than a bag of words has (`hpcjax table programl/poj104`).
"""

import dataclasses

from hpcjax.data import ProgramsConfig
from hpcjax.models import GgnnConfig
from hpcjax.optim import AdamWConfig
from hpcjax.runs.training import TrainingConfig
from hpcjax.train.config import TrainConfig

base = ggnn = TrainingConfig(
    dataset=ProgramsConfig(task="algorithm", holdout="test"),
    model=GgnnConfig(steps=8, readout="graph", dropout=0.1),
    optimizer=AdamWConfig(lr=5e-3, weight_decay=0.0, clip_norm=1.0),
    train=TrainConfig(steps=500, batch_size=1, eval_every=500, checkpoint_every=0),
)


def _of(**dataset):
    own = dataclasses.replace(base.dataset, **dataset)
    return dataclasses.replace(base, dataset=own)


no_data = _of(edges="no_data")
no_control = _of(edges="no_control")
shuffled = _of(shuffled=True)
no_positions, no_backward = (
    dataclasses.replace(base, model=dataclasses.replace(base.model, **{name: False}))
    for name in ("positions", "backward")
)
