"""GraphSAGE and GCN on neighbours from the store and from a snapshot; 30 s a run.

Expect: as right from a snapshot as from the store, and less right from one of two
neighbours that is never renewed (`hpcjax table graphsnapshot/accuracy`).
"""

import dataclasses

from configs.graphs import minibatches
from hpcjax.data import CommunityGraphConfig, SnapshotConfig
from hpcjax.graphs import FullBatch, FullRefresh, OnTheFly

_GRAPH = CommunityGraphConfig(vertices=20_000, homophily=0.4, holdout="test")
_NEVER = 1_000_000


def _of(policy, layer="sage", fanouts=(10, 10), threshold=30):
    sampler = SnapshotConfig(policy=policy, threshold=threshold)
    blocks = minibatches.dense.dataset
    return dataclasses.replace(
        minibatches.dense,
        dataset=dataclasses.replace(
            blocks, source=_GRAPH, sampler=sampler, fanouts=fanouts
        ),
        model=dataclasses.replace(minibatches.dense.model, layer=layer),
    )


base = full = _of(FullBatch())
fcr = _of(FullRefresh())
fly = _of(OnTheFly(fetch="partial"))
never = _of(FullRefresh(period=_NEVER))
_TWO = {"fanouts": (2, 2), "threshold": 0}
_STILL = FullRefresh(alpha=1.0, period=_NEVER)
frozen = _of(_STILL, **_TWO)
alone = _of(FullBatch(), "mlp")
gcn, gcn_fcr = _of(FullBatch(), "gcn"), _of(FullRefresh(), "gcn")
gcn_fly = _of(OnTheFly(fetch="partial"), "gcn")
gcn_frozen = _of(_STILL, "gcn", **_TWO)
