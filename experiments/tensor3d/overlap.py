"""How much of the communication two independent pieces of a batch hide."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from hpcjax import cost, runs
from hpcjax.core import config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """Equal layers on a device of two queues, see `cost.overlap_pieces`.

    Attributes:
      layers: how many.
      ratios: of the products' time to the all-reduces'.
      pieces: of the batch.
      early: whether dx is summed while dW is computed.
      in_turn: whether a piece waits for the one before, a control.
      seed: is not used.
    """

    smoke: ClassVar[Mapping[str, str]] = {"layers": "3"}
    figures: ClassVar[Mapping[str, str]] = {
        "exposed": "ratio: time without computation, over one piece's"
    }

    layers: config.Size = 24
    ratios: tuple[float, ...] = (0.5, 0.75, 1.0, 1.5, 2.0)
    pieces: config.Size = 2
    early: bool = False
    in_turn: bool = False
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns the ratios of the products' time to the all-reduces'."""
        return {"ratio": self.ratios}


@runs.analytical
def run(cfg: Config) -> "runs.Figures":
    """Hides what is sent of several pieces, and of one."""
    one, several = (
        [
            cost.overlap_pieces(
                cfg.layers, ratio, pieces=pieces, early=cfg.early, in_turn=cfg.in_turn
            ).exposed
            for ratio in cfg.ratios
        ]
        for pieces in (1, cfg.pieces)
    )
    return {"exposed": [b / a for a, b in zip(one, several, strict=True)]}
