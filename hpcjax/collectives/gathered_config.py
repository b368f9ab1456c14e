"""Configs of exchanges that gather what is selected; importing this imports no JAX."""

import dataclasses
from typing import Annotated, ClassVar

from hpcjax.collectives.exchange_config import SparseConfig
from hpcjax.core.config import AtLeast, Count


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopKConfig(SparseConfig):
    """Top-k: gathers exactly the k largest entries of every member (TopkA)."""

    factory: ClassVar[str] = "hpcjax.collectives.gathered:TopK"


@dataclasses.dataclass(frozen=True, kw_only=True)
class GaussianKConfig(SparseConfig):
    """GaussianK: as `TopKConfig`, with a threshold from a fitted normal distribution.

    The threshold is a quantile of the normal distribution with the mean and standard
    deviation of the values. It is divided by `correction` while it selects fewer than
    3/4 k entries, and multiplied while it selects more than 5/4 k.

    Attributes:
      correction: factor of a correction.
      tries: largest number of corrections.
      capacity_factor: largest number of entries that are sent, relative to k.
    """

    factory: ClassVar[str] = "hpcjax.collectives.gathered:GaussianK"

    correction: Annotated[float, AtLeast(1.0)] = 1.02
    tries: Count = 20
    capacity_factor: Annotated[float, AtLeast(1.0)] = 1.34


@dataclasses.dataclass(frozen=True, kw_only=True)
class MsTopKConfig(SparseConfig):
    """MSTop-k: as `TopKConfig`, with a threshold by bisection instead of a sort.

    Thresholds between the mean and the largest magnitude are tried by bisection. All
    entries above the lowest one that selects at most k are sent, and, to make k, a run
    of neighbours at a random place among the entries just below it.

    Attributes:
      samples: number of thresholds to try.
      seed: of the random places.

    References:
      Agarwal et al., On the Utility of Gradient Compression in Distributed Training
      Systems, MLSys 2022, compare it; Shi et al., MSTop-K, 2021, propose it.
    """

    factory: ClassVar[str] = "hpcjax.collectives.gathered:MsTopK"

    samples: Count = 30
    seed: Count = 0
