"""A character language model of the King James Bible, 8 devices; 1 min a run, 2 cores.

Needs `hpcjax data fetch kjv`. Two Transformer blocks of width 64, 64 characters, Adam
behind an exchange of 2 % of the gradient.
Expect: Ok-Topk's validation loss is within 5 % of the dense exchange's (`oktopk/text`),
which 400 steps do not reach: 10 % above.
"""

import dataclasses

from configs.oktopk import fashion
from hpcjax.data import CharTextConfig
from hpcjax.models import CausalLmConfig
from hpcjax.optim import AdamWConfig, CosineConfig
from hpcjax.train.config import TrainConfig

needs = ("kjv",)

dense = dataclasses.replace(
    fashion.dense,
    dataset=CharTextConfig(corpus="kjv", context=64, validation=0.02),
    model=CausalLmConfig(depth=2, width=64, heads=2),
    optimizer=AdamWConfig(lr=3e-3, schedule=CosineConfig()),
    train=TrainConfig(steps=400, batch_size=32, eval_every=100),
)
top_k = dataclasses.replace(dense, exchange=fashion.top_k.exchange)
gtopk = dataclasses.replace(dense, exchange=fashion.gtopk.exchange)
gaussian_k = dataclasses.replace(dense, exchange=fashion.gaussian_k.exchange)
ok_topk = dataclasses.replace(dense, exchange=fashion.ok_topk.exchange)
base = ok_topk
