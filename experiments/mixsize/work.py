"""Steps and pixels of an epoch of several sizes, by the rule alone."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

from hpcjax import data, runs
from hpcjax.core import config

MODES = ("none", "B+", "D+", "B+D+")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """Sizes, and how many images an epoch has.

    Attributes:
      examples: of the training set.
      batch_size: images of a batch at the base size.
      base_size: in pixels.
      sizes: that are trained on.
      probs: the share of each.
      seed: is not used.
    """

    smoke: ClassVar[Mapping[str, str]] = {"examples": "20000"}
    figures: ClassVar[Mapping[str, str]] = {
        "steps": "mode: of an epoch",
        "pixels": "mode: of an epoch, over those of the base size alone",
        "apart": "mode: the most that a step's pixels are from the base's, a share",
    }

    examples: config.Size = 50_000
    batch_size: config.Size = 64
    base_size: config.Size = 32
    sizes: tuple[config.Size, ...] = (32, 48, 24, 16)
    probs: tuple[config.Fraction, ...] = (0.3, 0.2, 0.3, 0.2)
    seed: config.Seed = 0

    def labels(self) -> "runs.Labels":
        """Returns the modes."""
        return {"mode": MODES}


@runs.analytical
def run(cfg: Config) -> "runs.Figures":
    """Counts the slots of an epoch's plan."""
    found: dict[str, list[float]] = {"steps": [], "pixels": [], "apart": []}
    base = cfg.batch_size * cfg.base_size**2
    counted: Any = _Counted(cfg.examples)
    for mode in MODES:
        alone: dict[str, Any] = {"sizes": (cfg.base_size,), "probs": (1.0,)}
        mixed: dict[str, Any] = {"sizes": cfg.sizes, "probs": cfg.probs}
        own = mixed if mode != "none" else alone
        made = data.MixedSizesConfig(base_size=cfg.base_size, mode=mode, **own)
        plan = data.MixedSizes(counted, made).plan(cfg.batch_size, 0, 0)
        pixels = [s.copies * len(s.indices) * s.size**2 / base for s in plan]
        found["steps"].append(len(plan))
        found["pixels"].append(sum(pixels) / (cfg.examples // cfg.batch_size))
        found["apart"].append(max(abs(each - 1) for each in pixels))
    return found


class _Counted:
    """Stands for a data set of which only the number of examples is known."""

    def __init__(self, examples: int) -> None:
        self.train: Any = range(examples)
