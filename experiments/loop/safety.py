"""What being safe costs: the check for finite numbers, and checkpoints."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from hpcjax import perf, runs, sharding, train
from hpcjax.core.config import Size
from hpcjax.optim import SgdConfig
from hpcjax.runs.measured_step import StepConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(StepConfig):
    """A model, a batch and how often it is measured.

    Attributes:
      every: steps between checkpoints, to which their cost is spread.
      after: steps during which a checkpoint is written in the background.
      larger: by how many images the batch of the negative control is larger.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        **StepConfig.smoke,
        "larger": "2",
        "after": "1",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "check": "step repetition: seconds",
        "save": "loop repetition: seconds of a step if one in `every` is saved",
    }

    every: int = 100
    after: int = 3
    larger: Size = 8

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {
            "step": ("unchecked", "checked", "unchecked, larger batch", "check alone"),
            "loop": ("steps", "saving"),
            "repetition": range(self.repetitions),
        }


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Times steps with and without the check, and with and without a save, in turns.

    The check is also timed alone: it is so short against a step that the difference of
    two steps nearly drowns in their noise.
    """
    import tempfile

    task = cfg.task(SgdConfig(lr=0.01), devices=ctx.mesh.size, batches=2)
    state = train.init_state(task, cfg.seed, ctx.mesh)

    def step(check: bool, images: int) -> Callable[[], Any]:
        rows = task.dataset.train.gather(np.arange(images))
        batch = sharding.place_batch(rows, ctx.mesh)
        made = train.train_step(task, ctx.mesh, state, check=check)
        return perf.stepper(made, state, batch)

    steps = {
        "unchecked": step(False, cfg.batch_size),
        "checked": step(True, cfg.batch_size),
        "unchecked, larger batch": step(False, cfg.batch_size + cfg.larger),
        "check alone": _check_alone(state, ctx),
    }
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
    save = runs.Dataset({"steps": step, "saving": step + added / cfg.every})
    return runs.measured(
        {
            "check": check.rename(candidate="step"),
            "save": save.to_array("loop"),
        }
    )


def _check_alone(state: "train.TrainState", ctx: "runs.Context") -> Callable[[], Any]:
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
