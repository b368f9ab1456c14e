"""The base class of models' configs; importing this module imports no JAX."""

import dataclasses
from typing import TYPE_CHECKING

from hpcjax.core.config import Config

if TYPE_CHECKING:
    from hpcjax import core


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """Base of configs of models; the fields are the factory's keyword arguments."""

    def make(
        self, inputs: tuple[int, ...], outputs: int, policy: "core.Policy | None" = None
    ) -> "core.Model":
        """Builds the model.

        Args:
          inputs: shape of one example, without the batch.
          outputs: number of classes, or of words.
          policy: dtypes; None for float32.
        """
        runtime = {} if policy is None else {"policy": policy}
        return super().make(inputs, outputs, **runtime)
