"""A chain of equally large layers, whose backward pass is run in segments."""

import dataclasses
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np

from hpcjax.core import config


@dataclasses.dataclass(frozen=True, kw_only=True)
class ChainConfig(config.Config):
    """The sizes of a chain.

    Attributes:
      width: features of every layer.
      layers: one for each bucket.
      rows: examples on each worker.
    """

    smoke: ClassVar[Mapping[str, str]] = {"width": "16", "rows": "8"}

    width: config.Size = 1024
    layers: config.Several = 4
    rows: config.Size = 1024

    @property
    def shapes(self) -> tuple[tuple[int, ...], ...]:
        """Shapes of the gradients."""
        return ((self.width, self.width),) * self.layers

    @property
    def bucket_bytes(self) -> int:
        """Bytes of the gradients of a layer."""
        return 4 * self.width**2


def layer(kernel: Any, x: Any) -> Any:
    """Returns tanh(x K)."""
    import jax.numpy as jnp

    return jnp.tanh(x @ kernel)


def loss(y: Any, targets: Any) -> Any:
    """Returns the squared error, summed over features, mean over rows."""
    import jax.numpy as jnp

    # Of the mean over features gradients would be below the least float16.
    return jnp.mean(jnp.sum((y - targets) ** 2, axis=-1))


def parameters(cfg: ChainConfig, seed: int) -> list[np.ndarray]:
    """Returns the kernels, the same on all workers."""
    rng = np.random.default_rng(seed)
    return [
        (rng.standard_normal(shape) / np.sqrt(cfg.width)).astype(np.float32)
        for shape in cfg.shapes
    ]


def batch(cfg: ChainConfig, seed: int, rank: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns a worker's inputs and targets."""
    rng = np.random.default_rng((seed, rank))
    shape = cfg.rows, cfg.width
    inputs = rng.standard_normal(shape, np.float32)
    return inputs, np.tanh(rng.standard_normal(shape, np.float32))
