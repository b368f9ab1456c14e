"""What the training loop adds to a bare jitted step."""

import dataclasses
import time
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from hpcjax.models.config import ResNetConfig
from hpcjax.optim.config import SgdConfig
from hpcjax.runs.config import check_seed
from hpcjax.train.config import TrainConfig

if TYPE_CHECKING:
    import xarray as xr

    from hpcjax.runs.context import Context


@dataclasses.dataclass(frozen=True, kw_only=True)
class Config:
    """A model, a batch and how often it is measured.

    Attributes:
      model: the network.
      inputs: height, width and channels of the images, which are random.
      classes: number of classes.
      batch_size: images in a step.
      steps: steps in a measurement.
      repetitions: rounds; in each, the loop and the bare step run once.
      seed: of parameters and images.
    """

    model: ResNetConfig = ResNetConfig(depth=20)
    inputs: tuple[int, int, int] = (32, 32, 3)
    classes: int = 10
    batch_size: int = 128
    steps: int = 10
    repetitions: int = 20
    seed: int = 0

    def __post_init__(self) -> None:
        check_seed(self.seed)
        self.training()

    def training(self) -> TrainConfig:
        """Returns the settings of the loop: one step more than is measured."""
        return TrainConfig(
            steps=self.steps + 1,
            batch_size=self.batch_size,
            eval_every=self.steps + 1,
        )


class Marks:
    """A recorder that keeps the training seconds at each step."""

    def __init__(self) -> None:
        self.seconds: list[float] = []

    def write(self, record: Mapping[str, Any]) -> None:
        """Keeps the seconds of a step's record."""
        if "loss" in record:
            self.seconds.append(record["seconds"])

    def rewind(self, step: int) -> float:
        """Starts at zero: nothing is resumed."""
        del step
        return 0.0


def run(cfg: Config, ctx: "Context") -> "xr.Dataset":
    """Measures seconds per step of the loop and of a bare jitted step, in turns.

    The loop's figure is that of its own records from the first to the last step, so
    that neither compiling nor the final validation is in it.

    Returns:
      `seconds` [candidate, repetition].
    """
    import numpy as np
    import xarray as xr

    from hpcjax import data, sharding, train

    dataset = data.noise_images(
        4 * cfg.batch_size, cfg.inputs, cfg.classes, seed=cfg.seed
    )
    model = cfg.model.make(cfg.inputs, cfg.classes)
    optimizer = SgdConfig(lr=0.01).make(cfg.steps)
    task = train.supervised(model, optimizer, dataset)

    def loop() -> float:
        marks = Marks()
        train.fit(task, cfg.training(), seed=cfg.seed, mesh=ctx.mesh, recorder=marks)
        return (marks.seconds[-1] - marks.seconds[0]) / cfg.steps

    batch = sharding.place_batch(
        dataset.train.gather(np.arange(cfg.batch_size)), ctx.mesh
    )
    bare = bare_step(model, optimizer, batch, cfg)
    measurements = (bare, loop)
    seconds = np.zeros((2, cfg.repetitions))
    for number in range(-1, cfg.repetitions):  # the round before the first warms up
        for row in (0, 1) if number % 2 else (1, 0):
            seconds[row, max(number, 0)] = measurements[row]()
    return xr.Dataset(
        {"seconds": (("candidate", "repetition"), seconds)},
        coords={"candidate": ["bare", "loop"]},
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
