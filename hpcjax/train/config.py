"""Length, batch size and intervals of a training run; imports no JAX."""

import dataclasses
import math
from collections.abc import Mapping
from typing import ClassVar

from hpcjax.core.errors import ConfigError


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
    """Length, batch and intervals of a training run.

    Attributes:
      steps: optimizer steps in all.
      batch_size: examples per step over all devices.
      accumulate: passes in which each device differentiates its part of a batch, one
        after another, with as much less memory; see `optim.accumulate`.
      eval_every: steps between validations; the last step is always validated.
      checkpoint_every: steps between checkpoints; the last step is always saved, and
        with 0 only that.
      keep: number of the newest checkpoints to keep.
      stall_seconds: the run is ended if a step, or a batch of validation, takes longer
        than this and than 20 times the median. The first one, which compiles, may take
        30 times as long. 0 waits for ever.
      max_skipped: consecutive steps with non-finite numbers that end the run.
    """

    smoke: ClassVar[Mapping[str, str]] = {"steps": "2", "batch_size": "16"}

    steps: int = 400
    batch_size: int = 128
    accumulate: int = 1
    eval_every: int = 50
    checkpoint_every: int = 100
    keep: int = 3
    stall_seconds: float = 60.0
    max_skipped: int = 10

    def __post_init__(self) -> None:
        counts = ("steps", "batch_size", "accumulate", "eval_every", "keep")
        for name in (*counts, "max_skipped"):
            if getattr(self, name) < 1:
                raise ConfigError(
                    f"{name} must be at least 1: got {getattr(self, name)}"
                )
        if not 0 <= self.stall_seconds < math.inf:
            raise ConfigError(
                f"stall_seconds must be finite and at least 0: got {self.stall_seconds}"
            )
        if self.steps >= 2**31:
            raise ConfigError(f"steps must be less than 2**31: got {self.steps}")
        if self.checkpoint_every < 0:
            raise ConfigError(
                f"checkpoint_every must be at least 0: got {self.checkpoint_every}"
            )

    def rows(self, devices: int, places: str = "devices") -> int:
        """Returns how many examples of a batch each device gets.

        Args:
          devices: that share a batch.
          places: what they are, for the message.

        Raises:
          ConfigError: they cannot share it evenly, or not in `accumulate` passes.

        Examples:
          >>> TrainConfig(batch_size=96).rows(4)
          24
        """
        if self.batch_size % devices:
            raise ConfigError(
                f"batch_size must divide by the {devices} {places}: got "
                f"{self.batch_size}"
            )
        rows = self.batch_size // devices
        if rows % self.accumulate:
            raise ConfigError(
                f"accumulate must divide the {rows} examples of a device: got "
                f"{self.accumulate}"
            )
        return rows
