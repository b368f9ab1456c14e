"""Any parts together, on links of a knowledge graph; WordNet's, minutes.

`hpcjax run train/links dataset.order=comet model.decoder=complex optimizer=adagrad
exchange=ok_topk --devices 2`.
Needs `hpcjax data fetch wordnet`; `dataset.source=umls dataset.negatives=32` is small.
Expect: `hpcjax table marius/links` is of WN18RR, which you have to have.
"""

from hpcjax.data import LinksConfig
from hpcjax.models import KgeConfig
from hpcjax.optim import AdagradConfig
from hpcjax.runs.training import TrainingConfig
from hpcjax.train.config import TrainConfig

base = TrainingConfig(
    dataset=LinksConfig(source="wordnet", negatives=256),
    model=KgeConfig(),
    optimizer=AdagradConfig(),
    train=TrainConfig(steps=400, batch_size=2, eval_every=200, checkpoint_every=0),
)
