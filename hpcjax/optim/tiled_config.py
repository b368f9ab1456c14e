"""The config of optimizer state in tiles; importing this module imports no JAX."""

import dataclasses
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hpcjax.core.config import Config, Size
from hpcjax.optim.loss_scale_config import LossScale

if TYPE_CHECKING:
    from hpcjax.core.method import Method, Optimization, RunShape

Space = Literal["device", "host"]


@dataclasses.dataclass(frozen=True, kw_only=True)
class TiledConfig(Config):
    """AxoNN's offload, and TED's tiled optimizer: state updated a tile at a time.

    Attributes:
      tile: entries of parameters that are updated at once.
      space: whose memory moments and float32 parameters lie in.
      dtype: of weights and gradients. With float32 there is no other copy of the
        weights; else float32 ones are among the state, and saved in their place.
      loss_scale: for gradients in float16; AxoNN's begins at 2^16, is within 2^10 and
        2^24, and grows after 200 steps.
    """

    claims: ClassVar[tuple[str, ...]] = ("gradients", "mean", "parameters")
    figures: ClassVar[Mapping[str, str]] = {"tiles": ""}
    clips: ClassVar[bool] = True  # the norm of all gradients is no tile's
    smoke: ClassVar[Mapping[str, str]] = {"tile": "100"}

    tile: Size = 1_800_000
    space: Space = "device"
    dtype: Literal["float32", "bfloat16", "float16"] = "float32"
    loss_scale: LossScale | None = None

    def build(
        self, optimizer: "Optimization", mean: Any, setup: "RunShape"
    ) -> "Method":
        """Returns the training method of a run.

        Args:
          optimizer: whose transform works on elements.
          mean: must be the plain one.
          setup: the run, of a model with float32 parameters.

        Raises:
          ConfigError: a transform that mixes entries, other parameters, examples that
            are cut in space, several processes, or no host memory.
        """
        from hpcjax.optim.tiled_training import train_tiled

        del mean  # that of the gradients' program

        return train_tiled(self, optimizer, setup)
