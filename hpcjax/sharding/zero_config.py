"""Config of ZeRO; importing this module imports no JAX."""

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Literal

from hpcjax.core.config import Config, Patterns

if TYPE_CHECKING:
    from hpcjax.core.method import Parallel, RunShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class ZeroConfig(Config):
    """ZeRO: the state of data-parallel training spread over the devices.

    Attributes:
      stage: 1 spreads the optimizer's state; 2 gradients and parameters too, which are
        gathered once a step; 3 gathers those of a layer when it is computed, and again
        in the backward pass.
      stacked: regexes of parameters whose first axis is a stack of layers; none for
        those of the model. A model of one's own gathers a layer's by `core.realize`, in
        the body of its scan.
    """

    claims: ClassVar[tuple[str, ...]] = ("mean", "parameters")
    figures: ClassVar[dict[str, str]] = {"replicated": ""}

    stage: Literal[1, 2, 3] = 3
    stacked: Patterns = ()

    def build(self, setup: "RunShape") -> "Parallel":
        """Returns how the model of a run is spread.

        Raises:
          ConfigError: an entry of `stacked` matches no parameter.
        """
        from hpcjax.sharding.zero import spread_state

        return spread_state(setup.model, setup.devices, self.stage, self.stacked)
