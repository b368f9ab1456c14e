"""Augmentation of training images, with draws that belong to examples."""

import dataclasses
from typing import ClassVar

import numpy as np

from hpcjax.core.config import Config, Count, Positive, check_fields
from hpcjax.core.errors import ConfigError
from hpcjax.data.source import Augment, Batch, Source

# A step of the counter-based generator Philox yields four numbers, which are the draws
# of one example.
DRAWS = 4


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
class CropFlipConfig(Config):
    """Random shifts and mirror images of training pictures, and of their masks.

    Attributes:
      pad: largest shift in each direction; must be below the side of the image.
      flip: also mirror left and right with probability 1/2.
    """

    factory: ClassVar[str] = "hpcjax.data.augment:crop_flip"

    pad: Count = 4
    flip: bool = True


def crop_flip(pad: int = 4, flip: bool = True) -> Augment:
    """Returns an augmentation by random shifts of up to `pad` pixels and mirroring.

    Pixels that a shift uncovers are filled by reflection at the border, without
    repeating the border itself. x keeps its shape and dtype; so does y, which moves
    with x if it has a label for each pixel and else is unchanged.

    Args:
      pad: largest shift in each direction; must be below the side of the image.
      flip: also mirror left and right with probability 1/2.

    Raises:
      ConfigError: `pad` is negative, or when used not below the side of the image.

    Examples:
      >>> batch = {"x": np.zeros((2, 8, 8, 1)), "y": np.zeros(2, np.int32)}
      >>> crop_flip(pad=2)(batch, example_rng(0, 0), None)["x"].shape
      (2, 8, 8, 1)
    """
    check_fields(CropFlipConfig, pad=pad)

    def augment(batch: Batch, rng: np.random.Generator, _: Source | None) -> Batch:
        count, height, width = batch["x"].shape[:3]
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
        places = np.arange(count)[:, None, None], rows[:, :, None], columns[:, None]
        # Whatever has the sides of the images moves with them, as masks do.
        sides = batch["x"].shape[:3]
        return {
            name: values[places] if values.shape[:3] == sides else values
            for name, values in batch.items()
        }

    return augment


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixupConfig(Config):
    """Training pictures mixed with other ones, see `mixup`.

    Attributes:
      alpha: of the Beta distribution of shares; 1 for uniform ones.
    """

    factory: ClassVar[str] = "hpcjax.data.augment:mixup"

    alpha: Positive = 1.0


def mixup(alpha: float = 1.0) -> Augment:
    """Returns an augmentation that mixes each picture with another training picture.

    x ← λ x + (1 − λ) x', where x' is drawn of all examples. Zhang et al. (2018) take
    λ ~ Beta(α, α) and the loss λ ℓ(y) + (1 − λ) ℓ(y'). The pair is drawn as often the
    other way round, so the expectation of that loss is the one of 2 λ ℓ(y), and 2 λ
    times the density of Beta(α, α) is that of Beta(α + 1, α). So λ is drawn of the
    latter here and y stays, one label of each example, as all objectives know it.

    Args:
      alpha: α.

    Raises:
      ConfigError: `alpha` is not positive.
    """
    check_fields(MixupConfig, alpha=alpha)
    from scipy import special

    def augment(batch: Batch, rng: np.random.Generator, source: Source) -> Batch:
        images = batch["x"]
        floats = np.issubdtype(images.dtype, np.floating)
        if not floats or not hasattr(source, "gather"):
            raise ConfigError(
                f"mixup takes pictures of floats, of a source that has gather: got "
                f"{images.dtype} of {type(source).__name__}"
            )
        draws = rng.random((len(images), DRAWS))
        others = source.gather((draws[:, 0] * len(source)).astype(np.int64))["x"]
        share = special.betaincinv(alpha + 1, alpha, draws[:, 1]).astype(images.dtype)
        share = share.reshape(-1, *[1] * (images.ndim - 1))
        return {**batch, "x": share * images + (1 - share) * others}

    return augment


def _shift(draws: np.ndarray, side: int, pad: int) -> np.ndarray:
    """Returns for each draw the source pixels along one side, [examples, side]."""
    shifts = (draws * (2 * pad + 1)).astype(np.int64) - pad
    # Reflection: -1 is pixel 1, and `side` is pixel side - 2.
    places = np.abs(shifts[:, None] + np.arange(side))
    return np.where(places >= side, 2 * (side - 1) - places, places)
