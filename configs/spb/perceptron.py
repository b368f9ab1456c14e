"""Partial backpropagation on 8×8 digits, a perceptron, 8 workers; 5 s a run.

SGD without momentum in small steps: how large a block's gradients are decides how fast
it learns, which batch norms would hide.
Expect: k = 4 ends within a point of the whole backward pass's validation error, and
with `backward.divisor=workers` more than a point above it (`hpcjax table spb/quality`).
"""

from hpcjax.models import MlpConfig
from hpcjax.optim import PartialBackwardConfig, SgdConfig
from hpcjax.runs.training import TrainingConfig
from hpcjax.train.config import TrainConfig

base = TrainingConfig(
    model=MlpConfig(widths=(32, 32, 32)),
    optimizer=SgdConfig(lr=0.05, momentum=0.0, weight_decay=1e-4),
    backward=PartialBackwardConfig(k=4, workers=8),
    train=TrainConfig(steps=500, batch_size=64, eval_every=100),
)
smoke = {"model.widths": "[4, 4, 4]"}
