"""A language model of the King James Bible, and fine-tuned with codecs; 1 min a run.

Needs `hpcjax data fetch kjv`. Four layers of width 32 on two devices. `tuned` and what
follows go on from a run of `base` (`--resume ID --fork --devices 2`). `topk` and
`randomk` send the bytes of the autoencoder.
Expect: 8 bits cost nothing, and others more in all layers than in the last two
(`hpcjax table mpcompress/layers`).
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
SHAPE = 16, 64, 32
BEFORE, STEPS = 1500, 100
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
    base, train=dataclasses.replace(base.train, steps=BEFORE + STEPS)
)
eight, two, autoencoder, left_out = (
    dataclasses.replace(tuned, codec=codec)
    for codec in (
        *(Quantizer(bits=8), Quantizer(bits=2)),
        *(Autoencoder(d=SHAPE[2] // 20), LeftOut()),
    )
)
topk, randomk = (
    dataclasses.replace(
        tuned, codec=equal_bytes(codec, autoencoder.codec, SHAPE, "float32")
    )
    for codec in (TopK(), RandomK())
)
smoke = {"parallel": "none", "codec": "none", "dataset.context": "8"}
