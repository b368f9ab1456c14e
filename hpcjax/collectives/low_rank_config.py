"""Config of PowerSGD; importing this module imports no JAX."""

import dataclasses
from typing import ClassVar

from hpcjax.collectives.exchange_config import ExchangeConfig
from hpcjax.core.config import Count, Patterns, Size


@dataclasses.dataclass(frozen=True, kw_only=True)
class PowerSgdConfig(ExchangeConfig):
    """PowerSGD: approximates matrices by low rank, with a step of power iteration.

    An array is reshaped to a matrix whose columns are its last dimension. Arrays of one
    dimension or none are averaged exactly.

    Attributes:
      rank: of the approximation; less for smaller matrices.
      stacked: regexes of the paths of arrays whose first axis is a stack of layers;
        each layer is then a matrix.
      warm_start: starts from the factor of the last step instead of a random one.
      seed: of the random factors.

    References:
      Vogels, Karimireddy and Jaggi, PowerSGD, NeurIPS 2019, algorithm 1.
    """

    factory: ClassVar[str] = "hpcjax.collectives.low_rank:LowRank"

    rank: Size = 4
    stacked: Patterns = ()
    warm_start: bool = True
    seed: Count = 0
