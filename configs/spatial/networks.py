"""A U-Net on images in blocks, on eight simulated devices; 1 min a run of 2 cores.

A U-Net on phantoms; `annotated` is the U-Net as the compiler cuts it.
Expect: parameters within 1e-5 of one device's after 4 steps (`hpcjax table
spatial/halos`).
"""

import dataclasses

from experiments.spatial.networks import Config
from hpcjax.data import PhantomsConfig
from hpcjax.models import UNetConfig
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
smoke = {
    "model.width": "2",
    "taken": "1",
    "train.batch_size": "2",
    "dataset.size": "16",
    "devices": "1",
    "parallel.height": "1",
}
