"""K-FAC, SGD and AdamW on the masks of ellipsoid phantoms with a U-Net; 1 min a run.

In place of the paper's brain scans, whose reader is `hpcjax.data.MriSlicesConfig`; 576
slices of 72 phantoms, 15 epochs.
Expect: see `hpcjax table kaisa/steps`.
"""

import dataclasses

from configs.kaisa import digits
from hpcjax.data import PhantomsConfig
from hpcjax.models import UNetConfig
from hpcjax.optim import AdamWConfig, CosineConfig
from hpcjax.train.config import TrainConfig

adamw = dataclasses.replace(
    digits.sgd,
    dataset=PhantomsConfig(patients=96),
    model=UNetConfig(depth=2, width=8),
    optimizer=AdamWConfig(lr=3e-3, schedule=CosineConfig()),
    train=TrainConfig(steps=540, batch_size=16, eval_every=18),
)
sgd = dataclasses.replace(adamw, optimizer=digits.SGD)
kfac = dataclasses.replace(adamw, optimizer=digits.KFAC)
base = kfac
