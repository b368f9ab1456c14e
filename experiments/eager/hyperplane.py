"""Regression of a hyperplane: a linear layer learns a linear map, by shards."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from hpcjax.core import checks, config


@dataclasses.dataclass(frozen=True, kw_only=True)
class Hyperplane(config.Config):
    """y = a x + c + noise, with x from a normal and a, c from a uniform distribution.

    Attributes:
      dims: of x; the layer has one parameter more.
      points: of all shards.
      batch: points of a step, of all workers.
      noise: standard deviation in y.
    """

    smoke: ClassVar[Mapping[str, str]] = {"dims": "8", "points": "32", "batch": "8"}

    dims: config.Size = 8192
    points: config.Size = 32768
    batch: config.Size = 2048
    noise: config.NotNegative = 0.1

    def truth(self, seed: int) -> np.ndarray:
        """Returns a and behind it c, `[dims + 1]`."""
        rng = np.random.Generator(np.random.Philox(seed))
        return rng.uniform(-1, 1, self.dims + 1).astype(np.float32)

    def check(self, ranks: int) -> None:
        """Raises ConfigError unless points and those of a batch can be shared out."""
        even = self.points % ranks == 0 and self.batch % ranks == 0
        checks.require(
            even and self.points % self.batch == 0,
            f"points must be whole batches, and these a multiple of {ranks}",
            points=self.points,
            batch=self.batch,
        )

    def shard(self, seed: int, rank: int, ranks: int) -> tuple[np.ndarray, np.ndarray]:
        """Returns the points of one worker, which are drawn for it alone.

        Returns:
          x and behind it 1, `[points / ranks, dims + 1]`, and y.

        Raises:
          ConfigError: see `check`.
        """
        self.check(ranks)
        rng = np.random.Generator(np.random.Philox(key=[seed, rank + 1]))
        x = rng.standard_normal((self.points // ranks, self.dims + 1), np.float32)
        x[:, -1] = 1
        noise = rng.standard_normal(len(x), np.float32)
        return x, x @ self.truth(seed) + np.float32(self.noise) * noise

    def gradient(self, ranks: int) -> Callable[[Any, Any, Any, Any], tuple[Any, Any]]:
        """Returns a function of parameters, x, y and step.

        It returns half the mean squared error over the worker's part of the step's
        batch, and its gradients. Batches are consecutive points, epoch after epoch.
        """
        import jax
        import jax.numpy as jnp

        own = self.batch // ranks

        def loss(params, x, y):
            return jnp.mean((x @ params - y) ** 2) / 2

        def value_and_grad(params, x, y, step):
            first = step % (x.shape[0] // own) * own
            rows = jax.lax.dynamic_slice_in_dim(x, first, own)
            wanted = jax.lax.dynamic_slice_in_dim(y, first, own)
            return jax.value_and_grad(loss)(params, rows, wanted)

        return value_and_grad

    def excess(self, seed: int) -> Callable[[Any], Any]:
        """Returns a function of parameters: their expected loss on new points.

        Half the mean squared error, of the noise and of what is wrong; x has unit
        variance, so that nothing needs to be drawn.
        """
        truth, floor = self.truth(seed), self.noise**2

        def excess(params):
            return (((params - truth) ** 2).sum() + floor) / 2

        return excess
