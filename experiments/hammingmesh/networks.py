"""What networks cost, and what bandwidth they have: by rules and by their graphs."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

from hpcjax import cost, runs
from hpcjax.core import checks, config

Size = Literal["small", "large"]
_LARGE = "_16k"
COPPER = cost.Prices()._replace(fibre=cost.Prices().copper)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """Networks that are compared.

    Attributes:
      sizes: "small" of about 1,000 accelerators, "large" of about 16,000.
      seed: for the form only, nothing is drawn.
    """

    smoke: ClassVar[Mapping[str, str]] = {"sizes": "[small]"}
    figures: ClassVar[Mapping[str, str]] = {
        "dollars": "network: of its bill, by its rules",
        "off": "network: dollars by which counting cables and switches differs",
        "unshared": "network: the same, if no lines shared switches",
        "copper": "network: dollars, if fibre cost as little",
        "endpoints": "network: accelerators",
        "diameter": "network: links of the longest way",
        "bisection alltoall": "network: percent of the injection bandwidth",
        "allreduce": "network: likewise, around its cycles",
        "in_order": "network: likewise, around one ring in the order of numbers",
    }

    sizes: tuple[Size, ...] = ("small", "large")
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "sizes must name small or large"
        checks.require(bool(self.sizes), rule, sizes=self.sizes)

    def labels(self) -> dict[str, list[str]]:
        """Returns the names of the networks."""
        sizes = {
            name: "large" if name.endswith(_LARGE) else "small"
            for name in cost.NETWORKS
        }
        return {"network": [name for name in sizes if sizes[name] in self.sizes]}


@runs.analytical
def run(cfg: Config) -> "runs.Figures":
    """Computes a network's bill by its rules and from its graph, and its traffic."""
    found = [_describe(cost.NETWORKS[name]) for name in cfg.labels()["network"]]
    return {name: [each[name] for each in found] for name in found[0]}


def _describe(network: "cost.Network") -> dict[str, float]:
    dollars = network.bill().dollars()
    in_order = (tuple(range(network.accelerators)),)
    shares = {
        "bisection": network.bisection(),
        "alltoall": cost.alltoall_share(network),
        "allreduce": cost.ring_share(network),
        "in_order": cost.ring_share(network, in_order),
    }
    return {
        "dollars": dollars,
        "off": abs(network.count_bill().dollars() - dollars),
        "unshared": abs(network.count_bill(shared=False).dollars() - dollars),
        "copper": network.bill().dollars(COPPER),
        "endpoints": network.accelerators,
        "diameter": cost.diameter(network),
        **{name: 100 * share for name, share in shares.items()},
    }
