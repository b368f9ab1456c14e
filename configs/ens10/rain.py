"""EMOS of real rain at Innsbruck, from real reforecasts; 3 s a run.

It needs `hpcjax data fetch rain-ibk`. Training is on all days of 2000 to 2009.
Expect: a CRPS of 0.93 √mm in 2010 to 2013, of the climate 1.08 and of the raw ensemble
1.33 (`hpcjax table ens10/rain`).
"""

import dataclasses

from hpcjax.data import RainIbkConfig
from hpcjax.models import EmosConfig, RawConfig
from hpcjax.optim import AdamWConfig, CosineConfig
from hpcjax.runs.training import TrainingConfig
from hpcjax.train.config import TrainConfig

emos = TrainingConfig(
    dataset=RainIbkConfig(train_all=True, holdout="test"),
    model=EmosConfig(jitter=0.3),
    optimizer=AdamWConfig(lr=0.02, weight_decay=0.0, schedule=CosineConfig()),
    train=TrainConfig(steps=1000, batch_size=512, eval_every=1000),
)
climatology = dataclasses.replace(emos, model=EmosConfig(variant="climatology"))
# A control: too short to forget where it started.
brief = dataclasses.replace(
    emos, train=dataclasses.replace(emos.train, steps=20, eval_every=20)
)
raw = dataclasses.replace(
    emos, model=RawConfig(), train=dataclasses.replace(emos.train, steps=1)
)
base = emos
