"""Config of signs as bits; importing this module imports no JAX."""

import dataclasses
from typing import ClassVar

from hpcjax.collectives.exchange_config import VectorConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class SignConfig(VectorConfig):
    """Sends the sign of each value as one bit; zero counts as positive.

    Without error feedback, the result is the sign of the majority of members, 0 for a
    tie (signSGD with majority vote); the learning rate is then the size of a step. With
    error feedback, every member also sends its mean magnitude, and the result is the
    mean of magnitude times sign (EF-signSGD).
    """

    factory: ClassVar[str] = "hpcjax.collectives.signs:Signs"

    error_feedback: bool = False
