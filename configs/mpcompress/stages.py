"""The language model of `mpcompress/layers` in two stages, with codecs; 30 s a run.

Needs `hpcjax data fetch kjv`. `base` is trained before; `tuned` and what follows go on
from a run of it (`--resume ID --fork --devices 2`), `whole` in one piece. Top-k and
Random-k send the bytes of the autoencoder, `ratio` is Top-k with as many numbers. With
`parallel.tensor=2 --devices 4` sums within stages have the codec, too.
Expect: 8 and 4 bits cost nothing, an autoencoder less than Top-k of its bytes (`hpcjax
table mpcompress/accuracy`, `mpcompress/grid`).
"""

import dataclasses

from configs.mpcompress import layers
from hpcjax.compress import (
    Autoencoder,
    Quantizer,
    RandomK,
    TopK,
    equal_bytes,
    equal_ratio,
)
from hpcjax.sharding import PipelineConfig

needs = ("kjv",)
BEFORE, STEPS, MICRO_BATCHES = 900, 100, 2
HELD_OUT = 0.01
ROWS, CONTEXT, WIDTH = layers.SHAPE
SHAPE = ROWS // MICRO_BATCHES, CONTEXT, WIDTH  # what passes between the stages at once


def _train(cfg, steps, **fields):
    train = dataclasses.replace(cfg.train, steps=steps, eval_every=steps)
    return dataclasses.replace(cfg, train=train, **fields)


_dataset = dataclasses.replace(layers.base.dataset, validation=HELD_OUT)
base = _train(layers.base, BEFORE, parallel=None, dataset=_dataset)
tuned = _train(
    base,
    BEFORE + STEPS,
    optimizer=layers.tuned.optimizer,
    parallel=PipelineConfig(stages=2, micro_batches=MICRO_BATCHES),
)
whole = dataclasses.replace(tuned, parallel=None)


def _with(codec, **fields):
    return dataclasses.replace(tuned, codec=dataclasses.replace(codec, **fields))


eight, four, two = (_with(Quantizer(bits=bits)) for bits in (8, 4, 2))
autoencoder, wide = (_with(Autoencoder(d=WIDTH // of)) for of in (20, 10))
topk, randomk = (
    _with(
        equal_bytes(codec, autoencoder.codec, SHAPE, "float32", where="pipeline"),
        grad="masked",
    )
    for codec in (TopK(), RandomK())
)
ratio = _with(equal_ratio(TopK(), autoencoder.codec, SHAPE), grad="masked")
smoke = {"parallel": "none", "codec": "none", "dataset.context": "8"}
