"""A language model of the King James Bible, and fine-tuned with codecs; 1 min a run.

Needs `hpcjax data fetch kjv`. Four layers of width 64 on two devices. `tuned` and what
follows go on from a run of `base` (`--resume ID --fork --devices 2`), with a third of
its rate. Top-k and Random-k send the bytes of the autoencoder, with the slope of what
they send; `through` is Top-k with that of all numbers.
Expect: 8 bits cost nothing, and Top-k everything if its slope passes through (`hpcjax
table mpcompress/layers`).
"""

import dataclasses

from experiments.mpcompress.floors import LeftOut
from hpcjax.compress import Autoencoder, Quantizer, RandomK, TopK, equal_bytes
from hpcjax.data import CharTextConfig
from hpcjax.models import CausalLmConfig
from hpcjax.optim import AdamWConfig
from hpcjax.runs.training import TrainingConfig
from hpcjax.sharding import Tensor3dConfig
from hpcjax.train.config import TrainConfig

needs = ("kjv",)
SHAPE = 16, 64, 64
BEFORE, STEPS = 1500, 200
base = TrainingConfig(
    dataset=CharTextConfig(corpus="kjv", context=SHAPE[1], validation=0.02),
    model=CausalLmConfig(depth=4, width=SHAPE[2], heads=4),
    optimizer=AdamWConfig(lr=3e-3),
    parallel=Tensor3dConfig(col=2),
    train=TrainConfig(
        batch_size=SHAPE[0], steps=BEFORE, eval_every=BEFORE, checkpoint_every=0
    ),
)
tuned = dataclasses.replace(
    base,
    optimizer=AdamWConfig(lr=1e-3),
    train=dataclasses.replace(base.train, steps=BEFORE + STEPS),
)


def _with(codec, **fields):
    return dataclasses.replace(tuned, codec=dataclasses.replace(codec, **fields))


def _equal(codec):
    return equal_bytes(codec, autoencoder.codec, SHAPE, "float32")


eight, two, left_out = map(_with, (Quantizer(bits=8), Quantizer(bits=2), LeftOut()))
autoencoder = _with(Autoencoder(d=SHAPE[2] // 20))
wide = _with(Autoencoder(d=SHAPE[2] // 10))
topk, randomk = (_with(_equal(codec), grad="masked") for codec in (TopK(), RandomK()))
through = _with(topk.codec, grad="through")
smoke = {"parallel": "none", "codec": "none", "dataset.context": "8"}
