"""GraphSAGE on a graph that a process may not have in memory; two minutes a run.

Two million vertices of 128 features and 20 million edges, 1.3 GB, drawn and written in
pieces; a process may take half of it. One epoch of 50,000 targets.
Expect: it ends with a fifth resident, and `sampled_graph` with a MemoryError
(`hpcjax table marius/memory`).
"""

import dataclasses

from configs.train import sampled
from experiments.marius.memory import Config
from hpcjax.data import CommunityGraphConfig, PartitionedGraphConfig, SampledGraphConfig

GRAPH = CommunityGraphConfig(
    vertices=2_000_000, degree=10.0, width=128, labelled=50_000, held=500
)
_OWN = {"source": GRAPH, "block": 500, "fanouts": (5, 5)}
STEPS = 100

base = Config(
    dataset=PartitionedGraphConfig(**_OWN, partitions=64, capacity=13),
    model=sampled.base.model,
    optimizer=sampled.base.optimizer,
    train=dataclasses.replace(sampled.base.train, steps=STEPS, eval_every=STEPS),
)
memory = dataclasses.replace(base, dataset=SampledGraphConfig(**_OWN))
resident = dataclasses.replace(
    base, dataset=dataclasses.replace(base.dataset, capacity=64)
)
