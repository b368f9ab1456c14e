"""Config of averages at half precision; importing this module imports no JAX."""

import dataclasses
from typing import ClassVar

from hpcjax.collectives.exchange_config import VectorConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class HalfConfig(VectorConfig):
    """The mean in float16; values beyond its range are clipped.

    The sum is rounded to float16, too; this error is in no residual.
    """

    factory: ClassVar[str] = "hpcjax.collectives.half:Half"
