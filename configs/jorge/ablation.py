"""Jorge's choices one at a time, on digits with ResNet-8; 10 s a run on 2 cores.

Expect: without grafting about half as many steps again to SGD's loss; the other choices
do not differ beyond three seeds' spread (`hpcjax table jorge/ablation`).
"""

import dataclasses

from configs.jorge import digits
from hpcjax.optim import JorgeConfig, StepDecayConfig

sgd = digits.sgd
jorge = dataclasses.replace(
    digits.sgd,
    optimizer=JorgeConfig(
        lr=0.1,
        weight_decay=1e-3,
        update_every=1,
        init="grad",
        schedule=StepDecayConfig(),
    ),
)
base = jorge
