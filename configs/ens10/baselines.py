"""ENS-10's baselines on forecasts of a simulated dry atmosphere; 5 to 40 s a run.

Temperature at 850 hPa, for which 84 dates are learnt and 40 others decide. It needs
`hpcjax data fetch ens10-light`, a simulation of 20 minutes that is made once.
Expect: the raw ensemble's CRPS is 1.16 K, EMOS's 7 % less, and that of whatever knows
places 14 to 18 % less (`hpcjax table ens10/baselines`).
"""

import dataclasses

from hpcjax.data import Ens10Config
from hpcjax.models import (
    EmosConfig,
    FieldCnnConfig,
    FieldUNetConfig,
    MemberAttentionConfig,
    PointMlpConfig,
    RawConfig,
)
from hpcjax.optim import AdamWConfig, CosineConfig
from hpcjax.runs.training import TrainingConfig
from hpcjax.train.config import TrainConfig

_DATES = Ens10Config(holdout="test")


def _train(steps: int, batch_size: int) -> TrainConfig:
    return TrainConfig(steps=steps, batch_size=batch_size, eval_every=steps)


emos = TrainingConfig(
    dataset=_DATES,
    model=EmosConfig(),
    optimizer=AdamWConfig(lr=0.01, weight_decay=0.0, schedule=CosineConfig()),
    train=_train(210, 4),
)
raw = dataclasses.replace(emos, model=RawConfig(), train=_train(1, 4))
emos_point = dataclasses.replace(
    emos, model=EmosConfig(per_point=True), train=_train(420, 4)
)
mlp = dataclasses.replace(
    emos,
    model=PointMlpConfig(),
    optimizer=dataclasses.replace(emos.optimizer, lr=0.02),
    train=_train(1680, 2),
)
lenet = dataclasses.replace(emos, model=FieldCnnConfig(width=16), train=_train(420, 4))
unet = dataclasses.replace(mlp, model=FieldUNetConfig(width=8), train=_train(420, 4))
transformer = dataclasses.replace(
    emos, model=MemberAttentionConfig(width=8), train=_train(336, 1)
)
# A control: forecasts of a date with the truth of another.
shuffled = dataclasses.replace(unet, dataset=Ens10Config(holdout="test", shuffled=True))
base = emos
