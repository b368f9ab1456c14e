"""Config of samples that are cut in space; importing this module imports no JAX."""

import dataclasses
from typing import TYPE_CHECKING, Any, ClassVar

from hpcjax.core import checks
from hpcjax.core.config import Config, Size
from hpcjax.core.errors import ConfigError

if TYPE_CHECKING:
    from hpcjax.core.method import Parallel, RunShape
    from hpcjax.core.objective import Objective

SIDES = "depth", "height", "width"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SpatialConfig(Config):
    """Samples cut in space: each device holds a block, and all parameters.

    Devices that are left share out the batch. Any optimizer and exchange goes on, over
    the axes of space too.

    Attributes:
      depth: blocks along the first of three axes of space.
      height: along the second last one.
      width: along the last one.
    """

    claims: ClassVar[tuple[str, ...]] = ()

    depth: Size = 1
    height: Size = 1
    width: Size = 1

    @property
    def blocks(self) -> int:
        """How many devices share a sample."""
        return self.depth * self.height * self.width

    def space(self, dims: int) -> tuple[str | None, ...]:
        """Returns the mesh axis that cuts each axis of space, or None.

        Raises:
          ConfigError: a dimension is cut that the data lacks.
        """
        from hpcjax.sharding.mesh import SPACE_AXES

        for side in SIDES[:-dims]:
            rule = f"samples of {dims} dimensions have no {side}: leave parallel.{side}"
            checks.require(
                getattr(self, side) == 1, rule, **{side: getattr(self, side)}
            )
        return tuple(
            axis if getattr(self, side) > 1 else None
            for side, axis in zip(SIDES[-dims:], SPACE_AXES[-dims:], strict=True)
        )

    def cut_model(self, model: Any, objective: "Objective") -> Any:
        """Returns the config of a model whose layers take blocks.

        Raises:
          ConfigError: it has no field `space`; a dimension is cut that the data lacks.
        """
        if not hasattr(model, "space"):
            raise ConfigError(
                f"model={type(model).__name__} cannot be cut in space: take one with a "
                "field space, such as unet or resnet, or parallel=none"
            )
        return dataclasses.replace(model, space=self.space(objective.inputs.rank - 1))

    def check_run(self, devices: int, batch_size: int, accumulate: int = 1) -> None:
        """Raises ConfigError if devices cannot share out the samples, or a batch.

        Args:
          devices: all that train the model.
          batch_size: examples of a step over all of them.
          accumulate: passes of a step.
        """
        rule = "depth * height * width must divide the devices"
        told = {side: getattr(self, side) for side in SIDES}
        checks.require(devices % self.blocks == 0, rule, devices=devices, **told)
        rows = batch_size / (devices // self.blocks)
        rule = "devices / (depth * height * width) must share the batch in whole passes"
        given = {"devices": devices, "batch_size": batch_size, "accumulate": accumulate}
        checks.require(rows % accumulate == 0, rule, **given)

    def build(self, setup: "RunShape") -> "Parallel":
        """Returns how the samples of a run are cut.

        Raises:
          ConfigError: devices that the blocks do not divide, or sizes of samples.
        """
        from jax.sharding import PartitionSpec

        from hpcjax.core.method import DATA_AXIS, Parallel
        from hpcjax.sharding.mesh import SPACE_AXES

        rows, *sides, _ = setup.batch["x"].shape
        self.check_run(setup.devices, rows)
        space = self.space(len(sides))
        counts = [getattr(self, side) for side in SIDES]
        for side, size, blocks in zip(
            SIDES[-len(sides) :], sides, counts[-len(sides) :], strict=True
        ):
            rule = f"parallel.{side} must divide the {size} points of samples"
            checks.require(size % blocks == 0, rule, **{side: blocks})

        def mesh_shape(devices: int) -> dict[str, int]:
            sizes = dict(zip(SPACE_AXES, counts, strict=True))
            return {DATA_AXIS: devices // self.blocks, **sizes}

        cut = {
            key: PartitionSpec(DATA_AXIS, *space)
            for key, leaf in setup.batch.items()
            if getattr(leaf, "shape", ())[1 : 1 + len(sides)] == tuple(sides)
        }
        axes = DATA_AXIS, *SPACE_AXES
        return Parallel(mesh_shape, {}, {}, lambda model: model, axes, batch=cut)
