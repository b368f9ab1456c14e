"""Config of the multilayer perceptron; importing this module imports no JAX."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

from hpcjax.core.config import Size
from hpcjax.core.objective import Numbers, Objective
from hpcjax.models.model_config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class MlpConfig(ModelConfig):
    """A multilayer perceptron, see `models.mlp`.

    Attributes:
      widths: sizes of the hidden layers.
      activation: after every hidden layer.
      head_init: kernel of the last layer; with "zeros" the first loss is log(classes).
    """

    factory: ClassVar[str] = "hpcjax.models._mlp:mlp"
    smoke: ClassVar[Mapping[str, str]] = {"widths": "[4]"}

    widths: tuple[Size, ...] = (256,)
    activation: Literal["relu", "tanh", "gelu_tanh"] = "relu"
    head_init: Literal["lecun", "zeros"] = "lecun"

    @classmethod
    def takes(cls, objective: Objective) -> bool:
        """Says whether it is of values, and of numbers for each example."""
        values = isinstance(objective.inputs, Numbers) and not objective.inputs.tokens
        return values and objective.outputs == Numbers(rank=1)
