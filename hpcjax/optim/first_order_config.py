"""Configs of SGD, AdamW and row-wise Adagrad; importing this module imports no JAX."""

import dataclasses
from typing import ClassVar

from hpcjax.core.config import Decay, Float32, NotNegative
from hpcjax.optim.optimizer_config import OptimizerConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SgdConfig(OptimizerConfig):
    """Stochastic gradient descent with heavy-ball momentum, as in PyTorch.

    Attributes:
      momentum: decay of the momentum buffer.
      nesterov: whether the update is Nesterov's, which looks one momentum step ahead.
      weight_decay: L2 coefficient, added to the gradient before the momentum.
    """

    factory: ClassVar[str] = "hpcjax.optim.first_order:sgd"

    momentum: Decay = 0.9
    nesterov: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdamWConfig(OptimizerConfig):
    """Adam with decoupled weight decay.

    Attributes:
      b1: decay of the first moment.
      b2: decay of the second moment.
      eps: added to the square root of the second moment.
    """

    factory: ClassVar[str] = "hpcjax.optim.first_order:adamw"

    lr: Float32 = 1e-3
    weight_decay: NotNegative = 1e-2
    b1: Decay = 0.9
    b2: Decay = 0.999
    eps: NotNegative = 1e-8


@dataclasses.dataclass(frozen=True, kw_only=True)
class AdagradConfig(OptimizerConfig):
    """Adagrad, as for embeddings of graphs.

    Attributes:
      eps: added to the square root of a sum.
      by_row: whether each row of a parameter has one number.
    """

    factory: ClassVar[str] = "hpcjax.optim.first_order:adagrad"

    lr: Float32 = 0.1
    eps: NotNegative = 1e-10
    by_row: bool = False


@dataclasses.dataclass(frozen=True, kw_only=True)
class RowAdagradConfig(OptimizerConfig):
    """Adagrad with one number for each row of a parameter, as for large tables.

    Attributes:
      eps: added to the square root of a row's sum.
    """

    factory: ClassVar[str] = "hpcjax.optim.first_order:row_adagrad"

    lr: Float32 = 0.02
    eps: NotNegative = 1e-8
