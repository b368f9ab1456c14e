"""The handwritten digits that scikit-learn ships."""

import pathlib
from typing import Any

import numpy as np
from jaxtyping import Int, Int32

from hpcjax.data.source import Dataset, images_dataset

CLASSES = 10


def load_digits(
    root: pathlib.Path | None = None,
    *,
    validation: float = 0.2,
    split_seed: int = 0,
    limit: int | None = None,
    scale: int = 1,
) -> Dataset:
    """Returns the 1 797 images of 8x8 in two parts with equal shares of each class.

    Args:
      root: unused: the data set is part of an installed package.
      validation: share of each class that is held out, rounded to whole images.
      split_seed: chooses which; it is apart from the seed of a run, so that every seed
        is judged on the same images.
      limit: at most this many training examples, the first after a fixed shuffle.
      scale: pixels become squares of so many pixels a side; 4 gives images of 32x32.

    Examples:
      >>> digits = load_digits()
      >>> len(digits.train), len(digits.validation), digits.inputs
      (1438, 359, (8, 8, 1))
    """
    del root
    from sklearn import datasets

    bunch: Any = datasets.load_digits()
    images = bunch.images.astype(np.uint8)[..., None]
    images = images.repeat(scale, axis=1).repeat(scale, axis=2)
    labels = bunch.target.astype(np.int32)
    train, held_out = split_by_class(labels, validation, split_seed)
    return images_dataset(
        (images[train], labels[train]),
        (images[held_out], labels[held_out]),
        outputs=CLASSES,
        limit=limit,
    )


def split_by_class(
    labels: Int32[np.ndarray, " n"], share: float, seed: int
) -> tuple[Int[np.ndarray, " train"], Int[np.ndarray, " held_out"]]:
    """Splits the numbers 0..n-1 so that each class gives `share` to the second part.

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
