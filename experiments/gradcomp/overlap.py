"""How much of the communication a backward pass in segments hides, measured."""

import dataclasses
from typing import TYPE_CHECKING, Any

from experiments.gradcomp.chain import ChainConfig
from hpcjax.core import checks
from hpcjax.runs.config import check_seed

if TYPE_CHECKING:
    import xarray as xr

    from hpcjax.runs.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A chain, and the processes among which its gradients are averaged.

    Attributes:
      chain: its sizes; a layer's gradients are one bucket.
      processes: that compute at the same time.
      share: how long sending takes alone, in backward passes; sets the links' rate.
      rounds: of which medians are taken.
      seed: of parameters and data.
    """

    # Long passes, so that links are slow and pieces of messages take milliseconds: a
    # thread that sends is woken late while all cores compute.
    chain: ChainConfig = ChainConfig(rows=8192)
    processes: int = 2
    share: float = 1.0
    rounds: int = 5
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        checks.require_count(2, processes=self.processes)
        checks.require_count(1, rounds=self.rounds)
        checks.require_positive(share=self.share)


def sizes(cfg: Any) -> dict[str, int]:
    """Returns what a process needs to make its chain."""
    return {**dataclasses.asdict(cfg.chain), "seed": cfg.seed}


def run(cfg: Config, ctx: "Context") -> "xr.Dataset":
    """Measures a backward pass, makes links as slow as that, and measures steps.

    Returns:
      Seconds [round]: `computing` without sending, `sending` without computing, `both`;
      `rate`, bytes/s of a link; `backward`, seconds of the backward pass.
    """
    import xarray as xr

    from experiments.gradcomp import ranks
    from hpcjax import hostcomm, perf

    found, *_ = hostcomm.launch(
        ranks.passes, cfg.processes, arguments=(sizes(cfg), cfg.rounds)
    )
    backward = found["backward_s"]
    sent = perf.Dense().sent_bytes(cfg.chain.shapes, cfg.processes)
    rate = sent / (cfg.share * backward)
    seconds, *_ = hostcomm.launch(
        ranks.overlap,
        cfg.processes,
        link=hostcomm.Link(rate=rate),
        arguments=(sizes(cfg), cfg.rounds),
    )
    columns = {name: ("round", values) for name, values in seconds.items()}
    return xr.Dataset({**columns, "rate": rate, "backward": backward})
