"""How a network is fitted to a field; importing this module imports no JAX."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

from hpcjax.core import checks
from hpcjax.core.config import Config, Positive, Size


@dataclasses.dataclass(frozen=True, kw_only=True)
class FitConfig(Config):
    """The training of a network that becomes a file, see `compress`.

    Attributes:
      steps: of Adam, whose rate falls to zero along a cosine.
      batch_size: points of a step, a power of two, for which Sobol's are even.
      learning_rate: the first one.
      clip: largest norm of a gradient.
      scaling: of values in (−1, 1): 0.7 times the range of each level around its
        middle, or the geopotential's mean and deviation by pressure.
      precision: of what is stored: "mixed" has residual blocks in float16 and the first
        and last layer in float32, "half" has all in float16.
    """

    smoke: ClassVar[Mapping[str, str]] = {"steps": "2", "batch_size": "64"}

    steps: Size = 2000
    batch_size: Size = 4096
    learning_rate: Positive = 3e-4
    clip: Positive = 0.5
    scaling: Literal["range", "pressure"] = "range"
    precision: Literal["mixed", "half"] = "mixed"

    def __post_init__(self) -> None:
        super().__post_init__()
        size = self.batch_size
        rule = "batch_size must be a power of two"
        checks.require(size & (size - 1) == 0, rule, batch_size=size)
