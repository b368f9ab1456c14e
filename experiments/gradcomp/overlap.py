"""How much of the communication a backward pass in segments hides, measured."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from experiments.gradcomp.chain import ChainConfig
from hpcjax import cost, hostcomm, runs
from hpcjax.core import config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A chain, and the processes among which its gradients are averaged.

    Attributes:
      chain: its sizes; a layer's gradients are one bucket.
      processes: that compute at the same time.
      share: how long sending takes alone, in backward passes; sets the links' rate.
      rounds: of which medians are taken.
      seed: of parameters and data.
    """

    smoke: ClassVar[Mapping[str, str]] = {"rounds": "1"}
    figures: ClassVar[Mapping[str, str]] = {
        "computing": "round: seconds without sending",
        "sending": "round: seconds without computing",
        "both": "round: seconds, at a time",
        "afterwards": "round: seconds, one after the other",
        "rate": ": bytes/s of a link",
        "backward": ": seconds of the backward pass",
    }

    # Long passes, so that links are slow and pieces of messages take milliseconds: a
    # thread that sends is woken late while all cores compute.
    chain: ChainConfig = ChainConfig(rows=8192)
    processes: config.Several = 2
    share: config.Positive = 1.0
    rounds: config.Size = 5
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {"round": range(self.rounds)}


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Measures a backward pass, makes links as slow as that, and measures steps."""
    from experiments.gradcomp import ranks

    found, *_ = runs.in_processes(ranks.passes, cfg, cfg.processes)
    backward = found["backward_s"]
    sent = cost.Dense().sent_bytes(cfg.chain.shapes, cfg.processes)
    rate = sent / (cfg.share * backward)
    link = hostcomm.Link(rate=rate)
    seconds, *_ = runs.in_processes(ranks.overlap, cfg, cfg.processes, link=link)
    columns = {name: ("round", values) for name, values in seconds.items()}
    return runs.measured({**columns, "rate": rate, "backward": backward})
