"""The config of a dynamic loss scale; importing this module imports no JAX."""

import dataclasses
from typing import Annotated

from hpcjax.core import checks
from hpcjax.core.config import Above, AtLeast, Config, Positive, Share, Size


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScale(Config):
    """Dynamic scaling of a loss whose gradients are float16.

    The loss is multiplied by a scale, which is divided out of the gradients once they
    are float32. A step with a gradient that is not finite changes nothing but the
    scale.

    Attributes:
      start: the first scale.
      growth: by which the scale is multiplied after `every` good steps in a row.
      every: number of good steps.
      backoff: by which it is multiplied after a bad one.
      least: the smallest scale.
      most: the largest one; None for no limit.
    """

    start: Positive = 2.0**15
    growth: Annotated[float, Above(1)] = 2.0
    every: Size = 2000
    backoff: Share = 0.5
    least: Annotated[float, AtLeast(1.0)] = 1.0
    most: Positive | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        good = self.most is None or self.most >= max(self.start, self.least)
        rule = "most must be at least start and least"
        checks.require(good, rule, most=self.most, start=self.start, least=self.least)
