"""Configs of compressed training state; importing this module imports no JAX."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from hpcjax.core.config import Above, AtLeast, Config, Patterns, Positive, Share, Size

if TYPE_CHECKING:
    from hpcjax.core.method import Method, Optimization, Setup

Index = Literal["int32", "bitmap"]
Mode = Literal["dense", "rematerialize"]
INDICES = ("int32", "bitmap")
MODES = ("dense", "rematerialize")


@dataclasses.dataclass(frozen=True, kw_only=True)
class LossScale(Config):
    """Dynamic scaling of a loss whose gradients are float16.

    The loss is multiplied by a scale, which is divided out of the gradients once they
    are float32. A step with a gradient that is not finite changes nothing but the
    scale.

    Attributes:
      start: the first scale.
      growth: by which the scale is multiplied after `every` good steps in a row.
      every: number of good steps.
      backoff: by which it is multiplied after a bad one.
      least: the smallest scale.
    """

    start: Positive = 2.0**15
    growth: Annotated[float, Above(1)] = 2.0
    every: Size = 2000
    backoff: Share = 0.5
    least: Annotated[float, AtLeast(1.0)] = 1.0


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

    def build(self, optimizer: "Optimization", mean: Any, setup: "Setup") -> "Method":
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
