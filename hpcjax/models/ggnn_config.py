"""Config of gated graph networks; importing this module imports no JAX."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from hpcjax.core import checks
from hpcjax.core.config import Size, Within
from hpcjax.core.objective import Objective
from hpcjax.models.model_config import ModelConfig

_READOUTS = {"programs": "vertex", "algorithms": "graph"}  # of objectives


@dataclasses.dataclass(frozen=True, kw_only=True)
class GgnnConfig(ModelConfig):
    """A gated graph network of programs, see `models.ggnn`.

    Attributes:
      width: of an embedding, even; states have two entries more, for the root.
      steps: of message passing, which share their parameters.
      gate: whether positions gate states before the linear map of messages, as the
        paper says, or messages after it, as its released code does.
      positions: whether there is a gate.
      backward: whether messages go against edges too, with maps of their own.
      readout: whether logits are of vertices, or summed over those of each graph, of
        which examples must have the numbers.
      dropout: share of states that are zero after each step of a training pass.
      root_rows: share of their usual deviation with which the answer's weights of the
        root's two entries, 50 or 0, are drawn. Of 1 logits begin at ±5, behind gates
        some of which begin closed, and a closed one hardly opens again.
    """

    factory: ClassVar[str] = "hpcjax.models._ggnn:ggnn"
    smoke: ClassVar[Mapping[str, str]] = {"width": "4", "steps": "2"}

    width: Size = 32
    steps: Size = 12
    gate: Literal["pre", "post"] = "pre"
    positions: bool = True
    backward: bool = True
    readout: Literal["vertex", "graph"] = "vertex"
    dropout: Annotated[float, Within("[0, 1)")] = 0.0
    root_rows: Annotated[float, Within("[0, 1]")] = 1.0

    def __post_init__(self) -> None:
        super().__post_init__()
        good = self.width % 2 == 0
        checks.require(good, "width must be even, as waves are pairs", width=self.width)

    @classmethod
    def takes(cls, objective: Objective) -> bool:
        """Says whether it is of programs, or of their vertices."""
        return objective.name in _READOUTS

    def check_objective(self, objective: Objective) -> None:
        """Raises ConfigError if logits are of something else than what is scored."""
        wanted = _READOUTS[objective.name]
        rule = f"model.readout must be {wanted} for what is learnt, {objective.name}"
        checks.require(self.readout == wanted, rule, readout=self.readout)
