"""Config of VGG networks; importing this module imports no JAX."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

from hpcjax.core.config import Size
from hpcjax.core.objective import Numbers, Objective
from hpcjax.models.model_config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class VggConfig(ModelConfig):
    """A VGG network with batch norms, see `models.vgg`.

    Attributes:
      depth: 11 or 16.
      width: channels of the first stage.
      sync_axis: mesh axis over which batch statistics are averaged; None for those of
        one device.
    """

    factory: ClassVar[str] = "hpcjax.models._vgg:vgg"
    smoke: ClassVar[Mapping[str, str]] = {"depth": "11", "width": "1"}

    depth: Literal[11, 16] = 16
    width: Size = 64
    sync_axis: str | None = None

    @classmethod
    def takes(cls, objective: Objective) -> bool:
        """Says whether it is of numbers for each image."""
        return (objective.inputs, objective.outputs) == (
            Numbers(rank=3),
            Numbers(rank=1),
        )
