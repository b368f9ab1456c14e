"""Config of the U-Net; importing this module imports no JAX."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from hpcjax.core.config import Size
from hpcjax.core.objective import Numbers, Objective
from hpcjax.models.model_config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class UNetConfig(ModelConfig):
    """A U-Net, logits for each pixel, see `models.unet`.

    Attributes:
      depth: how often the image is halved; 2^depth has to divide its sides.
      width: channels of the first level, doubled at each halving.
      space: mesh axes over which height and width are cut; `parallel=spatial` sets it.
    """

    factory: ClassVar[str] = "hpcjax.models._unet:unet"
    smoke: ClassVar[Mapping[str, str]] = {"depth": "1", "width": "2"}

    depth: Size = 3
    width: Size = 16
    space: tuple[str | None, ...] = ()

    @classmethod
    def takes(cls, objective: Objective) -> bool:
        """Says whether it is of numbers for each pixel."""
        return (objective.inputs, objective.outputs) == (
            Numbers(rank=3),
            Numbers(rank=3),
        )
