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

    sizes: tuple[Size, ...] = ("small", "large")
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "sizes must name small or large"
        checks.require(bool(self.sizes), rule, sizes=self.sizes)


def list_names(cfg: Config) -> list[str]:
    """Returns the names of the networks."""
    return [
        name
        for name in cost.NETWORKS
        if ("large" if name.endswith(_LARGE) else "small") in cfg.sizes
    ]


def outline(cfg: Config) -> "runs.Outline":
    """Returns the form of a result."""
    names = (
        *("dollars", "off", "unshared", "copper", "endpoints", "diameter"),
        *("bisection", "alltoall", "allreduce", "in_order"),
    )
    return runs.outline(dict.fromkeys(names, "network"), network=list_names(cfg))


def run(cfg: Config, ctx: "runs.Context | None") -> "runs.Dataset":
    """Computes a network's bill by its rules and from its graph, and its traffic.

    Returns:
      Of each network: `dollars`; `off`, by how many counting cables and switches of the
      graph differs; `unshared`, the same if no lines shared switches;
      `copper`, the price if fibre cost as little; `endpoints`; `diameter` in links;
      shares of the injection bandwidth in percent: `bisection`, `alltoall`, `allreduce`
      around its cycles, and `in_order`, around one ring in the order of numbers.
    """
    del ctx
    names = list_names(cfg)
    found = [_describe(cost.NETWORKS[name]) for name in names]
    return runs.analytical(
        {name: ("network", [each[name] for each in found]) for name in found[0]},
        coords={"network": names},
    )


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
