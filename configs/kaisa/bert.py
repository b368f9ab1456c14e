"""K-FAC, LAMB and AdamW on a two-layer BERT of the King James Bible; 1 min a run.

Needs `hpcjax data fetch kjv`. Masked words and the order of sentences, as in the
paper's phase 1; the vocabulary head is tied to the table and keeps its gradient.
Expect: 300 steps are too few to learn more than how often words occur, so no table
compares them here.
"""

import dataclasses

from configs.kaisa import digits
from hpcjax.data import MaskedTextConfig
from hpcjax.models import BertConfig
from hpcjax.optim import AdamWConfig, CosineConfig, LambConfig
from hpcjax.optim.kfac import SKIP
from hpcjax.train.config import TrainConfig

needs = ("kjv",)

STACK = ("^blocks/",)  # stacked on axis 0
LAMB = LambConfig(lr=1e-2, clip_norm=1.0, stacked=STACK, schedule=CosineConfig())
lamb = dataclasses.replace(
    digits.sgd,
    dataset=MaskedTextConfig(corpus="kjv", context=64, vocabulary=1024, copies=1),
    model=BertConfig(depth=2, width=64, heads=2),
    optimizer=LAMB,
    train=TrainConfig(steps=300, batch_size=32, eval_every=20),
)
adamw = dataclasses.replace(
    lamb, optimizer=AdamWConfig(lr=3e-3, schedule=CosineConfig())
)
SKIP_HEAD = (*SKIP, "^decoder_bias$")
KFAC = dataclasses.replace(digits.KFAC, base=LAMB, skip=SKIP_HEAD)
kfac = dataclasses.replace(lamb, optimizer=KFAC)
base = kfac
smoke = {"train.batch_size": "4"}
