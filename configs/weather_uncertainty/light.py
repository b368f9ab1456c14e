"""The spread of ten members on the globe, learnt from five; minutes a run.

Temperature at 850 hPa after 48 hours, of both levels. It needs `hpcjax data fetch
ens10-light`, a simulation of 20 minutes.
Expect: an RMSE (the root of `val_spread`) of 0.17 to 0.18 K (`hpcjax table
weather_uncertainty/light`).
"""

import dataclasses

from configs.weather_uncertainty.baselines import LIGHT
from hpcjax.models import ConvLstmConfig, FieldUNetConfig, UNet3dConfig
from hpcjax.optim import AdamWConfig, CosineConfig
from hpcjax.runs.training import TrainingConfig
from hpcjax.train.config import TrainConfig

_DATES = dataclasses.replace(LIGHT, levels="all", leads=(0, 24), roll="turn")

unet3d = TrainingConfig(
    dataset=_DATES,
    model=UNet3dConfig(base=4, poolings=3),
    optimizer=AdamWConfig(lr=0.003, weight_decay=0.0, schedule=CosineConfig()),
    train=TrainConfig(steps=420, batch_size=4, eval_every=420),
)
# The paper's loss; its range is in K.
structure = dataclasses.replace(
    unet3d, dataset=dataclasses.replace(_DATES, structure=4.3)
)
field_unet = dataclasses.replace(unet3d, model=FieldUNetConfig(width=8))
conv_lstm = dataclasses.replace(unet3d, model=ConvLstmConfig(width=8))
base = unet3d
smoke = {
    "dataset.leads": "[0]",
    "dataset.members": "3",
    "dataset.structure": "0",
}
