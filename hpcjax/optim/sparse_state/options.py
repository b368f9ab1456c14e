"""Options of compressed training state; importing this module imports no JAX."""

import dataclasses
from typing import Annotated, Literal

from hpcjax.core.config import Above, AtLeast, Config, Positive, Share, Size

Index = Literal["int32", "bitmap"]
Mode = Literal["dense", "rematerialize"]
INDICES = ("int32", "bitmap")
MODES = ("dense", "rematerialize")


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
    """

    start: Positive = 2.0**15
    growth: Annotated[float, Above(1)] = 2.0
    every: Size = 2000
    backoff: Share = 0.5
    least: Annotated[float, AtLeast(1.0)] = 1.0
