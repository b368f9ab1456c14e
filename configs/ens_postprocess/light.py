"""Mean and spread of five members corrected on the globe, in stages; minutes a run.

Temperature at 850 hPa after 48 hours. It needs `hpcjax data fetch ens10-light`, a
simulation of 20 minutes.
Expect: after all stages less than the CRPS of ten raw members (`hpcjax table
ens_postprocess/light`, which has `joint` start from `staged`).
"""

import dataclasses

from configs.ens_postprocess import circle
from configs.weather_uncertainty.baselines import LIGHT
from hpcjax.models import MeanAndSpreadConfig
from hpcjax.train.config import TrainConfig

FIRST, THEN = 200, 400  # steps, of a run and, counted on, of its fork
_DATES = dataclasses.replace(
    LIGHT, learn="both", control=True, analysis=True, fold_dates=7
)
BIAS = dataclasses.replace(circle.BIAS, levels=1, filters=6)
SPREAD = dataclasses.replace(circle.SPREAD, base=4)


def _on_globe(cfg, model, steps=FIRST):
    dataset = dataclasses.replace(_DATES, learn=cfg.dataset.learn)
    train = TrainConfig(steps=steps, batch_size=4, eval_every=min(steps, FIRST))
    return dataclasses.replace(cfg, dataset=dataset, model=model, train=train)


_PAIR = MeanAndSpreadConfig(mean=BIAS, spread=SPREAD)
staged = _on_globe(circle.staged, _PAIR)
joint = _on_globe(circle.joint, _PAIR, THEN)
bias = _on_globe(circle.bias, BIAS)
spread = _on_globe(circle.spread, SPREAD)
raw = _on_globe(circle.raw, circle.raw.model, 1)
emos = _on_globe(circle.emos, circle.emos.model)
emos_point = _on_globe(circle.emos_point, circle.emos_point.model)
base = staged
smoke = {
    "dataset.fold_dates": "1",
    "dataset.members": "3",
}
