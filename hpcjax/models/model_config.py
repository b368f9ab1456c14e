"""The base class of models' configs; importing this module imports no JAX."""

import dataclasses
import inspect
from typing import TYPE_CHECKING, Any

from hpcjax.core.config import Config

if TYPE_CHECKING:
    from hpcjax import core
    from hpcjax.core.objective import Objective


@dataclasses.dataclass(frozen=True, kw_only=True)
class ModelConfig(Config):
    """Base of configs of models; the fields are the factory's keyword arguments."""

    @classmethod
    def takes(cls, objective: "Objective") -> bool:
        """Says whether such a model takes its examples, and puts out what it scores."""
        del objective
        return True

    def check_objective(self, objective: "Objective") -> None:
        """Raises ConfigError if its values are not for an objective that it takes."""

    def make(
        self,
        inputs: tuple[int, ...],
        outputs: int,
        policy: "core.Policy | None" = None,
        **given: Any,
    ) -> "core.Model":
        """Builds the model.

        Args:
          inputs: shape of one "x"; a mapping of shapes if it has several arrays.
          outputs: number of classes, or of words: the last axis of what is put out.
          policy: dtypes; None for float32.
          **given: what the data set has, such as its `graph`, for models that take it.
        """
        runtime = {} if policy is None else {"policy": policy}
        known = inspect.signature(self.find_factory()).parameters
        taken = {name: each for name, each in given.items() if name in known}
        return super().make(inputs, outputs, **runtime, **taken)
