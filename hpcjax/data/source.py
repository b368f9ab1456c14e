"""Data sets: a training and a validation source of examples, and their objective."""

import pathlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
from jaxtyping import Float, Float32, Int, Int32, UInt8

from hpcjax.core.errors import DataFormatError
from hpcjax.core.objective import Objective
from hpcjax.data.objectives import CLASSIFICATION

Batch = dict[str, Any]
"""Arrays by name, or trees of arrays, whose leading axis is that of the examples."""


@runtime_checkable
class Source(Protocol):
    """Examples addressed by number, which are the same bytes at every access."""

    def __len__(self) -> int:
        """Returns the number of examples."""
        ...

    def gather(self, indices: np.ndarray) -> Batch:
        """Returns the examples at `indices`: "x", what the model takes, and the rest.

        What else there is, is what the data set's objective scores by; in this room "y"
        and, of masked text, what `MaskedSource.gather` says. Images: x float32 [batch,
        height, width, channels], standardised by the training statistics, y int32
        [batch], or for segmentation [batch, height, width]. Text: x and y int32 [batch,
        context], y being x one character later.

        Raises:
          IndexError: an index outside `0 <= index < len(self)`.
        """
        ...


@runtime_checkable
class Sampler(Protocol):
    """Training data that draws its batches itself, such as parts of one large graph."""

    def __len__(self) -> int:
        """Returns how many examples are an epoch, in figures."""
        ...

    def sample(
        self, number: int, batch_size: int, seed: int, shard: tuple[int, int]
    ) -> Batch:
        """Returns the shard's rows of batch `number`, a pure function of the arguments.

        Args:
          number: position in the endless sequence of batches.
          batch_size: examples of the global batch.
          seed: of the run.
          shard: `(index, count)`, the index-th of `count` equal parts.
        """
        ...


@runtime_checkable
class ShapedSampler(Sampler, Protocol):
    """A sampler whose batches have one of a few shapes, which it can tell before."""

    def shapes(self, batch_size: int) -> list[Batch]:
        """Returns a global batch of zeros of each shape."""
        ...

    def rows(self, number: int, batch_size: int, seed: int) -> int:
        """Returns the rows of global batch `number`."""
        ...

    def slots(self, batch_size: int) -> int:
        """Returns the number of batches of an epoch, in figures."""
        ...

    def aligned(self, multiple: int) -> "ShapedSampler":
        """Returns a sampler whose batches have a multiple of so many examples."""
        ...


Augment = Callable[[Batch, np.random.Generator, Any], Batch]
"""`augment(batch, rng, source) -> batch`; see `augment.example_rng` for `rng`."""


class Dataset(NamedTuple):
    """A training and a validation source with what they have in common.

    Attributes:
      train: the training examples, or what draws batches of them.
      validation: examples that are never trained on.
      inputs: shape of one "x": `(height, width, channels)`, `(context,)` for text,
        `(context, 3)` for masked text, or `()` for a vertex, by its number.
      outputs: number of classes, or size of the vocabulary: the last axis of what a
        model puts out.
      objective: what examples ask of a model, and how its outputs are scored.
      coder: the tokenizer of a text; None for other data and unknown tokenizers.
      augment: changes batches of the training source; None leaves them.
      graph: the `graphs.Graph` whose vertices are the examples, which the model is
        made with; None for examples that are whole by themselves.
      owner: where examples are parts of a graph, the part of each of its vertices, int
        [vertices]; None for other examples.
      tables: rows of the tables of categories that examples have numbers of, one table
        after the other, which the model is made with; None for other data.
      axes: how many leads and levels the channels of forecasts are of, for models that
        ask; None for other data.
      channels: names of these channels, but for the place's, for models that choose.
      folds: parts of the dates, each to be unknown to a further mean; None for none.
      joint: whether a model's mean is as it is, and its spread learns from it.
    """

    train: Source  # or a Sampler, which only the training loop asks for batches
    validation: Source
    inputs: tuple[int, ...]
    outputs: int
    objective: Objective
    coder: Any = None
    augment: Augment | None = None
    graph: Any = None
    owner: Any = None
    tables: tuple[int, ...] | None = None
    axes: tuple[int, int] | None = None
    channels: tuple[str, ...] | None = None
    folds: int | None = None
    joint: bool | None = None

    @property
    def given(self) -> dict[str, Any]:
        """What a model is made with besides shapes, by the names of its arguments."""
        names = ("graph", "owner", "tables", "axes", "channels", "folds", "joint")
        found = {name: getattr(self, name) for name in names}
        return {name: value for name, value in found.items() if value is not None}


def check_indices(indices: np.ndarray, size: int) -> None:
    """Raises IndexError unless every index is in `0 <= index < size`.

    NumPy would take negative indices from the end without an error.
    """
    if indices.size and not 0 <= indices.min() <= indices.max() < size:
        raise IndexError(
            f"indices must be in [0, {size}): got {indices.min()} to {indices.max()}"
        )


class ImageSource:
    """Images kept as bytes in memory and standardised when gathered.

    x = (byte − mean) / std, per channel.

    Examples:
      >>> images = np.array([0, 255], np.uint8).reshape(2, 1, 1, 1)
      >>> source = ImageSource(images, np.array([3, 7], np.int32), *statistics(images))
      >>> batch = source.gather(np.array([1, 0]))
      >>> batch["x"].ravel().tolist(), batch["y"].tolist()
      ([1.0, -1.0], [7, 3])
    """

    def __init__(
        self,
        images: UInt8[np.ndarray, "n *space channels"],
        labels: Int32[np.ndarray, "n ..."],
        mean: Float[np.ndarray, " channels"],
        std: Float[np.ndarray, " channels"],
    ) -> None:
        self.images = images
        self.labels = labels
        self.mean = mean.astype(np.float32)
        self.std = std.astype(np.float32)

    def __len__(self) -> int:
        return len(self.labels)

    def gather(self, indices: Int[np.ndarray, " batch"]) -> Batch:
        """Returns standardised images [batch, *space, channels], and labels.

        The labels of images are int32 [batch]; those of pixels [batch, height, width].
        """
        check_indices(indices, len(self))
        pixels: Float32[np.ndarray, "batch *space channels"]
        pixels = (self.images[indices].astype(np.float32) - self.mean) / self.std
        return {"x": pixels, "y": self.labels[indices]}


def statistics(
    images: UInt8[np.ndarray, "n *space channels"],
    path: pathlib.Path = pathlib.Path("images"),
) -> tuple[Float[np.ndarray, " channels"], Float[np.ndarray, " channels"]]:
    """Returns mean and standard deviation of each channel, in float64.

    Computed from the histogram of byte values, they do not depend on the images' order.

    Args:
      images: bytes of the training part.
      path: the file named when a channel has no variation.

    Raises:
      DataFormatError: all bytes of a channel are equal, so it cannot be scaled.
    """
    values = np.arange(256.0)
    means, stds = [], []
    for channel in range(images.shape[-1]):
        counts = np.bincount(images[..., channel].ravel(), minlength=256)
        mean = counts @ values / counts.sum()
        means.append(mean)
        stds.append(np.sqrt(counts @ (values - mean) ** 2 / counts.sum()))
    if min(stds) == 0:
        raise DataFormatError(
            f"{path}: channel {int(np.argmin(stds))}: expected bytes that vary, found "
            f"only {means[int(np.argmin(stds))]:.0f}"
        )
    return np.array(means), np.array(stds)


def subset(size: int, limit: int | None) -> Int[np.ndarray, " kept"]:
    """Returns the numbers of the examples kept by `limit`, all when it is None.

    The examples are shuffled by a permutation that depends on `size` only, and the
    first `limit` are kept, so that a smaller subset is always contained in a larger
    one.

    Examples:
      >>> set(subset(100, 10)) <= set(subset(100, 20))
      True
    """
    if limit is None or limit >= size:
        return np.arange(size)
    return np.random.Generator(np.random.Philox(0)).permutation(size)[:limit]


def split(
    size: int, share: float, seed: int
) -> tuple[Int[np.ndarray, " train"], Int[np.ndarray, " held_out"]]:
    """Splits the numbers 0..size-1 so that `share` of them is in the second part.

    Each part has at least one number, if there are two; both are sorted.

    Examples:
      >>> train, held_out = split(10, 0.2, seed=0)
      >>> len(train), len(held_out), sorted({*train, *held_out}) == list(range(10))
      (8, 2, True)
    """
    order = np.random.Generator(np.random.Philox(seed)).permutation(size)
    count = min(max(round(share * size), 1), size - 1)
    return np.sort(order[count:]), np.sort(order[:count])


def images_dataset(
    train: tuple[np.ndarray, np.ndarray],
    validation: tuple[np.ndarray, np.ndarray],
    *,
    outputs: int,
    limit: int | None,
    validation_limit: int | None = None,
    pad: int = 0,
    objective: Objective = CLASSIFICATION,
    augment: Any = None,
    path: pathlib.Path = pathlib.Path("images"),
) -> Dataset:
    """Returns a data set from two pairs (uint8 images, int32 labels).

    Mean and standard deviation are those of all training images before padding, so that
    they do not depend on `limit`; `pad` adds a border of zero bytes on each side.
    """
    mean, std = statistics(train[0], path)
    border = ((0, 0), (pad, pad), (pad, pad), (0, 0))
    kept = subset(len(train[1]), limit)
    held_out = subset(len(validation[1]), validation_limit)
    sources = [
        ImageSource(np.pad(images, border) if pad else images, labels, mean, std)
        for images, labels in (
            (train[0][kept], train[1][kept]),
            (validation[0][held_out], validation[1][held_out]),
        )
    ]
    shape = sources[0].images.shape[1:]
    return Dataset(
        sources[0],
        sources[1],
        shape,
        outputs,
        objective,
        augment=None if augment is None else augment.make(),
    )
