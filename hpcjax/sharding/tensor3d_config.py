"""Config of tensor parallelism on grids; importing this module imports no JAX."""

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Literal

from hpcjax.core.config import Config, Patterns, Size

if TYPE_CHECKING:
    from hpcjax.core.method import Parallel, RunShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class Tensor3dConfig(Config):
    """Tensor3D: every matrix cut in two dimensions, over a grid of devices.

    Devices that are left, after row, col and depth, share out the batch. Megatron's
    tensor parallelism is row=1. `cost.best_grid` says which grid sends least.

    Attributes:
      row: parts of the width.
      col: parts of heads, inner features and vocabulary.
      depth: devices that share out the batch and hold a part of each matrix, which they
        gather where it is used.
      zero: 1 spreads the optimizer's state over the devices that share out the batch.
      stacked: regexes of parameters whose first axis is a stack of layers; none for
        those of the model.
    """

    claims: ClassVar[tuple[str, ...]] = ("mean", "parameters")

    row: Size = 1
    col: Size = 1
    depth: Size = 1
    zero: Literal[0, 1] = 0
    stacked: Patterns = ()

    @property
    def summed(self) -> int:
        """How many devices sum their parts of whole activations; 1 for none."""
        return self.col if self.row == 1 else 1

    def build(self, setup: "RunShape") -> "Parallel":
        """Returns how the model of a run is spread.

        Raises:
          ConfigError: a number of devices that the grid does not divide, sizes of the
            model that it does not divide, or a model that cannot be cut so.
        """
        from hpcjax.sharding.tensor3d import Grid, spread_matrices

        grid = Grid.of(setup.devices, self.row, self.col, self.depth)
        return spread_matrices(
            setup.model, grid, zero=self.zero == 1, stacked=self.stacked
        )
