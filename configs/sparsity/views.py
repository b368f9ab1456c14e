"""The network sees other weights than are trained: a ResNet-8 of width 8 on digits.

Half a minute a run. All that is not pruning is that of `sparsity/digits`. How sparse
`:variational_dropout` and `:soft_threshold` become depends on their weights, which were
chosen once, by runs of another seed, for 90 % or more.
Expect: at 95 % straight-through is 2 points or more above pruning at once (`hpcjax
table sparsity/digits`).
"""

import dataclasses

from configs.sparsity import digits
from hpcjax.optim import (
    MovementConfig,
    SoftThresholdConfig,
    StraightThroughConfig,
    TopKastConfig,
    VariationalDropoutConfig,
)
from hpcjax.optim.sparsify import ErdosRenyi

EXCLUDE = ("conv_in/|head/",)
ERK = ErdosRenyi(sparsity=0.95)

straight_through = dataclasses.replace(
    digits.dense, sparsity=StraightThroughConfig(distribution=ERK, exclude=EXCLUDE)
)
movement = dataclasses.replace(
    digits.dense, sparsity=MovementConfig(distribution=ERK, exclude=EXCLUDE)
)
top_kast = dataclasses.replace(
    digits.dense, sparsity=TopKastConfig(forward=0.95, backward=0.9, exclude=EXCLUDE)
)
variational_dropout = dataclasses.replace(
    digits.dense, sparsity=VariationalDropoutConfig(weight=2e-4, exclude=EXCLUDE)
)
# Weight decay is what makes it sparse.
soft_threshold = dataclasses.replace(
    digits.dense,
    optimizer=dataclasses.replace(digits.dense.optimizer, weight_decay=5e-3),
    sparsity=SoftThresholdConfig(start_at=-2.0, exclude=EXCLUDE),
)
base = straight_through
smoke = {"model": "mlp", "model.widths": "[4]"}
