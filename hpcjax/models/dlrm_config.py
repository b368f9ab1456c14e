"""Config of DLRM; importing this module imports no JAX."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar

from hpcjax.core.config import Size
from hpcjax.core.objective import Objective
from hpcjax.models.model_config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class DlrmConfig(ModelConfig):
    """The deep learning recommendation model, see `models.dlrm`.

    Attributes:
      width: of a row of the table.
      bottom: widths of the hidden layers that see the numbers; one of `width` follows.
      top: widths of the hidden layers that see the interactions.
    """

    factory: ClassVar[str] = "hpcjax.models._dlrm:dlrm"
    smoke: ClassVar[Mapping[str, str]] = {"width": "4", "bottom": "[5]", "top": "[6]"}

    width: Size = 48
    bottom: tuple[Size, ...] = (512, 256, 64)
    top: tuple[Size, ...] = (1024, 1024, 1024, 256, 128)

    @classmethod
    def takes(cls, objective: Objective) -> bool:
        """Says whether it is of clicks."""
        return objective.name == "clicks"
