"""What orders of partitions do to a graph: how far apart its parts are, and reads."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from hpcjax import runs
from hpcjax.core import config
from hpcjax.data import LinksConfig

_BETA: dict[str, Any] = {"order": "beta", "partitions": 16, "capacity": 4}
_COMET: dict[str, Any] = {"order": "comet"}
_HALF: dict[str, Any] = {"order": "comet", "capacity": 8, "group": 4}
POLICIES: dict[str, dict[str, Any]] = {
    "BETA": _BETA,
    "COMET": _COMET,
    "COMET, half the memory": _HALF,
}
FILE = ", sorted ids"  # in the place of random ones
ROWS = (*POLICIES, f"BETA{FILE}", f"COMET{FILE}")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A knowledge graph, of which a quarter is resident, and draws of orders.

    Attributes:
      links: the graph; its order is not used.
      ranges: of numbers that are told apart.
      draws: of permutations of ids, and of orders.
      seed: of all draws.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        **{"links.source": "nations", "ranges": "4", "draws": "2"},
    }
    figures: ClassVar[Mapping[str, str]] = {
        "bias": "policy draw: edge permutation bias B, 0 to 1",
        "groups": "policy draw: effective groups D of a state's edges",
        "reads": "policy draw: of an epoch over all vertices, with the first load",
    }

    links: LinksConfig = LinksConfig(permuted=False)
    ranges: config.Size = 64
    draws: config.Size = 10
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"policy": ROWS, "draw": range(self.draws)}


@runs.simulated
def run(cfg: Config, ctx: "runs.Context") -> Mapping[str, Any]:
    """Draws orders of an epoch, and counts; nothing is trained."""
    links = cfg.links.read(ctx.data_root)
    shape = len(ROWS), cfg.draws
    found = {name: np.zeros(shape) for name in cfg.figures}
    for draw in range(cfg.draws):
        rng = np.random.Generator(np.random.Philox([cfg.seed, draw]))
        order = rng.permutation(links.entities)
        for row, name in enumerate(ROWS):
            policy, plain = name.removesuffix(FILE), name.endswith(FILE)
            edges = links.train[:, ::2]
            cell = _measure(policy, edges if plain else order[edges], links, cfg, draw)
            for figure, value in zip(found, cell, strict=True):
                found[figure][row, draw] = value
    return found


def _measure(
    policy: str, edges: np.ndarray, links: Any, cfg: Config, draw: int
) -> tuple[float, float, float]:
    """Returns B, D and reads of one order."""
    from hpcjax import graphs

    order = LinksConfig(**POLICIES[policy]).draw(cfg.seed, draw)
    counts = graphs.incident_counts(order, edges, links.entities, cfg.ranges)
    groups = np.average(graphs.effective_groups(counts), weights=counts.sum(1))
    reads = order.states.shape[1] + graphs.count_swaps(order.states)
    bias = graphs.edge_permutation_bias(counts).max()
    return bias, groups, reads / len(order.buckets)
