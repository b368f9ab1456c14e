"""A language model on a grid of eight devices, read and trained; seconds a grid.

The devices are simulated. `trained` takes three steps beside one device's, and so does
`broken`, whose norms are of a device's own features; in `marked` matrices that take the
same x sum its slopes one by one.
Expect: the words of the formula, the least on the grid that `cost.best_grid` names, and
parameters within 10⁻⁵ of one device's (`hpcjax table tensor3d/grids`).
"""

import dataclasses

from experiments.tensor3d.grids import Config
from hpcjax.data import TokenTextConfig
from hpcjax.models import CausalLmConfig
from hpcjax.optim import SgdConfig
from hpcjax.sharding import Tensor3dConfig
from hpcjax.train.config import TrainConfig

base = Config(
    devices=8,
    dataset=TokenTextConfig(context=8, vocabulary=512),
    model=CausalLmConfig(depth=2, width=64, heads=16),
    optimizer=SgdConfig(lr=0.1, momentum=0.9),
    parallel=Tensor3dConfig(row=2, col=4),
    train=TrainConfig(batch_size=8, steps=3),
)
trained = dataclasses.replace(base, taken=3)
marked = dataclasses.replace(base, broken="experiments.tensor3d.controls:marked")
broken = dataclasses.replace(trained, broken="experiments.tensor3d.controls:alone")
smoke = {
    "devices": "2",
    "parallel.row": "2",
    "parallel.col": "1",
    "model.width": "16",
    "model.heads": "2",
    "dataset": "char_text",
    "dataset.context": "4",
}
