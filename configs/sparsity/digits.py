"""Sparse from the start: a ResNet-8 of width 8 on digits; half a minute a run.

Fixed before any run: all variants, and those of `sparsity/pruning`, have the same
optimizer, which is tuned for none of them; ΔT and the share that is dropped are the
papers' in proportion to so short a run.
Expect: at 95 % RigL and SET are above static masks (`hpcjax table sparsity/digits`).
"""

import dataclasses

from experiments.sparsity.digits import Config
from hpcjax.models import ResNetConfig
from hpcjax.optim import CosineConfig, SgdConfig
from hpcjax.optim.sparsify import DynamicConfig, ErdosRenyi
from hpcjax.train.config import TrainConfig

dense = Config(
    model=ResNetConfig(depth=8, width=8),
    optimizer=SgdConfig(lr=0.1, momentum=0.9, schedule=CosineConfig()),
    train=TrainConfig(steps=300, batch_size=128, eval_every=300, checkpoint_every=0),
)
RIGL = DynamicConfig(
    distribution=ErdosRenyi(sparsity=0.95), exclude=("conv_in/|head/",), every=20
)
RANDOM = dataclasses.replace(RIGL, grow="random")
rigl = dataclasses.replace(dense, sparsity=RIGL)
static = dataclasses.replace(dense, sparsity=dataclasses.replace(RIGL, grow=None))
set_ = dataclasses.replace(
    dense, sparsity=dataclasses.replace(RANDOM, regrow=False, decay="constant")
)
snfs = dataclasses.replace(
    dense,
    sparsity=dataclasses.replace(RIGL, grow="momentum", redistribute="momentum"),
)
dsr = dataclasses.replace(
    dense,
    sparsity=dataclasses.replace(RANDOM, compare="all", redistribute="survivors"),
)
base = rigl
smoke = {"model": "mlp", "model.widths": "[4]"}
