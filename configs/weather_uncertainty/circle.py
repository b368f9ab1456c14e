"""The spread of twenty members on a circle, learnt from five of them; 15 s a run.

Expect: an RMSE of 0.08, a little less than a blend of the raw spread and its climate
(`hpcjax table weather_uncertainty/circle`).
"""

import dataclasses

from configs.weather_uncertainty.baselines import CIRCLE
from hpcjax.models import ConvLstmConfig, FieldCnnConfig
from hpcjax.optim import AdamWConfig, CosineConfig
from hpcjax.runs.training import TrainingConfig
from hpcjax.train.config import TrainConfig

# Turned dates, and few steps: with more of them networks learn the dates by heart.
_DATES = dataclasses.replace(CIRCLE, roll="turn")
field_cnn = TrainingConfig(
    dataset=_DATES,
    model=FieldCnnConfig(width=16),
    optimizer=AdamWConfig(lr=0.003, weight_decay=0.0, schedule=CosineConfig()),
    train=TrainConfig(steps=150, batch_size=20, eval_every=150),
)
conv_lstm = dataclasses.replace(
    field_cnn,
    dataset=dataclasses.replace(_DATES, leads=(0, 24)),
    model=ConvLstmConfig(width=12, poolings=0),
)
# A control: the spread of other dates.
shuffled = dataclasses.replace(
    field_cnn, dataset=dataclasses.replace(_DATES, shuffled=True)
)
base = field_cnn
