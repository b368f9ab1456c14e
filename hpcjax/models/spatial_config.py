"""Configs of networks that predict fields; importing this module imports no JAX."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

from hpcjax.core import checks
from hpcjax.core.config import Positive, Several, Size
from hpcjax.core.objective import Numbers, Objective
from hpcjax.layers.routing_config import Damping, RoutingLoss
from hpcjax.models.model_config import ModelConfig

FIELD = Numbers(rank=3)


@dataclasses.dataclass(frozen=True, kw_only=True)
class FieldConfig(ModelConfig):
    """Base of networks that give numbers for each point of a field, or of an image.

    Attributes:
      kernel_size: height and width of filters, odd.
    """

    kernel_size: Size = 3

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "kernel_size must be odd"
        checks.require(self.kernel_size % 2 == 1, rule, kernel_size=self.kernel_size)

    @classmethod
    def takes(cls, objective: Objective) -> bool:
        """Says whether it is of numbers for each point."""
        return objective.maps(FIELD, FIELD)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CnnConfig(FieldConfig):
    """Convolutions with ReLUs between them, see `models.cnn`.

    Attributes:
      widths: channels of the hidden layers.
      coordinates: whether row and column are channels of the input, too (CoordConv).
      residual: whether it gives the change of its input, none at first.
    """

    factory: ClassVar[str] = "hpcjax.models._spatial:cnn"
    smoke: ClassVar[Mapping[str, str]] = {"widths": "[2]"}

    widths: tuple[Size, ...] = (4,)
    coordinates: bool = False
    residual: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class LocallyConnectedConfig(FieldConfig):
    """A convolution with filters of their own at each point.

    See `models.locally_connected`.
    """

    factory: ClassVar[str] = "hpcjax.models._spatial:locally_connected"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SmoeConfig(FieldConfig):
    """A spatial mixture of experts: at each point other filters, see `models.smoe`.

    Attributes:
      widths: channels of ordinary convolutions before it, each with a ReLU.
      experts: filters to choose from, for each output.
      gate: what chooses: "tensor", a number for each point and expert; or a convolution
        of the input, "conv", with row and column "coord_conv".
      weighted: whether outputs are multiplied by their gates.
      routing_loss: how gates learn; none for by the task's gradient, which there is of
        weighted outputs alone.
      damping: of gradients where errors are large; none for none.
      padding: of the width, "zero" or, on the globe, "periodic".
      products: "dense" for all filters at all points, "gather" for chosen ones alone.
      filter_scale: of the filters' first values, over He's.
      gate_scale: of the first values of a gate that is a tensor, over ±√(3 experts).
    """

    factory: ClassVar[str] = "hpcjax.models._spatial:smoe"

    widths: tuple[Size, ...] = ()
    experts: Several = 3
    gate: Literal["tensor", "conv", "coord_conv"] = "tensor"
    weighted: bool = False
    routing_loss: RoutingLoss | None = RoutingLoss()
    damping: Damping | None = Damping()
    padding: Literal["zero", "periodic"] = "zero"
    products: Literal["dense", "gather"] = "dense"
    filter_scale: Positive = 1.0
    gate_scale: Positive = 1.0

    @classmethod
    def takes(cls, objective: Objective) -> bool:
        """Says whether it is of numbers for each point, or post-processes forecasts."""
        return super().takes(objective) or objective.name == "postprocessing"
