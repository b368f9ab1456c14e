"""Resizing of images by two matrices, as Pillow resizes; imports no JAX."""

import functools
from collections.abc import Callable, Mapping
from typing import Literal

import numpy as np
from jaxtyping import Float, Float32, Int

from hpcjax.core import checks
from hpcjax.data.source import Batch, Source

Filter = Literal["bilinear", "bicubic"]


def _triangle(x: np.ndarray) -> np.ndarray:
    return np.maximum(1 - x, 0)


def _cubic(x: np.ndarray) -> np.ndarray:
    """Keys' kernel with a = −1/2."""
    near = (1.5 * x - 2.5) * x * x + 1
    far = ((-0.5 * x + 2.5) * x - 4) * x + 2
    return np.where(x < 1, near, np.where(x < 2, far, 0))


# A filter at distances, and how far it reaches.
_FILTERS: Mapping[str, tuple[Callable[[np.ndarray], np.ndarray], int]] = {
    "bilinear": (_triangle, 1),
    "bicubic": (_cubic, 2),
}


@functools.lru_cache(64)
def resize_matrix(
    old: int, new: int, kind: Filter = "bilinear"
) -> Float32[np.ndarray, "new old"]:
    """Returns the matrix that resizes one side, whose rows sum to 1.

    A filter is stretched by old/new where that is above 1, against aliasing, and cut
    off and normalised at the border, as in Pillow.

    Examples:
      >>> resize_matrix(4, 2).tolist()[0]
      [0.4285714328289032, 0.4285714328289032, 0.1428571492433548, 0.0]
    """
    function, reach = _FILTERS[kind]
    stretch = max(old / new, 1.0)
    centres = (np.arange(new) + 0.5) * (old / new)
    away = np.abs(np.arange(old) + 0.5 - centres[:, None]) / stretch
    # A pixel counts if its index, rounded as Pillow does, is within the filter's reach.
    low = np.maximum((centres - reach * stretch + 0.5).astype(int), 0)
    high = np.minimum((centres + reach * stretch + 0.5).astype(int), old)
    place = np.arange(old)
    inside = (place >= low[:, None]) & (place < high[:, None])
    weights = np.where(inside, function(away), 0.0)
    matrix = (weights / weights.sum(1, keepdims=True)).astype(np.float32)
    matrix.setflags(write=False)
    return matrix


def resize(
    images: Float[np.ndarray, "batch height width channels"],
    size: int,
    kind: Filter = "bilinear",
) -> Float[np.ndarray, "batch size size channels"]:
    """Returns images with sides of `size` pixels, R x Rᵀ for each channel.

    Each image is computed by itself, so that its numbers do not depend on the batch.

    Raises:
      ConfigError: an unknown filter, a size below 1, or images of whole numbers.

    Examples:
      >>> resize(np.ones((2, 8, 6, 3), np.float32), 4).shape
      (2, 4, 4, 3)
    """
    checks.require_count(1, size=size)
    checks.require_choice("kind", kind, tuple(_FILTERS))
    rule = "images must be of floating point, as weights are"
    checks.require(images.dtype.kind not in "biu", rule, dtype=images.dtype)
    count, height, width, channels = images.shape
    if height == width == size:
        return images
    rows = resize_matrix(height, size, kind).astype(images.dtype)
    columns = resize_matrix(width, size, kind).astype(images.dtype)
    tall = rows @ images.reshape(count, height, width * channels)
    return columns @ tall.reshape(count, size, width, channels)


class ResizedSource:
    """A source of images, resized when they are gathered.

    Args:
      source: of images.
      size: their sides.
      kind: the filter.
    """

    def __init__(self, source: Source, size: int, kind: Filter = "bilinear") -> None:
        self.source, self.size, self.kind = source, size, kind

    def __len__(self) -> int:
        return len(self.source)

    def gather(self, indices: Int[np.ndarray, " batch"]) -> Batch:
        """Returns the examples at `indices`, x [batch, size, size, channels]."""
        batch = self.source.gather(indices)
        return {**batch, "x": resize(batch["x"], self.size, self.kind)}
