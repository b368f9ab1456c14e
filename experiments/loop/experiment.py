"""What the training loop adds to a bare jitted step."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from hpcjax import perf, runs, sharding, train
from hpcjax.core.config import Size
from hpcjax.optim import SgdConfig
from hpcjax.runs.measured_step import StepConfig
from hpcjax.runs.metrics import NullRecorder
from hpcjax.train.config import TrainConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config(StepConfig):
    """A model, a batch and how often it is measured.

    Attributes:
      steps: steps in a measurement.
      larger: by how many images the batch of the negative control is larger.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        **StepConfig.smoke,
        "larger": "2",
        "steps": "2",
    }
    figures: ClassVar[Mapping[str, str]] = {
        "seconds": "candidate repetition: of a step, after the first",
    }

    steps: int = 10
    larger: Size = 8

    def __post_init__(self) -> None:
        super().__post_init__()
        self.training()

    def training(self) -> TrainConfig:
        """Returns the settings of the loop: one step more than is measured."""
        return TrainConfig(
            steps=self.steps + 1,
            batch_size=self.batch_size,
            eval_every=self.steps + 1,
        )

    def labels(self) -> "runs.Labels":
        """Returns those of the figures' dimensions."""
        return {
            "candidate": ("bare", "loop", "bare, larger batch"),
            "repetition": range(self.repetitions),
        }


class Marks(NullRecorder):
    """A recorder that keeps the training seconds at each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def write(self, record: Mapping[str, Any]) -> None:
        """Keeps the seconds of a step's record."""
        if "loss" in record:
            self.seconds.append(record["seconds"])


def run(cfg: Config, ctx: "runs.Context") -> "runs.Dataset":
    """Measures seconds per step of the loop and of bare jitted steps, in turns.

    The loop's figure is that of its own records from the first to the last step, so
    that neither compiling nor the final validation is in it.
    """
    optimizer = SgdConfig(lr=0.01)
    task = cfg.task(optimizer, devices=ctx.mesh.size, batches=4)

    def loop() -> float:
        marks = Marks()
        train.fit(task, cfg.training(), seed=cfg.seed, mesh=ctx.mesh, recorder=marks)
        return (marks.seconds[-1] - marks.seconds[0]) / cfg.steps

    def bare(images: int) -> Callable[[], float]:
        rows = task.dataset.train.gather(np.arange(images))
        batch = sharding.place_batch(rows, ctx.mesh)
        return bare_step(task.model, optimizer.make(cfg.steps), batch, cfg)

    # All tell their seconds themselves.
    return perf.compare(
        {
            "bare": bare(cfg.batch_size),
            "loop": loop,
            "bare, larger batch": bare(cfg.batch_size + cfg.larger),
        },
        "bare",
        repetitions=cfg.repetitions,
        warmup=1,
        take=lambda measure: measure(),
    )


def bare_step(
    model: Any, optimizer: Any, batch: Any, cfg: Config
) -> Callable[[], float]:
    """Returns a function giving the seconds per step of the shortest possible loop."""
    import functools

    import jax
    import jax.numpy as jnp
    import optax

    def loss(params: Any, state: Any) -> Any:
        logits, state = model.apply(params, state, batch["x"], train=True)
        losses = optax.softmax_cross_entropy_with_integer_labels(logits, batch["y"])
        return losses.mean(), state

    @functools.partial(jax.jit, donate_argnums=(0, 1, 2))
    def step(params: Any, state: Any, moments: Any) -> Any:
        grads, state = jax.grad(loss, has_aux=True)(params, state)
        updates, moments = optimizer.update(grads, moments, params)
        return optax.apply_updates(params, updates), state, moments

    params, state = model.init(jax.random.key(cfg.seed))
    start = (params, state, optimizer.init(params))

    def measure() -> float:
        carried = jax.block_until_ready(jax.tree.map(jnp.copy, start))
        began = time.perf_counter()
        for _ in range(cfg.steps):
            carried = step(*carried)
        jax.block_until_ready(carried)
        return (time.perf_counter() - began) / cfg.steps

    return measure
