"""What being safe costs: the check for finite numbers, and checkpoints."""

import dataclasses
import pathlib
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from hpcjax.models.config import ResNetConfig
from hpcjax.optim.config import SgdConfig
from hpcjax.runs.config import check_seed

if TYPE_CHECKING:
    import xarray as xr

    from hpcjax import train
    from hpcjax.runs.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A model, a batch and how often it is measured.

    Attributes:
      model: the network.
      inputs: height, width and channels of the images, which are random.
      classes: number of classes.
      batch_size: images in a step.
      every: steps between checkpoints, to which their cost is spread.
      after: steps during which a checkpoint is written in the background.
      repetitions: rounds of the measurement.
      seed: of parameters and images.
    """

    model: ResNetConfig = ResNetConfig(depth=20)
    inputs: tuple[int, int, int] = (32, 32, 3)
    classes: int = 10
    batch_size: int = 128
    every: int = 100
    after: int = 3
    repetitions: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)


def run(cfg: Config, ctx: "Context") -> "xr.Dataset":
    """Times steps with and without the check, and with and without a save, in turns.

    The check is also timed alone: it is so short against a step that the difference of
    two steps drowns in their noise.

    Returns:
      `check` and `save`, seconds [candidate, repetition]; of `save` the seconds are
      those of a step when one in `every` is followed by a save.
    """
    import tempfile

    import numpy as np
    import xarray as xr

    from hpcjax import data, perf, sharding, train

    dataset = data.noise_images(cfg.batch_size, cfg.inputs, cfg.classes, seed=cfg.seed)
    model = cfg.model.make(cfg.inputs, cfg.classes)
    task = train.supervised(model, SgdConfig(lr=0.01).make(cfg.every), dataset)
    state = train.init_state(task, cfg.seed, ctx.mesh)
    rows = dataset.train.gather(np.arange(cfg.batch_size))
    batch = sharding.place_batch(rows, ctx.mesh)
    steps = {
        name: perf.stepper(
            train.train_step(task, ctx.mesh, state, check=check), state, batch
        )
        for name, check in (("unchecked", False), ("checked", True))
    }
    steps["check alone"] = _check_alone(state, ctx)
    check = perf.compare(steps, "unchecked", repetitions=cfg.repetitions)["seconds"]

    def some_steps() -> Any:
        return [steps["checked"]() for _ in range(cfg.after)][-1]

    with (
        tempfile.TemporaryDirectory(dir=ctx.directory.path) as folder,
        train.Checkpoints(pathlib.Path(folder)) as checkpoints,
    ):

        def save_and_steps() -> Any:
            checkpoints.save(1, state, {})
            last = some_steps()
            checkpoints.wait()
            return last

        thunks = {"steps": some_steps, "saving": save_and_steps}
        both = perf.compare(thunks, "steps", repetitions=cfg.repetitions)["seconds"]
    step = both.sel(candidate="steps", drop=True) / cfg.after
    added = both.sel(candidate="saving", drop=True) - cfg.after * step
    save = xr.concat([step, step + added / cfg.every], dim="candidate")
    save = save.assign_coords(candidate=["steps", "saving"])
    return xr.Dataset(
        {
            "check": check.rename(candidate="step"),
            "save": save.rename(candidate="loop"),
        }
    )


def _check_alone(state: "train.TrainState", ctx: "Context") -> Callable[[], Any]:
    """Returns a thunk of what the check adds to a step, fused with nothing."""
    import jax
    from jax.sharding import PartitionSpec

    from hpcjax.core import per_device
    from hpcjax.train.step import keep_finite

    def body(grads: Any, new: Any, old: Any) -> Any:
        inside = per_device.enter(new), per_device.enter(old)
        kept, count = keep_finite(grads, *inside, ctx.mesh.axis_names)
        return per_device.leave(kept), count

    specs = per_device.specs(state)
    mapped = jax.shard_map(
        body,
        mesh=ctx.mesh,
        in_specs=(PartitionSpec(), specs, specs),
        out_specs=(specs, PartitionSpec()),
    )
    alone = jax.jit(mapped)
    return lambda: alone(state.params, state, state)
