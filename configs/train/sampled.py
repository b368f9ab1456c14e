"""Any parts together, on sampled neighbourhoods of a graph; half a minute.

`hpcjax run train/sampled dataset.source=property_graph dataset.fanouts=[10,10,10]
model.depth=3`.
Expect: 97 % of a drawn graph's validation part, from 61 % without its
edges; `hpcjax table graphs/minibatches` is of one that is easier.
"""

from hpcjax.data import SampledGraphConfig
from hpcjax.models import GnnConfig
from hpcjax.optim import AdamWConfig
from hpcjax.runs.training import TrainingConfig
from hpcjax.train.config import TrainConfig

base = TrainingConfig(
    dataset=SampledGraphConfig(block=256),
    model=GnnConfig(layer="sage", hidden=64, dropout=0.0),
    optimizer=AdamWConfig(lr=0.01, weight_decay=0.0),
    train=TrainConfig(steps=120, batch_size=1, eval_every=60, checkpoint_every=0),
)
