"""Sparse training of a perceptron on digits, far from dense; 5 s a run.

64-300-100-10, of whose 50,200 weights 1,004 are left: so few that it matters where
they are. `:narrow` is a dense network of as many. Fixed before any run: one optimizer,
which is tuned for none.
Expect: RigL and SET are 4 and 3 points above static masks, and RigL where a narrow
network is (`hpcjax table sparsity/perceptron`).
"""

import dataclasses

from experiments.sparsity.digits import Config
from hpcjax.core.structures import NM
from hpcjax.models import MlpConfig
from hpcjax.optim import AdamWConfig, CosineConfig, StraightThroughConfig
from hpcjax.optim.sparsify import (
    Cubic,
    DynamicConfig,
    ErdosRenyi,
    OneShot,
    PruneConfig,
)
from hpcjax.train.config import TrainConfig

ERK = ErdosRenyi(sparsity=0.98)
dense = Config(
    model=MlpConfig(widths=(300, 100)),
    optimizer=AdamWConfig(lr=3e-3, weight_decay=0.0, schedule=CosineConfig()),
    train=TrainConfig(steps=600, batch_size=64, eval_every=600, checkpoint_every=0),
)
narrow = dataclasses.replace(dense, model=MlpConfig(widths=(12, 12)))
RIGL = DynamicConfig(distribution=ERK, every=25)
rigl = dataclasses.replace(dense, sparsity=RIGL)
static = dataclasses.replace(dense, sparsity=dataclasses.replace(RIGL, grow=None))
set_ = dataclasses.replace(
    dense, sparsity=dataclasses.replace(RIGL, grow="random", regrow=False)
)
GRADUAL = PruneConfig(distribution=ERK, schedule=Cubic(begin=60, every=25, updates=15))
gradual = dataclasses.replace(dense, sparsity=GRADUAL)
AT_ONCE = dataclasses.replace(GRADUAL, schedule=OneShot(step=599))
one_shot = dataclasses.replace(dense, sparsity=AT_ONCE)
random = dataclasses.replace(
    dense, sparsity=dataclasses.replace(AT_ONCE, score="random")
)
straight_through = dataclasses.replace(
    dense, sparsity=StraightThroughConfig(distribution=ERK)
)
two_of_four = dataclasses.replace(
    dense,
    sparsity=StraightThroughConfig(structure=NM(n=2, m=4), distribution=None),
)
base = rigl
smoke = {"model.widths": "[4]"}
