"""Two perceptrons of 8 layers side by side on two cores; 3 min.

Expect: more iterations in a second than with whole backward passes, by at least half of
what the measured times allow (`hpcjax table spb/together`). Runs of one's own are
`first.model=resnet second.optimizer=adamw` and so on.
"""

from experiments.spb.together import Config
from hpcjax.models import MlpConfig
from hpcjax.optim import SgdConfig
from hpcjax.runs.training import TrainingConfig
from hpcjax.train.config import TrainConfig

# 8,192 images: those of digits several times over. tanh: rounding can turn a ReLU off,
# and parameters then differ by more than rounding from those of a run alone.
base = Config(
    first=TrainingConfig(
        model=MlpConfig(widths=(256,) * 7, activation="tanh"),
        optimizer=SgdConfig(lr=0.05),
        train=TrainConfig(batch_size=8192),
    ),
    second=TrainingConfig(
        model=MlpConfig(widths=(256,) * 7, activation="tanh"),
        optimizer=SgdConfig(lr=0.05, momentum=0.0),
        train=TrainConfig(batch_size=8192),
        seed=1,
    ),
)
