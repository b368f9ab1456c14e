"""Random examples, for measurements that depend on their shapes only."""

import numpy as np

from hpcjax.data.objectives import LANGUAGE
from hpcjax.data.source import Dataset, images_dataset
from hpcjax.data.text import TextSource


def noise_images(
    count: int, inputs: tuple[int, int, int], classes: int, *, seed: int = 0
) -> Dataset:
    """Returns a data set of uniform random bytes with random labels.

    Args:
      count: number of training images; the validation part has one.
      inputs: height, width and channels.
      classes: number of classes, from which labels are drawn uniformly.
      seed: of the draws.

    Examples:
      >>> dataset = noise_images(4, (8, 8, 3), 10)
      >>> dataset.train.gather(np.arange(2))["x"].shape
      (2, 8, 8, 3)
    """
    rng = np.random.Generator(np.random.Philox(seed))
    images = rng.integers(0, 256, (count, *inputs), np.uint8)
    labels = rng.integers(0, classes, count).astype(np.int32)
    held_out = images[:1], labels[:1]
    return images_dataset((images, labels), held_out, outputs=classes, limit=None)


def noise_tokens(
    count: int, context: int, vocabulary: int, *, seed: int = 0
) -> Dataset:
    """Returns a data set of windows of uniform random tokens.

    Args:
      count: number of training windows; the validation part has one.
      context: length of x and y.
      vocabulary: number of tokens, which are drawn uniformly.
      seed: of the draws.

    Examples:
      >>> dataset = noise_tokens(4, 8, 11)
      >>> dataset.train.gather(np.arange(2))["y"].shape
      (2, 8)
    """
    rng = np.random.Generator(np.random.Philox(seed))
    codes = rng.integers(0, vocabulary, count * context + 1).astype(np.int32)
    train, held_out = (
        TextSource(part, context) for part in (codes, codes[: context + 1])
    )
    return Dataset(train, held_out, (context,), vocabulary, LANGUAGE)
