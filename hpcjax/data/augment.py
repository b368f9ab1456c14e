"""Augmentation of training images, with draws that belong to examples."""

import dataclasses
from collections.abc import Callable
from typing import ClassVar

import numpy as np

from hpcjax.core.config import Config, Count, check_fields
from hpcjax.core.errors import ConfigError
from hpcjax.data.source import Batch

# A step of the counter-based generator Philox yields four numbers, which are the draws
# of one example.
DRAWS = 4

Augment = Callable[[Batch, np.random.Generator], Batch]
"""`augment(batch, rng) -> batch`; see `example_rng` for what `rng` yields."""


def example_rng(seed: int, first: int) -> np.random.Generator:
    """Returns a generator whose rows of four draws belong to consecutive examples.

    `rng.random((rows, 4))` takes one step of the counter-based Philox for each row, and
    the counter is the example's place in the endless global order. The draws of an
    example are therefore the same on every process and for every batch size.

    Args:
      seed: seed of the run.
      first: place of the first example, `batch number · batch size + row`.

    Examples:
      >>> rows = example_rng(0, 10).random((3, 4))
      >>> bool((rows[1] == example_rng(0, 11).random(4)).all())
      True
    """
    return np.random.Generator(np.random.Philox(key=seed, counter=first))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PadCropFlipConfig(Config):
    """Random shifts and mirror images of training pictures.

    Attributes:
      pad: largest shift in each direction; must be below the side of the image.
      flip: also mirror left and right with probability 1/2.
    """

    factory: ClassVar[str] = "hpcjax.data.augment:pad_crop_flip"

    pad: Count = 4
    flip: bool = True


def pad_crop_flip(pad: int = 4, flip: bool = True) -> Augment:
    """Returns an augmentation by random shifts of up to `pad` pixels and mirroring.

    Pixels that a shift uncovers are filled by reflection at the border, without
    repeating the border itself. x keeps its shape and dtype, y is unchanged.

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
    check_fields(PadCropFlipConfig, pad=pad)

    def augment(batch: Batch, rng: np.random.Generator) -> Batch:
        images = batch["x"]
        count, height, width = images.shape[:3]
        if pad >= min(height, width):
            raise ConfigError(
                f"pad must be below the side of the image: got pad={pad} for "
                f"{height}x{width}"
            )
        down, right, mirror, _ = rng.random((count, DRAWS)).T
        rows = _shift(down, height, pad)
        columns = _shift(right, width, pad)
        if flip:
            columns = np.where(mirror[:, None] < 0.5, columns[:, ::-1], columns)
        numbers = np.arange(count)[:, None, None]
        return {**batch, "x": images[numbers, rows[:, :, None], columns[:, None, :]]}

    return augment


def _shift(draws: np.ndarray, side: int, pad: int) -> np.ndarray:
    """Returns for each draw the source pixels along one side, [examples, side]."""
    shifts = (draws * (2 * pad + 1)).astype(np.int64) - pad
    # Reflection: -1 is pixel 1, and `side` is pixel side - 2.
    places = np.abs(shifts[:, None] + np.arange(side))
    return np.where(places >= side, 2 * (side - 1) - places, places)
