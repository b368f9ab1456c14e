"""ResNet-18 on noise in blocks, on eight simulated devices; 1 min a run of 2 cores.

Statistics are of the whole batch.
Expect: parameters within 1e-5 of one device's after 4 steps (`hpcjax table
spatial/halos`).
"""

import dataclasses

from configs.spatial import networks
from experiments.spatial.noise import NoiseConfig
from hpcjax.models import ResNetConfig
from hpcjax.optim import SgdConfig
from hpcjax.train.config import TrainConfig

base = dataclasses.replace(
    networks.base,
    dataset=NoiseConfig(),
    model=ResNetConfig(depth=18, width=8, sync_axis="data"),
    optimizer=SgdConfig(lr=0.005, momentum=0.9),
    train=TrainConfig(batch_size=32, steps=4),
)
smoke = networks.smoke
