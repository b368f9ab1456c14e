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

    # Long passes, so that links are slow and pieces of messages take milliseconds: a
    # thread that sends is woken late while all cores compute.
    chain: ChainConfig = ChainConfig(rows=8192)
    processes: config.Several = 2
    share: config.Positive = 1.0
    rounds: config.Size = 5
    seed: config.Seed = 0


def outline(cfg: Config) -> "runs.Outline":
    """Returns the form of a result."""
    of_round = ("computing", "sending", "both", "afterwards")
    return runs.outline(
        dict.fromkeys(of_round, "round") | {"rate": "", "backward": ""},
        round=range(cfg.rounds),
    )


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Measures a backward pass, makes links as slow as that, and measures steps.

    Returns:
      Seconds [round]: `computing` without sending, `sending` without computing, `both`
      at a time, and one `afterwards`;
      `rate`, bytes/s of a link; `backward`, seconds of the backward pass.
    """
    from experiments.gradcomp import ranks

    found, *_ = runs.in_processes(ranks.passes, cfg, cfg.processes)
    backward = found["backward_s"]
    sent = cost.Dense().sent_bytes(cfg.chain.shapes, cfg.processes)
    rate = sent / (cfg.share * backward)
    link = hostcomm.Link(rate=rate)
    seconds, *_ = runs.in_processes(ranks.overlap, cfg, cfg.processes, link=link)
    columns = {name: ("round", values) for name, values in seconds.items()}
    return runs.measured({**columns, "rate": rate, "backward": backward})
