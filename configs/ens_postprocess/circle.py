"""Mean and spread of five members corrected on a circle, in stages; 10 s a run.

Expect: after all stages 0.6 of the CRPS of ten raw members (`hpcjax table
ens_postprocess/circle`, which has `joint` start from `staged`).
"""

import dataclasses

from configs.weather_uncertainty.baselines import CIRCLE
from hpcjax.models import (
    BiasUNetConfig,
    EmosConfig,
    FieldCnnConfig,
    LcnConfig,
    MeanAndSpreadConfig,
    RawConfig,
    SpreadNetConfig,
)
from hpcjax.optim import AdamWConfig, CosineConfig
from hpcjax.runs.training import TrainingConfig
from hpcjax.train.config import TrainConfig

FIRST, THEN = 400, 800  # steps, of a run and, counted on, of its fork
_DATES = dataclasses.replace(CIRCLE, learn="both", control=True, analysis=True)
BIAS = BiasUNetConfig(levels=0, filters=12, norm="none", lcn=LcnConfig(alpha=1.0))
SPREAD = SpreadNetConfig(base=8, blocks=2, norm="none")


def _train(steps: int) -> TrainConfig:
    return TrainConfig(steps=steps, batch_size=30, eval_every=FIRST)


staged = TrainingConfig(
    dataset=_DATES,
    model=MeanAndSpreadConfig(mean=BIAS, spread=SPREAD),
    optimizer=AdamWConfig(lr=0.003, weight_decay=0.0, schedule=CosineConfig()),
    train=_train(FIRST),
)
joint = dataclasses.replace(
    staged, dataset=dataclasses.replace(_DATES, learn="joint"), train=_train(THEN)
)
# A spread of each place, which no member changes.
_CLIMATE = EmosConfig(variant="climatology", per_point=True)
climate = dataclasses.replace(
    staged, model=MeanAndSpreadConfig(mean=BIAS, spread=_CLIMATE)
)
# These numbers begin at a standard unit, far away: with longer steps, whose size soon
# forgets the slopes of squared errors.
climate_joint = dataclasses.replace(
    joint,
    model=climate.model,
    optimizer=dataclasses.replace(joint.optimizer, lr=0.03, b2=0.9),
)
bias = dataclasses.replace(staged, model=BIAS)
spread = dataclasses.replace(
    staged, model=SPREAD, dataset=dataclasses.replace(_DATES, learn="spread")
)
_TRUTH = dataclasses.replace(_DATES, learn="truth")
raw = dataclasses.replace(staged, model=RawConfig(), dataset=_TRUTH, train=_train(1))
emos = dataclasses.replace(
    staged,
    model=EmosConfig(),
    dataset=_TRUTH,
    optimizer=dataclasses.replace(staged.optimizer, lr=0.01),
)
emos_point = dataclasses.replace(emos, model=EmosConfig(per_point=True))
cnn = dataclasses.replace(staged, model=FieldCnnConfig(width=12), dataset=_TRUTH)
base = staged
smoke = {"dataset.fold_dates": "4"}
