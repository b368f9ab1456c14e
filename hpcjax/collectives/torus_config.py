"""Config of the all-reduce on a torus; importing this module imports no JAX."""

import dataclasses
from typing import ClassVar, Literal

from hpcjax.collectives.exchange_config import VectorConfig
from hpcjax.core.config import Size


@dataclasses.dataclass(frozen=True, kw_only=True)
class TorusConfig(VectorConfig):
    """The exact mean on a torus of rows · cols members, over all four links of each.

    The vector has four quarters. With "rings" each goes around all p members, along one
    of two edge-disjoint Hamiltonian cycles in one of its directions: 2 (p − 1) rounds,
    for the most bytes a second. With "rows_columns" each is scattered along the rows,
    summed along the columns and gathered along the rows, or the other way round, in one
    of two directions: as many bytes in 2 (rows + cols − 2) rounds.

    Attributes:
      rows: of the torus; member i · cols + j is in row i and column j. None for what
        the columns leave; if both are None the torus is as square as can be.
      cols: of the torus, likewise.
      algorithm: "rings" or "rows_columns".

    References:
      Hoefler et al., HammingMesh: A Network Topology for Large-Scale Deep Learning, SC
      2022, section 5 and appendix D.
    """

    factory: ClassVar[str] = "hpcjax.collectives.torus:Torus"

    error_feedback: bool = False
    rows: Size | None = None
    cols: Size | None = None
    algorithm: Literal["rings", "rows_columns"] = "rings"
