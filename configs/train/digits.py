"""Any parts together, on 8×8 digits with a small perceptron; seconds on 2 cores.

The config to compose one's own run of: `hpcjax run train/digits optimizer=jorge
exchange=ok_topk averaging=wagma model=resnet --devices 8`. `hpcjax list --parts` lists
what there is.
Expect: SGD reaches 3 % validation error.
"""

from hpcjax.runs.training import TrainingConfig
from hpcjax.train.config import TrainConfig

base = TrainingConfig(train=TrainConfig(steps=300, batch_size=128, eval_every=50))
