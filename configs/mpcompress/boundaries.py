"""A language model in two stages that encode what they send; seconds a codec.

The devices are simulated, and the step is only compiled. `topk` and `randomk` send the
bytes of the autoencoder; `pretended` sends what it has decoded.
Expect: the bytes that codecs say of themselves (`hpcjax table mpcompress/bytes`).
"""

import dataclasses

from configs.mpcompress import sums
from experiments.mpcompress.boundaries import Config
from hpcjax.compress import Autoencoder, Quantizer, RandomK, TopK, equal_bytes
from hpcjax.sharding import PipelineConfig

ROWS, CONTEXT, WIDTH = sums.SHAPE
PIPE = PipelineConfig(stages=2, micro_batches=2)
base = Config(
    devices=2,
    dataset=sums.base.dataset,
    model=sums.base.model,
    optimizer=sums.base.optimizer,
    parallel=PIPE,
    codec=Quantizer(bits=8),
    train=sums.base.train,
)
autoencoder = dataclasses.replace(base, codec=Autoencoder(d=WIDTH // 20))
topk, randomk = (
    dataclasses.replace(
        base,
        codec=equal_bytes(
            codec,
            autoencoder.codec,
            (ROWS // PIPE.micro_batches, CONTEXT, WIDTH),
            "float32",
            where="pipeline",
        ),
    )
    for codec in (TopK(grad="masked"), RandomK(grad="masked"))
)
pretended = dataclasses.replace(
    autoencoder, broken="experiments.mpcompress.controls:pretended_between"
)
smoke = {
    "model.width": "16",
    "model.heads": "2",
    "model.depth": "2",
    "dataset.context": "24",
}
