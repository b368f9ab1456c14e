"""GPT-2 medium's blocks on characters, compiled in full size and not run; 1 min.

Expect: 302 million parameters; eight times the depth or so in 8 GiB at stage 3
(`hpcjax table strategies/images`).
"""

import dataclasses

from configs.strategies import zero
from hpcjax.models import CausalLmConfig
from hpcjax.optim import SgdConfig

base = dataclasses.replace(
    zero.base,
    model=CausalLmConfig(depth=24, width=1024, heads=16),
    optimizer=SgdConfig(lr=0.001, momentum=0.9),
    devices=8,
    memory=2**33,
)
smoke = {**zero.smoke, "devices": "1", "taken": "0"}
