"""Config of residual networks; importing this module imports no JAX."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

from hpcjax.core.config import Size
from hpcjax.core.objective import Numbers, Objective
from hpcjax.models.model_config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class ResNetConfig(ModelConfig):
    """A residual network, see `models.resnet`.

    Attributes:
      depth: 8, 20, 32 or 44 for small images, 18, 50 or 101 for full-size ones.
      width: channels of the first stage; None means 16 (small images) or 64.
      norm: "batch", or "group" with 16 channels a group.
      shortcut: "A" appends zero channels, "B" projects; None means A for small images
        and B for full-size ones.
      sync_axis: mesh axis over which batch statistics are averaged; None for those of
        one device.
      zero_init_residual: whether each block starts as the identity.
      head_init: kernel of the last layer; with "zeros" the first loss is log(classes).
      space: mesh axes over which height and width are cut; `parallel=spatial` sets it.
    """

    factory: ClassVar[str] = "hpcjax.models._resnet:resnet"
    smoke: ClassVar[Mapping[str, str]] = {"depth": "8", "width": "2"}

    depth: Literal[8, 18, 20, 32, 44, 50, 101] = 8
    width: Size | None = None
    norm: Literal["batch", "group"] = "batch"
    shortcut: Literal["A", "B"] | None = None
    sync_axis: str | None = None
    zero_init_residual: bool = False
    head_init: Literal["lecun", "zeros"] = "lecun"
    space: tuple[str | None, ...] = ()

    @property
    def stride(self) -> int:
        """How many pixels of a side become one, in all; smaller images have none."""
        return 32 if self.depth in (18, 50, 101) else 4

    @classmethod
    def takes(cls, objective: Objective) -> bool:
        """Says whether it is of numbers for each image."""
        return (objective.inputs, objective.outputs) == (
            Numbers(rank=3),
            Numbers(rank=1),
        )
