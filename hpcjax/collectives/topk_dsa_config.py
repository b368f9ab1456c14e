"""Config of TopkDSA; importing this module imports no JAX."""

import dataclasses
from typing import Annotated, ClassVar

from hpcjax.collectives.exchange_config import SparseConfig
from hpcjax.core.config import AtLeast


@dataclasses.dataclass(frozen=True, kw_only=True)
class TopkDsaConfig(SparseConfig):
    """TopkDSA: the k largest entries of every member, added up by region and gathered.

    Sums that fill a third of the vector or more are gathered without indices. On
    devices, buffers must have room for this, and are larger than those of `TopKConfig`.

    Attributes:
      capacity_factor: size of a padded buffer from one member to one region, relative
        to k / P.
    """

    factory: ClassVar[str] = "hpcjax.collectives.topk_dsa:TopkDsa"

    capacity_factor: Annotated[float, AtLeast(1.0)] = 2.0
