"""Jorge and SGD on the masks of ellipsoid phantoms with a U-Net; 1 min a run.

In place of the paper's segmentation of COCO; 576 slices of 72 phantoms, 30 epochs.
Expect: see `hpcjax table jorge/steps`.
"""

import dataclasses

from configs.jorge import digits
from configs.kaisa import phantoms
from hpcjax.train.config import TrainConfig

sgd = dataclasses.replace(
    digits.sgd,
    dataset=phantoms.adamw.dataset,
    model=phantoms.adamw.model,
    train=TrainConfig(steps=1080, batch_size=16, eval_every=36),
)
adamw = dataclasses.replace(sgd, optimizer=digits.adamw.optimizer)
shampoo = dataclasses.replace(sgd, optimizer=digits.shampoo.optimizer)
jorge = dataclasses.replace(sgd, optimizer=digits.jorge.optimizer)
base = jorge
