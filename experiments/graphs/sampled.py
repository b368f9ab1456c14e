"""How many edges samplers list for a batch of targets, and how long they take."""

import dataclasses
import time
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar

import numpy as np

from hpcjax import runs
from hpcjax.core import config
from hpcjax.core.parts import Part
from hpcjax.data import PropertyGraphConfig

SAMPLERS = ("dense", "layerwise")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A graph, and what is sampled of it.

    Attributes:
      source: the graph, a part whose examples are vertices.
      fanout: most neighbours of a vertex, in each layer.
      hops: numbers of layers.
      batches: numbers of targets.
      repetitions: batches of each size.
      seed: of targets and draws.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "source": "community_graph",
        "source.vertices": "60",
        "batches": "[5]",
        "repetitions": "2",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "edges": "sampler layers batch repetition: that are listed",
        "seconds": "sampler layers batch repetition: to sample",
    }

    source: Annotated[Any, Part("dataset")] = PropertyGraphConfig(
        source="wordnet", target="lexicographer", information="labels"
    )
    fanout: config.Size = 20
    hops: tuple[config.Size, ...] = (1, 2, 3)
    batches: tuple[config.Size, ...] = (100, 1000, 5000)
    repetitions: config.Size = 5
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {
            "sampler": SAMPLERS,
            "layers": self.hops,
            "batch": self.batches,
            "repetition": range(self.repetitions),
        }


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Samples the same targets with both samplers, in turns."""
    from hpcjax import graphs

    csr = graphs.Csr.of(cfg.source.load(ctx.data_root).graph)
    builders = graphs.dense_blocks, graphs.layerwise_blocks
    shape = (len(SAMPLERS), len(cfg.hops), len(cfg.batches), cfg.repetitions)
    edges, seconds = np.zeros(shape), np.zeros(shape)
    rng = np.random.Generator(np.random.Philox(cfg.seed))
    for place in np.ndindex(shape[1:]):
        hops, batch = cfg.hops[place[0]], cfg.batches[place[1]]
        targets = rng.permutation(len(csr.degrees))[:batch]
        draw = graphs.Draw(cfg.seed, 0, place[2])
        for number, build in enumerate(builders):
            start = time.perf_counter()
            found = build(csr, (cfg.fanout,) * hops, targets, draw)
            seconds[number, *place] = time.perf_counter() - start
            edges[number, *place] = len(found.senders)
    dims = ("sampler", "layers", "batch", "repetition")
    return runs.measured(
        {"edges": (dims, edges), "seconds": (dims, seconds)},
        coords={
            "sampler": list(SAMPLERS),
            "layers": list(cfg.hops),
            "batch": list(cfg.batches),
        },
    )
