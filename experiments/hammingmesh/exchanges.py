"""What the network does to the choice of an exchange: seconds, and dollars."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from experiments.gradcomp.methods import HALF
from experiments.gradcomp.networks import NETWORKS, shapes_of
from hpcjax import collectives, cost, hostcomm, runs
from hpcjax.core import checks, config

METHODS: "Mapping[str, cost.PricedExchange]" = {
    "dense": cost.Dense(overlapped=False),
    HALF.label: dataclasses.replace(HALF, overlapped=False),
    "PowerSGD": cost.Exchanged(
        name="PowerSGD", exchange=collectives.PowerSgdConfig(rank=4)
    ),
    "Ok-Topk": cost.Exchanged(
        name="Ok-Topk", exchange=collectives.OkTopkConfig(density=0.01)
    ),
}
GBIT = 1e9 / 8


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """Networks, models, and the links.

    Attributes:
      networks: of `cost.NETWORKS`.
      models: whose gradients are exchanged.
      gbit_per_s: of a link; an accelerator has 16.
      hop_s: seconds that a message takes for a link with its switch.
      seed: for the form only, nothing is drawn.
    """

    smoke: ClassVar[Mapping[str, str]] = {"models": "[resnet8]"}
    figures: ClassVar[Mapping[str, str]] = {
        "seconds": "network model exchange: of one exchange of all gradients",
        "bytes_s": "network model exchange: seconds of the bytes without the latency",
        "dollars": "network: of its bill",
        "megabytes": "model: of its gradients",
    }

    networks: tuple[str, ...] = ("hx2mesh", "fat_tree", "torus")
    models: tuple[str, ...] = ("resnet50", "bert_base")
    gbit_per_s: config.Positive = 400.0
    hop_s: config.NotNegative = 8e-8
    seed: config.Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        for field, known in (("networks", cost.NETWORKS), ("models", NETWORKS)):
            names = getattr(self, field)
            checks.require(bool(names), f"{field} must not be empty", given=names)
            for name in names:
                checks.require_choice(field, name, tuple(known))

    def labels(self) -> "runs.Labels":
        """Returns what is compared."""
        return {"network": self.networks, "model": self.models, "exchange": METHODS}


@runs.analytical
def run(cfg: Config) -> "runs.Figures":
    """Prices one exchange of a model's gradients over all accelerators."""
    networks = [cost.NETWORKS[name] for name in cfg.networks]
    work = [cost.Workload(shapes=shapes_of(m), backward_s=0.0) for m in cfg.models]

    def seconds(hop_s: float) -> list[list[list[float]]]:
        systems = [_system(cfg, network, hop_s) for network in networks]
        return [
            [[_price(method, each, s) for method in METHODS.values()] for each in work]
            for s in systems
        ]

    return {
        "seconds": seconds(cfg.hop_s),
        "bytes_s": seconds(0.0),
        "dollars": [each.bill().dollars() for each in networks],
        "megabytes": [4e-6 * each.size for each in work],
    }


def _system(cfg: Config, network: "cost.Network", hop_s: float) -> "cost.System":
    rate = 16 * cfg.gbit_per_s * GBIT
    return cost.System(
        processes=network.accelerators,
        link=hostcomm.MessageCost.of_rate(rate, hop_s),
        hops="counted",
        network=network,
    )


def _price(
    method: "cost.PricedExchange", work: "cost.Workload", system: "cost.System"
) -> float:
    plan = method.plan(work, system.processes)
    return system.seconds([*plan.beside, *plan.after])
