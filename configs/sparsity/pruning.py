"""Pruned while it trains: a ResNet-8 of width 8 on digits; half a minute a run.

All that is not pruning is that of `sparsity/digits`. Masks of gradual pruning change
ten times, until 70 % of the run; `:one_shot` prunes in the last step.
Expect: at 95 % gradual pruning by magnitude is 2 points or more above pruning at once
(`hpcjax table sparsity/digits`).
"""

import dataclasses

from configs.sparsity import digits
from hpcjax.core.structures import NM
from hpcjax.optim.sparsify import (
    Alternating,
    Cubic,
    ErdosRenyi,
    Global,
    OneShot,
    PruneConfig,
)

GRADUAL = PruneConfig(
    distribution=ErdosRenyi(sparsity=0.95),
    exclude=("conv_in/|head/",),
    schedule=Cubic(begin=30, every=20, updates=9),
)
gradual = dataclasses.replace(digits.dense, sparsity=GRADUAL)
one_shot = dataclasses.replace(
    digits.dense, sparsity=dataclasses.replace(GRADUAL, schedule=OneShot(step=299))
)
random = dataclasses.replace(
    digits.dense, sparsity=dataclasses.replace(GRADUAL, score="random")
)
saliency = dataclasses.replace(
    digits.dense, sparsity=dataclasses.replace(GRADUAL, score="taylor")
)
movement = dataclasses.replace(
    digits.dense, sparsity=dataclasses.replace(GRADUAL, score="movement")
)
together = dataclasses.replace(
    digits.dense,
    sparsity=dataclasses.replace(GRADUAL, distribution=Global(sparsity=0.95)),
)
alternating = dataclasses.replace(
    digits.dense,
    sparsity=dataclasses.replace(
        GRADUAL, schedule=Alternating(begin=30, sparse=30, dense=30, rounds=4)
    ),
)
two_of_four = dataclasses.replace(
    digits.dense,
    sparsity=dataclasses.replace(GRADUAL, structure=NM(n=2, m=4), distribution=None),
)
base = gradual
smoke = {
    "model": "mlp",
    "model.widths": "[4]",
    "sparsity.schedule": "oneshot",
    "sparsity.schedule.step": "0",
}
