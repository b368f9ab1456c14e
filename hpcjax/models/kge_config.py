"""Config of embeddings of knowledge graphs; importing this module imports no JAX."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

from hpcjax.core import checks
from hpcjax.core.config import Positive, Size
from hpcjax.core.objective import Objective
from hpcjax.models.model_config import ModelConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class KgeConfig(ModelConfig):
    """Embeddings of a knowledge graph, see `models.kge`.

    Attributes:
      decoder: what scores a link of its embeddings.
      width: of an embedding; of "complex" the first half are real parts.
      spread: standard deviation of the normal numbers that they start from.
    """

    factory: ClassVar[str] = "hpcjax.models._kge:kge"
    smoke: ClassVar[Mapping[str, str]] = {"width": "4"}

    decoder: Literal["distmult", "complex", "transe", "dot"] = "distmult"
    width: Size = 64
    spread: Positive = 1e-3

    def __post_init__(self) -> None:
        super().__post_init__()
        good = self.decoder != "complex" or self.width % 2 == 0
        rule = "width of decoder=complex must be even, for real and imaginary parts"
        checks.require(good, rule, width=self.width)

    @classmethod
    def takes(cls, objective: Objective) -> bool:
        """Says whether it is of links."""
        return objective.name == "links"
