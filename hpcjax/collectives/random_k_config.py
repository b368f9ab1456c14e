"""Config of random entries; importing this module imports no JAX."""

import dataclasses
from typing import ClassVar

from hpcjax.collectives.exchange_config import SparseConfig
from hpcjax.core.config import Count


@dataclasses.dataclass(frozen=True, kw_only=True)
class RandomKConfig(SparseConfig):
    """Random-k: k entries at random places, which all members draw alike.

    Attributes:
      seed: of the places.
    """

    factory: ClassVar[str] = "hpcjax.collectives.random_k:RandomK"

    seed: Count = 0
