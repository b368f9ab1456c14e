"""Images without equal pixels, of which a largest one would be a matter of rounding."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import ClassVar

from hpcjax import data
from hpcjax.core.config import Config, Size
from hpcjax.core.objective import Objective
from hpcjax.data.objectives import CLASSIFICATION


@dataclasses.dataclass(frozen=True, kw_only=True)
class NoiseConfig(Config):
    """Random images of 10 classes.

    Attributes:
      count: how many.
      size: height and width.
    """

    objective: ClassVar[Objective] = CLASSIFICATION
    smoke: ClassVar[Mapping[str, str]] = {}

    count: Size = 64
    size: Size = 32

    def load(self, root: pathlib.Path | None = None) -> "data.Dataset":
        """Returns them, of 3 channels; `root` is not used."""
        del root
        return data.noise_images(self.count, (self.size, self.size, 3), 10)
