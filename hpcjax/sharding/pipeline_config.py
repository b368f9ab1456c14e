"""Config of pipelines in training; importing this module imports no JAX."""

import dataclasses
from typing import TYPE_CHECKING, ClassVar, Literal

from hpcjax.core import checks
from hpcjax.core.config import Config, Size
from hpcjax.core.errors import ConfigError

if TYPE_CHECKING:
    from hpcjax.core.method import Parallel, RunShape


@dataclasses.dataclass(frozen=True, kw_only=True)
class PipelineConfig(Config):
    """A pipeline: stages of equally many blocks, which micro-batches pass.

    Devices that are left, after stages and tensor, share out the batch.

    Attributes:
      stages: devices, each with its share of the blocks.
      micro_batches: parts of a device's batch, one after the other.
      schedule: "gpipe" runs all forwards first, "one_f_one_b" goes backwards as soon as
        it can and stores the inputs of at most as many micro-batches as there are
        stages; "zero_bubble_h1" also postpones gradients of weights into the bubbles.
      tensor: devices that share the matrices of a stage, and the vocabulary, by
        Megatron's rules; they must divide heads and inner features.
    """

    claims: ClassVar[tuple[str, ...]] = ("gradients", "mean", "parameters")
    figures: ClassVar[dict[str, str]] = {"ticks bubble held_inputs": ""}

    stages: Size = 2
    micro_batches: Size = 4
    schedule: Literal["gpipe", "one_f_one_b", "zero_bubble_h1"] = "one_f_one_b"
    tensor: Size = 1

    @property
    def sends(self) -> int:
        """How many stages send each other activations; 0 for none."""
        return self.stages if self.stages > 1 else 0

    def check_run(self, devices: int, batch_size: int, accumulate: int = 1) -> None:
        """Raises ConfigError if devices cannot share out the model, or a batch.

        Args:
          devices: all that train the model.
          batch_size: examples of a step over all of them.
          accumulate: passes of a step; one, for micro-batches are cut here.
        """
        rule = "stages * tensor must divide the devices"
        parts, sizes = self.stages * self.tensor, dataclasses.asdict(self)
        told = {name: sizes[name] for name in ("stages", "tensor")}
        checks.require(devices % parts == 0, rule, devices=devices, **told)
        copies = devices // parts
        if batch_size % (copies * self.micro_batches):
            raise ConfigError(
                f"global batch {batch_size} is not a multiple of data * micro_batches "
                f"= {copies} * {self.micro_batches}"
            )
        rule = "parallel=pipeline cuts batches by micro_batches: set train.accumulate=1"
        checks.require(accumulate == 1, rule, accumulate=accumulate)

    def build(self, setup: "RunShape") -> "Parallel":
        """Returns how the model of a run is spread.

        Raises:
          ConfigError: devices that stages and tensor do not divide, a batch that
            micro-batches do not, sizes of the model that stages or tensor do not, or a
            model that cannot be cut so.
        """
        import jax

        from hpcjax.sharding import schedules
        from hpcjax.sharding.pipelined import spread_blocks

        self.check_run(setup.devices, jax.tree.leaves(dict(setup.batch))[0].shape[0])
        make = getattr(schedules, self.schedule)
        return spread_blocks(
            setup.model,
            make(self.stages, self.micro_batches),
            data=setup.devices // (self.stages * self.tensor),
            tensor=self.tensor,
        )
