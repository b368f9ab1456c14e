"""GraphSAGE on sampled neighbourhoods of a drawn graph, and on all of it; 1 min a run.

10,000 vertices of ten classes with 25 neighbours in the mean, none to be downloaded.
Expect: with ten neighbours a layer as right as with all, with one not (`hpcjax table
graphs/minibatches`).
"""

import dataclasses

from configs.train import sampled
from hpcjax.data import CommunityGraphConfig, LayerwiseConfig

_GRAPH = CommunityGraphConfig(homophily=0.8, holdout="test")


def _of(dataset, *, batch_size=1, **model):
    train = dataclasses.replace(sampled.base.train, batch_size=batch_size)
    return dataclasses.replace(
        sampled.base,
        dataset=dataset,
        model=dataclasses.replace(sampled.base.model, **model),
        train=dataclasses.replace(train, eval_every=train.steps),
    )


_BLOCKS = dataclasses.replace(sampled.base.dataset, source=_GRAPH)
base = dense = _of(_BLOCKS)
layerwise = _of(dataclasses.replace(_BLOCKS, sampler=LayerwiseConfig()))
single = _of(dataclasses.replace(_BLOCKS, fanouts=(1, 1)))
whole = _of(_GRAPH, batch_size=_BLOCKS.block)
alone = _of(_GRAPH, batch_size=_BLOCKS.block, layer="mlp")
