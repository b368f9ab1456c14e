"""Throughput of many processes, by the event model alone: nothing is measured."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from experiments.eager import scaling
from hpcjax import cost, hostcomm, runs
from hpcjax.core import config
from hpcjax.hostcomm.groups import require_sizes

METHODS = (
    "allreduce", "local_sgd", "dpsgd", "adpsgd", "sgp", "eager", "waiting", "wagma"
)  # fmt: skip


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(scaling.Config):
    """What the event model is given; `processes` are a power of two.

    Attributes:
      group_size: S.
      tau: steps from one mean of all to the next, of WAGMA.
      period: H of local SGD.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "processes": "4",
        "group_size": "2",
        "steps": "5",
        "runs": "2",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "total": "algorithm repetition: seconds",
        "words": "algorithm: sent in a step",
    }

    group_size: int = 8
    tau: config.Size = 10
    period: config.Size = 1

    def __post_init__(self) -> None:
        super().__post_init__()
        require_sizes(self.group_size, processes=self.processes)

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"algorithm": METHODS, "repetition": self.runs}


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Follows the clocks of all workers."""
    compute, message = scaling.draw(cfg), hostcomm.MessageCost(cfg.alpha, cfg.beta)
    found = [_one(cfg, method, compute, message) for method in METHODS]
    return runs.simulated(
        {
            "total": (("algorithm", "repetition"), [total for total, _ in found]),
            "words": ("algorithm", [words for _, words in found]),
        },
        coords={"algorithm": list(METHODS)},
    )


def _one(
    cfg: Config, method: Any, compute: np.ndarray, message: "hostcomm.MessageCost"
) -> tuple[np.ndarray, float]:
    """Returns seconds of all runs, and words of a step."""
    n, ranks = cfg.numbers, cfg.processes
    phases = ranks.bit_length() - 1
    if method == "eager":
        seconds = cost.round_seconds(message, n, ranks)
        times = cost.simulate_rounds(compute, mode="solo", seconds=seconds)
        return times.total(), float(n * phases)
    if method in ("wagma", "waiting"):
        width, of_one = cfg.group_size.bit_length() - 1, message.seconds(4.0 * n)
        avoiding = method == "wagma"
        total = cost.simulate_groups(
            compute,
            group_size=cfg.group_size,
            tau=cfg.tau,
            seconds=width * of_one + avoiding * phases * message.alpha,
            global_seconds=phases * of_one,
            wait_avoiding=avoiding,
        ).total()
        own = {"group_size": cfg.group_size, "tau": cfg.tau}
        return total, cost.averaging_cost("wagma", n, ranks, **own).words
    spent = cost.averaging_cost(method, n, ranks)
    period = cfg.period if method == "local_sgd" else 1
    leave = cost.simulate_neighbours(
        method, compute, seconds=spent.seconds(message), period=period
    )
    return leave[..., -1, :].max(-1), spent.words / period
