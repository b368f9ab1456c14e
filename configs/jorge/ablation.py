"""Jorge's choices one at a time, on digits with ResNet-8; 10 s a run on 2 cores.

Expect: no figure yet, the table has not been recorded. Grafting should matter, since
Jorge's own length is not calibrated; `hpcjax table jorge/ablation` tells.
"""

import dataclasses

from configs.jorge import digits
from hpcjax.optim.config import JorgeConfig, StepDecayConfig

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
smoke = digits.smoke
