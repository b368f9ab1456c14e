"""Graph networks on the public split of Cora, 140 papers with labels; 5 to 20 s a run.

Nothing is to be downloaded.
Expect: test accuracies of 81 % (gcn, sgc) and 83 % (gat), without citations 58 %
(`hpcjax table graphs/cora`).
"""

import dataclasses

from hpcjax.data import CoraConfig
from hpcjax.models import GnnConfig
from hpcjax.optim import AdamWConfig
from hpcjax.runs.training import TrainingConfig
from hpcjax.train.config import TrainConfig

gcn = TrainingConfig(
    dataset=CoraConfig(),
    model=GnnConfig(penalty=5e-4),
    optimizer=AdamWConfig(lr=0.01, weight_decay=0.0),
    train=TrainConfig(steps=200, batch_size=140, eval_every=200, checkpoint_every=0),
)


def _layer(layer, *, lr=0.01, **fields):
    return dataclasses.replace(
        gcn,
        model=dataclasses.replace(gcn.model, layer=layer, **fields),
        optimizer=dataclasses.replace(gcn.optimizer, lr=lr),
    )


gat = _layer("gat", hidden=8, dropout=0.6, activation="elu", lr=0.005)
# Rates and penalties that are not published are the best of a few on the validation
# part, with seeds 100 to 102.
sage = _layer("sage", penalty=5e-3)
gin = _layer("gin", penalty=5e-3)
sgc = _layer("sgc", dropout=0.0, lr=0.2, penalty=5e-6)
mlp = _layer("mlp", penalty=5e-3)
rewired = dataclasses.replace(gcn, dataset=CoraConfig(rewired=True))
base = gcn
