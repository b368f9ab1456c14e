"""Any parts together, on one graph that is shared out over devices; 10 s.

`hpcjax run train/partitioned dataset.partitions=8 model.scheme=halo model.stale=1
--devices 8`; `train.batch_size` is the number of parts.
Expect: 96 to 97 % of the scans that have no label.
"""

from hpcjax.data import PartitionedVerticesConfig
from hpcjax.models import GnnConfig
from hpcjax.optim import AdamWConfig
from hpcjax.runs.training import TrainingConfig
from hpcjax.train.config import TrainConfig

base = TrainingConfig(
    dataset=PartitionedVerticesConfig(),
    model=GnnConfig(hidden=64, dropout=0.0),
    optimizer=AdamWConfig(lr=0.01, weight_decay=0.0),
    train=TrainConfig(steps=150, batch_size=8, eval_every=150, checkpoint_every=0),
)
