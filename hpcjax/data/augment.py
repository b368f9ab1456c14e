"""Random changes of training images, drawn by example and not by process."""

from collections.abc import Callable

import numpy as np

from hpcjax.core.errors import ConfigError
from hpcjax.data.source import Batch

# Four numbers are what one step of Philox yields: they are the draws of one example.
DRAWS = 4

Augment = Callable[[Batch, np.random.Generator], Batch]
"""`augment(batch, rng) -> batch`; see `example_rng` for what `rng` yields."""


def example_rng(seed: int, first: int) -> np.random.Generator:
    """Returns a generator whose rows of four belong to examples `first`, `first+1`, ….

    `rng.random((rows, 4))` takes one step of the counter-based Philox per row, and the
    counter is the place of the example in the endless global order. A row is therefore
    the same on whichever process, and in whichever batch size, its example is drawn.

    Args:
      seed: seed of the run.
      first: place of the first example, `batch number · batch size + row`.

    Examples:
      >>> rows = example_rng(0, 10).random((3, 4))
      >>> bool((rows[1] == example_rng(0, 11).random(4)).all())
      True
    """
    return np.random.Generator(np.random.Philox(key=seed, counter=first))


def pad_crop_flip(pad: int = 4, flip: bool = True) -> Augment:
    """Returns a random shift by up to `pad` pixels, and a mirror image half the time.

    What a shift uncovers is filled by reflection at the border (without repeating it),
    so that no value appears that the image does not have. x keeps its shape and dtype,
    y is left alone.

    Args:
      pad: largest shift in each direction; must be below the side of the image.
      flip: also mirror left and right with probability 1/2.

    Raises:
      ConfigError: `pad` is negative, or when used not below the side of the image.

    Examples:
      >>> batch = {"x": np.zeros((2, 8, 8, 1)), "y": np.zeros(2, np.int32)}
      >>> pad_crop_flip(pad=2)(batch, example_rng(0, 0))["x"].shape
      (2, 8, 8, 1)
    """
    if pad < 0:
        raise ConfigError(f"pad must be non-negative: got pad={pad}")

    def augment(batch: Batch, rng: np.random.Generator) -> Batch:
        images = batch["x"]
        count, height, width = images.shape[:3]
        if pad >= min(height, width):
            raise ConfigError(
                f"pad must be below the side of the image: got pad={pad} for "
                f"{height}x{width}"
            )
        down, right, mirror, _ = rng.random((count, DRAWS)).T
        rows = _shifted(down, height, pad)
        columns = _shifted(right, width, pad)
        if flip:
            columns = np.where(mirror[:, None] < 0.5, columns[:, ::-1], columns)
        numbers = np.arange(count)[:, None, None]
        return {**batch, "x": images[numbers, rows[:, :, None], columns[:, None, :]]}

    return augment


def _shifted(draws: np.ndarray, side: int, pad: int) -> np.ndarray:
    shifts = (draws * (2 * pad + 1)).astype(np.int64) - pad
    places = np.abs(shifts[:, None] + np.arange(side))
    return np.where(places >= side, 2 * (side - 1) - places, places)
