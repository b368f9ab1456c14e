"""The config of compressed training state; importing this module imports no JAX."""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from hpcjax.core.config import Config, Patterns, Share
from hpcjax.optim.loss_scale_config import LossScale
from hpcjax.optim.sparse_state.options import Index, Mode

if TYPE_CHECKING:
    from hpcjax.core.method import Method, Optimization, RunShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseStateConfig(Config):
    """SAMO: a network pruned before the first step, whose state is compressed.

    Attributes:
      sparsity: share of each pruned parameter, or of each of its layers, that is zero.
      keep: "magnitude" keeps the largest values, "random" any.
      pruned: regexes of the parameters to prune; none for all matrices and kernels.
      stacked: regexes of parameters whose first axis is a stack of layers; none for
        those of the model.
      dtype: of weights and gradients; float32 needs no other copy of the weights.
      index: "int32" stores a number for each kept value, "bitmap" a bit for each
        element: fewer bytes where more than one of 32 is kept, and time to list them.
      mode: "dense" holds dense weights; "rematerialize" holds kept values, of which
        those of a layer are made in every pass.
      loss_scale: for gradients in float16.
    """

    claims: ClassVar[tuple[str, ...]] = ("gradients", "parameters")

    sparsity: Share = 0.9
    keep: Literal["magnitude", "random"] = "magnitude"
    pruned: Patterns = ()
    stacked: Patterns = ()
    dtype: Literal["float32", "bfloat16", "float16"] = "bfloat16"
    index: Index = "int32"
    mode: Mode = "dense"
    loss_scale: LossScale | None = None

    def build(
        self, optimizer: "Optimization", mean: Any, setup: "RunShape"
    ) -> "Method":
        """Returns the training method of a run.

        Args:
          optimizer: whose transform is elementwise.
          mean: `mean(axes)` returns the transform that averages gradients.
          setup: the run.

        Raises:
          ConfigError: a transform that is not elementwise, or regexes that match
            nothing.
        """
        from hpcjax.optim.sparse_state._method import sparse_training

        return sparse_training(self, optimizer, mean, setup)
