"""A language model on four devices that compress what they send; seconds a codec.

The devices are simulated, and the step is only compiled. `topk` and `randomk` send the
bytes of the autoencoder; `pretended` sums what it has decoded.
Expect: the bytes that codecs say of themselves (`hpcjax table mpcompress/bytes`).
"""

import dataclasses

from experiments.mpcompress.sums import Config
from hpcjax.compress import (
    Autoencoder,
    Identity,
    Quantizer,
    RandomK,
    TopK,
    equal_bytes,
)
from hpcjax.data import CharTextConfig
from hpcjax.models import CausalLmConfig
from hpcjax.optim import SgdConfig
from hpcjax.sharding import Tensor3dConfig
from hpcjax.train.config import TrainConfig

SHAPE = 4, 64, 64
base = Config(
    devices=4,
    dataset=CharTextConfig(context=SHAPE[1]),
    model=CausalLmConfig(depth=4, width=SHAPE[2], heads=4),
    optimizer=SgdConfig(lr=0.1),
    parallel=Tensor3dConfig(col=4),
    codec=Quantizer(bits=8),
    train=TrainConfig(batch_size=SHAPE[0], steps=3),
)
whole = dataclasses.replace(base, codec=Identity())
autoencoder = dataclasses.replace(base, codec=Autoencoder(d=SHAPE[2] // 20))
topk, randomk = (
    dataclasses.replace(
        base, codec=equal_bytes(codec, autoencoder.codec, SHAPE, "float32", devices=4)
    )
    for codec in (TopK(), RandomK())
)
pretended = dataclasses.replace(
    base, broken="experiments.mpcompress.controls:pretended"
)
smoke = {
    "devices": "2",
    "parallel.col": "2",
    "model.width": "16",
    "model.heads": "2",
    "model.depth": "2",
    "dataset.context": "24",
    "train.batch_size": "2",
}
