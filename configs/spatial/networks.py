"""Networks on images in blocks, on eight simulated devices; 1 min a run of 2 cores.

A U-Net on phantoms, and `resnet`, ResNet-18 on noise of 32x32, with the whole batch's
statistics. `annotated` is the U-Net as the compiler cuts it.
Expect: parameters within 1e-5 of one device's after 4 steps (`hpcjax table
spatial/halos`).
"""

import dataclasses

from experiments.spatial.networks import Config
from experiments.spatial.noise import NoiseConfig
from hpcjax.data import PhantomsConfig
from hpcjax.models import ResNetConfig, UNetConfig
from hpcjax.optim import SgdConfig
from hpcjax.sharding import SpatialConfig
from hpcjax.train.config import TrainConfig

base = Config(
    dataset=PhantomsConfig(patients=8, slices=4),
    model=UNetConfig(depth=3, width=4),
    optimizer=SgdConfig(lr=0.05, momentum=0.9),
    parallel=SpatialConfig(height=4),
    train=TrainConfig(batch_size=8, steps=4),
    devices=8,
    taken=4,
)
annotated = dataclasses.replace(base, annotated=True)
resnet = dataclasses.replace(
    base,
    dataset=NoiseConfig(),
    model=ResNetConfig(depth=18, width=8, sync_axis="data"),
    optimizer=SgdConfig(lr=0.005, momentum=0.9),
    train=TrainConfig(batch_size=32, steps=4),
)
smoke = {
    "model.width": "2",
    "taken": "1",
    "train.batch_size": "2",
    "dataset.size": "16",
}
