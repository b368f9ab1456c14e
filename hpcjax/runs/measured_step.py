"""A training step that experiments measure; importing this module imports no JAX."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar, Literal

from hpcjax import core, data, train
from hpcjax.core.config import Config, Seed, Size
from hpcjax.models import ResNetConfig


@dataclasses.dataclass(frozen=True, kw_only=True)
class StepConfig(Config):
    """A training step on random images, which experiments measure in their own ways.

    Attributes:
      model: the network.
      inputs: height, width and channels of the images, which are random.
      classes: number of classes.
      batch_size: images in a step.
      compute: dtype of the model's products.
      repetitions: rounds of the measurement.
      seed: of parameters and images.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "inputs": "[8,8,1]",
        "batch_size": "4",
        "repetitions": "2",
    }

    model: ResNetConfig = ResNetConfig(depth=20)
    inputs: tuple[int, int, int] = (32, 32, 3)
    classes: Size = 10
    batch_size: Size = 128
    compute: Literal["float32", "bfloat16"] = "float32"
    repetitions: Size = 20
    seed: Seed = 0

    def task(
        self, optimizer: Any, *, devices: int = 1, batches: int = 1
    ) -> "train.Task":
        """Returns what is trained, by the optimizer of a config.

        Args:
          optimizer: its config.
          devices: that share a batch.
          batches: of which the data set is made.
        """
        dataset = data.noise_images(
            batches * self.batch_size, self.inputs, self.classes, seed=self.seed
        )
        policy = core.Policy(compute=self.compute)
        model = self.model.make(self.inputs, self.classes, policy)
        method = train.compose(
            model,
            dataset,
            optimizer,
            batch_size=self.batch_size,
            steps=1,
            devices=devices,
        )
        return train.supervised(model, method, dataset)

    def step(self, optimizer: Any, devices: int = 1) -> Callable[[], Any]:
        """Returns a thunk of one compiled step; see `train.step_thunk`."""
        made = self.task(optimizer, devices=devices)
        return train.step_thunk(made, self.batch_size, devices=devices, seed=self.seed)
