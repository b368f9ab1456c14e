"""What a mixture of experts takes on a device, and the largest base, by formulas."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from hpcjax import cost, runs
from hpcjax.core import config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(config.Config):
    """A base model whose every second block has experts, in mixed precision.

    Attributes:
      base: its parameters without experts.
      experts: of a mixture.
      tensor: devices that share a matrix.
      devices: of the machine; as many as experts share these out.
      memory: bytes of a device, for the largest base.
      seed: is not used.
    """

    smoke: ClassVar[Mapping[str, str]] = {"devices": "32"}
    figures: ClassVar[Mapping[str, str]] = {
        "gib": ": of a device, for the base",
        "largest": ": parameters of the largest base that fits",
    }

    base: config.Positive = 6.7e9
    experts: config.Size = 16
    tensor: config.Size = 1
    devices: config.Size = 128
    memory: config.Positive = 16 * 2.0**30
    seed: config.Seed = 0


@runs.analytical
def run(cfg: Config) -> "runs.Figures":
    """Evaluates the formulas for the base, and for the largest that fits."""
    sizes = cfg.experts, cfg.tensor, cfg.experts, cfg.devices
    return {
        "gib": cost.ted_memory_asymptotic(cfg.base, *sizes) / 2**30,
        "largest": cost.largest_base(cfg.memory, *sizes),
    }
