"""Config of the coordinate network; importing this module imports no JAX."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, ClassVar

from hpcjax.core.config import Config, Count, Positive, Seed, Size

if TYPE_CHECKING:
    from hpcjax.core.model import Model


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoordNetConfig(Config):
    """A network of a point's coordinates, see `models.coord_net`.

    Attributes:
      width: of the residual blocks.
      depth: how many residual blocks there are.
      time_features: frequencies of the time; twice as many inputs.
      level_features: frequencies of the pressure; 0 for a field of one level.
      place_features: frequencies of the place on the sphere.
      sigma: deviation of the random frequencies.
      time_scale: steps of time that are a unit.
      feature_seed: of the frequencies, which are drawn again and not stored.
    """

    factory: ClassVar[str] = "hpcjax.models._coord_net:coord_net"
    smoke: ClassVar[Mapping[str, str]] = {"width": "4", "depth": "1"}

    width: Size = 512
    depth: Size = 12
    time_features: Count = 16
    level_features: Count = 128
    place_features: Size = 128
    sigma: Positive = 1.6
    time_scale: Positive = 60.0
    feature_seed: Seed = 0

    if TYPE_CHECKING:

        def make(self) -> "Model":
            """Builds the model."""
            ...
