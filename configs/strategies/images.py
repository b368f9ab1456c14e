"""VGG-11 of an eighth of its width on MNIST, in several ways; half a minute a run.

`hpcjax data fetch mnist` gets the images. 20 steps of SGD with momentum on eight
simulated devices, with statistics of the whole batch. `vgg16` is compiled in
full size and not run.
Expect: the losses of one device to 1e-3 (`hpcjax table strategies/images`).
"""

import dataclasses

from hpcjax.data import MnistConfig
from hpcjax.models import VggConfig
from hpcjax.optim import SgdConfig
from hpcjax.runs import ProgramConfig
from hpcjax.train.config import TrainConfig

base = ProgramConfig(
    dataset=MnistConfig(limit=4000, validation_limit=1000, pad=2),
    model=VggConfig(depth=11, width=8, sync_axis="data"),
    optimizer=SgdConfig(lr=0.001, momentum=0.9),
    train=TrainConfig(batch_size=64, steps=20),
    devices=8,
    taken=20,
)
vgg16 = dataclasses.replace(
    base, model=VggConfig(depth=16, width=64, sync_axis="data"), taken=0
)
smoke = {
    "devices": "1",
    "taken": "0",
    "model.width": "1",
    "dataset.limit": "32",
    "dataset.validation_limit": "8",
}
