"""A small Transformer with dropout, plain and fused; seconds a run on 2 cores.

`broken` draws the masks of another seed for its gradients.
Expect: the fused block's loss after 100 steps within 10⁻³ of the plain one's
(`hpcjax table data_movement/dropout`).
"""

import dataclasses

from experiments.data_movement.dropout import Config
from hpcjax.data import CharTextConfig
from hpcjax.models import CausalLmConfig, TransformerOptions
from hpcjax.optim import AdamWConfig
from hpcjax.train.config import TrainConfig

base = Config(
    dataset=CharTextConfig(context=32, validation=0.01),
    model=CausalLmConfig(
        depth=2,
        width=64,
        options=TransformerOptions(norm_position="post", final_norm=False),
    ),
    optimizer=AdamWConfig(lr=1e-3),
    train=TrainConfig(batch_size=8, steps=100, eval_every=100),
)
broken = dataclasses.replace(
    base, broken="experiments.data_movement.controls:other_masks"
)
smoke = {"dataset.context": "4", "model.width": "8", "train.steps": "2"}
