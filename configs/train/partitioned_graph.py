"""Any parts together, on a graph in files of which a part is in memory; half a minute.

`hpcjax run train/partitioned_graph dataset.partitions=64 dataset.capacity=16`, or of
any other source of vertices.
Expect: 97 % of a drawn graph's validation part, a quarter of it resident, from 61 %
without its edges.
"""

import dataclasses

from configs.train import sampled
from hpcjax.data import CommunityGraphConfig, PartitionedGraphConfig

base = dataclasses.replace(
    sampled.base,
    dataset=PartitionedGraphConfig(
        source=CommunityGraphConfig(labelled=2_000, held=1_000), block=256
    ),
)
