"""The handwritten digits that are part of scikit-learn."""

import dataclasses
import importlib.util
import pathlib
from typing import Any, ClassVar

import numpy as np
from jaxtyping import Int, Int32

from hpcjax.core.config import Config, Count, Share, Size
from hpcjax.core.objective import Objective
from hpcjax.data.augment import CropFlipConfig, MixupConfig
from hpcjax.data.objectives import CLASSIFICATION
from hpcjax.data.source import Dataset, images_dataset

CLASSES = 10


@dataclasses.dataclass(frozen=True, kw_only=True)
class DigitsConfig(Config):
    """Handwritten digits, 1 797 images of 8x8x1 in 10 classes, part of scikit-learn.

    Attributes:
      validation: share of each class that is held out, rounded to whole images.
      split_seed: chooses which images; it is not the seed of the run, so that all seeds
        are validated on the same images.
      limit: at most this many training examples, the first after a fixed shuffle.
      scale: factor of nearest-neighbour upsampling; 4 gives images of 32x32.
      augment: how training images are changed, each in its own way in each epoch.
    """

    objective: ClassVar[Objective] = CLASSIFICATION

    validation: Share = 0.2
    split_seed: Count = 0
    limit: Size | None = None
    scale: Size = 1
    augment: CropFlipConfig | MixupConfig | None = None

    def load(self, root: pathlib.Path | None = None) -> Dataset:
        """Returns two parts with equal shares of each class; `root` is not used.

        Examples:
          >>> digits = DigitsConfig().load()
          >>> len(digits.train), len(digits.validation), digits.inputs
          (1438, 359, (8, 8, 1))
        """
        del root
        pixels, labels = read_digits()
        images = pixels.astype(np.uint8).reshape(-1, 8, 8, 1)
        images = images.repeat(self.scale, axis=1).repeat(self.scale, axis=2)
        train, held_out = split_by_class(labels, self.validation, self.split_seed)
        return images_dataset(
            (images[train], labels[train]),
            (images[held_out], labels[held_out]),
            outputs=CLASSES,
            limit=self.limit,
            augment=self.augment,
        )


def read_digits() -> tuple[Int32[np.ndarray, "n 64"], Int32[np.ndarray, " n"]]:
    """Returns the pixels of all scans, 0 to 16, and their digits."""
    # Read where it lies: to import scikit-learn takes longer than most of the rest.
    spec: Any = importlib.util.find_spec("sklearn")
    data = pathlib.Path(spec.origin).parent / "datasets" / "data" / "digits.csv.gz"
    table = np.loadtxt(data, np.int32, delimiter=",")
    return table[:, :-1], table[:, -1]


def split_by_class(
    labels: Int32[np.ndarray, " n"], share: float, seed: int
) -> tuple[Int[np.ndarray, " train"], Int[np.ndarray, " held_out"]]:
    """Splits the numbers 0..n-1, with `share` of each class in the second part.

    Examples:
      >>> train, held_out = split_by_class(np.array([0, 0, 1, 1], np.int32), 0.5, 0)
      >>> np.array([0, 0, 1, 1])[held_out].tolist()
      [0, 1]
    """
    rng = np.random.Generator(np.random.Philox(seed))
    chosen = np.zeros(len(labels), bool)
    for label in np.unique(labels):
        members = rng.permutation(np.flatnonzero(labels == label))
        chosen[members[: round(share * len(members))]] = True
    return np.flatnonzero(~chosen), np.flatnonzero(chosen)
