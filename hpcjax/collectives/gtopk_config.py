"""Config of gTopk; importing this module imports no JAX."""

import dataclasses
from typing import ClassVar

from hpcjax.collectives.exchange_config import SparseConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class GTopkConfig(SparseConfig):
    """gTopk: pairs of members merge their k entries and keep k, log2 P times.

    As published, an entry that a merge drops is lost if its index survives by another
    branch of the tree; `CommStats.lost` counts these entries.

    Attributes:
      exact_residual: instead, the member that merged keeps them in its residual.
    """

    factory: ClassVar[str] = "hpcjax.collectives.gtopk:GTopk"

    exact_residual: bool = False
