"""GraphSAGE on a graph in files, of which a part is in memory; a quarter minute a run.

60,000 vertices of ten classes, drawn, with 25 neighbours in the mean; 8,000 are trained
on, for five epochs. Of two kinds of features: those that tell the class of 97 % of the
vertices alone, and weak ones, of 61 %.
Expect: 45 % resident lose less than 1.5 points to memory, a quarter of weak features
many (`hpcjax table marius/nodes`).
"""

from dataclasses import replace

from configs.train import sampled
from hpcjax.data import (
    CommunityGraphConfig,
    PartitionedGraphConfig,
    SampledGraphConfig,
)

_EPOCH = 32  # blocks of 256
_STRONG = CommunityGraphConfig(
    vertices=60_000,
    homophily=0.4,
    noise=0.26,
    labelled=8_000,
    held=2_000,
    holdout="test",
)
_WEAK = replace(_STRONG, noise=0.55)


def _of(source, capacity=None, layer="sage", **given):
    parts = {"source": source, "block": 256}
    own = SampledGraphConfig(**parts)
    if capacity:
        own = PartitionedGraphConfig(**parts, partitions=64, capacity=capacity, **given)
    steps = 5 * _EPOCH
    train = replace(sampled.base.train, steps=steps, eval_every=steps)
    model = replace(sampled.base.model, layer=layer)
    return replace(sampled.base, dataset=own, model=model, train=train)


base = resident = _of(_STRONG, 29)
quarter = _of(_STRONG, 16)
memory = _of(_STRONG)
still = _of(_STRONG, 29, order="one_fill", relabel="classes")
alone = _of(_STRONG, layer="mlp")
weak_quarter = _of(_WEAK, 16)
weak_memory = _of(_WEAK)
