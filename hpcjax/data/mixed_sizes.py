"""Batches of one image size each, small images in larger batches; imports no JAX.

Hoffer, Weinstein, Hubara, Ben-Nun, Hoefler and Soudry, "Mix & Match: training convnets
with mixed image sizes for improved accuracy, speed and scale resiliency", 2019. An
epoch is a plan of slots that follows from the seed, so that processes agree on the
size of each step without talking, and a run goes on at any step.
"""

import dataclasses
import functools
import itertools
import logging
import math
import pathlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal, NamedTuple, Self

import numpy as np
from jaxtyping import Int

from hpcjax.core import checks
from hpcjax.core.config import Config, Fraction, Size
from hpcjax.core.objective import Objective
from hpcjax.core.parts import Part
from hpcjax.data._resize import Filter, ResizedSource, resize
from hpcjax.data.augment import example_rng
from hpcjax.data.digits import DigitsConfig
from hpcjax.data.objectives import CLASSIFICATION
from hpcjax.data.source import Batch, Dataset

log = logging.getLogger(__name__)

Mode = Literal["none", "B+", "D+", "B+D+"]
# Added to the epoch, so that no two things are drawn from one stream of numbers;
# those of examples' augmentation have none.
_IMAGES, _ORDER, _SIZES = (number << 32 for number in (1, 2, 3))


class Slot(NamedTuple):
    """What a step trains on.

    Attributes:
      size: sides of its images, in pixels.
      copies: how often each image is in the batch, augmented anew each time.
      indices: the images' numbers, [batch].
    """

    size: int
    copies: int
    indices: Int[np.ndarray, " batch"]


class _Kind(NamedTuple):
    """What slots of a size have in common, and how many images an epoch's part has."""

    size: int
    batch: int
    copies: int
    images: int

    @property
    def rows(self) -> int:
        return self.batch * self.copies


def slot_shape(
    size: int, base_size: int, base_batch: int, mode: Mode, copies: int = 1
) -> tuple[int, int]:
    """Returns the images and the copies of each in a batch of a size.

    With s = (base_size/size)², its root for "B+D+": "B+" has round(s · base_batch)
    images, "D+" round(s · copies) copies of each, at least one. Where that rounds to
    none, the batch shrinks instead. Rounding is Python's, half to even.

    Args:
      size: sides of the images.
      base_size: sides of those of which `base_batch` are in a batch.
      base_batch: how many these are.
      mode: what grows when images are small.
      copies: of each image at the base size.

    References:
      `mixsize_config` of eladhoffer/convNet.pytorch, models/resnet.py.

    Examples:
      >>> [slot_shape(size, 32, 64, "D+") for size in (16, 24, 32, 48)]
      [(64, 4), (64, 2), (64, 1), (28, 1)]
    """
    grow, repeat = mode in ("B+", "B+D+"), mode in ("D+", "B+D+")
    scale = base_size / size if grow and repeat else (base_size / size) ** 2
    if repeat and scale * copies < 0.5:
        grow, repeat = True, False
    batch = round(scale * base_batch) if grow else base_batch
    return batch, max(1, round(scale * copies)) if repeat else copies


@dataclasses.dataclass(frozen=True, kw_only=True)
class MixedSizesConfig(Config):
    """Training images of several sizes, one in each batch; tests have the base size.

    Attributes:
      of: the images, a part. They are augmented at their own size, then resized.
      sizes: sides of the square images that are trained on, in pixels.
      probs: share of the images, or with `sampling=step` of the steps, of each size.
      base_size: the size at which a batch has `train.batch_size` images.
      mode: what grows when images are small: `"B+"` the batch, `"D+"` the number of
        differently augmented copies of each image, `"B+D+"` both, `"none"` nothing.
      copies: of each image at the base size.
      sampling: `"data"` deals the images out to the sizes in each epoch, `"step"` draws
        the size of each step.
      filter: of the resize, which is antialiased.
    """

    objective: ClassVar[Objective] = CLASSIFICATION
    smoke: ClassVar[Mapping[str, str]] = {
        "sizes": "[4,8]",
        "probs": "[0.5,0.5]",
        "base_size": "4",
    }
    draws: ClassVar[bool] = True  # its batches itself

    of: Annotated[Any, Part("dataset")] = DigitsConfig()  # pyrefly: ignore[bad-override]
    sizes: tuple[Size, ...] = (4, 8)
    probs: tuple[Fraction, ...] = (0.5, 0.5)
    base_size: Size = 8
    mode: Mode = "B+"
    copies: Size = 1
    sampling: Literal["data", "step"] = "data"
    filter: Filter = "bilinear"

    def __post_init__(self) -> None:
        super().__post_init__()
        labelled = self.of.objective == CLASSIFICATION
        rule = "of must be images with one label each, such as digits"
        drawn = getattr(self.of, "draws", False)
        checks.require(labelled and not drawn, rule, of=type(self.of).__name__)
        rule = "sizes must differ, and each have its share in probs"
        good = len({*self.sizes}) == len(self.sizes) == len(self.probs) > 0
        checks.require(good, rule, sizes=self.sizes, probs=self.probs)
        good = abs(sum(self.probs) - 1) <= 1e-6
        checks.require(good, "probs must sum to 1", probs=self.probs)
        good = self.mode != "none" or self.sizes == (self.base_size,)
        rule = f"mode=none has no size but base_size={self.base_size}"
        checks.require(good, rule, sizes=self.sizes)

    def load(self, root: pathlib.Path | None = None) -> Dataset:
        """Returns the images; `root` is theirs.

        Examples:
          >>> mixed = MixedSizesConfig().load()
          >>> stream = mixed.train
          >>> slots = range(stream.slots(16))
          >>> batches = [stream.sample(number, 16, 0, (0, 1)) for number in slots]
          >>> sorted({each["x"].shape for each in batches})
          [(16, 8, 8, 1), (64, 4, 4, 1)]
        """
        whole: Dataset = self.of.load(root)
        train: Any = MixedSizes(whole, self)
        return whole._replace(
            train=train,
            validation=ResizedSource(whole.validation, self.base_size, self.filter),
            inputs=(self.base_size, self.base_size, whole.inputs[-1]),
            augment=None,
        )


class MixedSizes:
    """Batches by slots; a `ShapedSampler`.

    Args:
      whole: images in their own size, with their augmentation.
      config: which sizes, how often.
      multiple: batches have a multiple of so many images, which is logged; None for
        any number.
    """

    def __init__(
        self, whole: Dataset, config: MixedSizesConfig, multiple: int | None = None
    ) -> None:
        self.whole, self.config, self.multiple = whole, config, multiple
        self._kinds = functools.lru_cache(4)(self._find_kinds)
        self._slots = functools.lru_cache(4)(self._plan)
        self._count = functools.lru_cache(None)(self._count_slots)

    def __len__(self) -> int:
        return len(self.whole.train)

    def aligned(self, multiple: int) -> Self:
        """Returns a sampler whose batches have a multiple of so many images."""
        return type(self)(self.whole, self.config, multiple)

    def at(self, size: int) -> Self:
        """Returns a sampler of all images at one size, in batches as they are given."""
        config = dataclasses.replace(
            self.config,
            sizes=(size,),
            probs=(1.0,),
            base_size=size,
            mode="none",
            copies=1,
            sampling="data",
        )
        return type(self)(self.whole, config, self.multiple)

    def _find_kinds(self, batch_size: int) -> tuple[_Kind, ...]:
        """Returns what slots there are.

        Raises:
          ConfigError: the part of a size has fewer images than a batch of it.
        """
        config, total = self.config, len(self)
        counts = [math.floor(share * total + 1e-9) for share in config.probs]
        counts[-1] = total - sum(counts[:-1])
        if config.sampling == "step":
            counts = [total] * len(counts)
        found = []
        for size, images in zip(config.sizes, counts, strict=True):
            base, mode = config.base_size, config.mode
            asked, copies = slot_shape(size, base, batch_size, mode, config.copies)
            multiple = self.multiple or 1
            batch = max(asked - asked % multiple, multiple)
            rule = f"the part of dataset.sizes={size} must have a batch of {batch}"
            checks.require(images >= batch, rule, images=images)
            found.append(_Kind(size, batch, copies, images))
            if self.multiple:
                self._tell(found[-1], asked, mode == "D+" and asked < batch_size)
        return tuple(found)

    def _tell(self, kind: _Kind, asked: int, switched: bool) -> None:
        """Logs what is not as one might think, once for each size."""
        if switched:
            told = "batches of %d px have %d images: no copy is half a one"
            log.info(told, kind.size, asked)
        if kind.batch != asked:
            told = "batches of %d px have %d images, not %d, for %d devices"
            log.info(told, kind.size, kind.batch, asked, self.multiple)
        if self.config.sampling == "data":
            lost = kind.images % kind.batch
            log.info("%d px: an epoch leaves out %d images", kind.size, lost)

    def plan(self, batch_size: int, seed: int, epoch: int) -> tuple[Slot, ...]:
        """Returns the slots of an epoch in their order, each image in one at most."""
        return self._slots(batch_size, seed, epoch)

    def _plan(self, batch_size: int, seed: int, epoch: int) -> tuple[Slot, ...]:
        from hpcjax.data.access import shuffle  # which loads JAX, with grain

        kinds = self._kinds(batch_size)
        order = shuffle(len(self), seed, _IMAGES + epoch)
        if self.config.sampling == "step":
            drawn = self._draw(kinds, seed, epoch)
            ends = itertools.accumulate(kind.batch for kind in drawn)
            pairs = zip(drawn, ends, strict=True)
            return tuple(_slot(kind, end - kind.batch, order) for kind, end in pairs)
        found, first = [], 0
        for kind in kinds:
            last = first + kind.images - kind.batch
            places = range(first, last + 1, kind.batch)
            found += [_slot(kind, place, order) for place in places]
            first += kind.images
        return tuple(found[i] for i in shuffle(len(found), seed, _ORDER + epoch))

    def _draw(self, kinds: tuple[_Kind, ...], seed: int, epoch: int) -> list[_Kind]:
        """Returns as many drawn kinds as there are images for."""
        key = np.array([seed, _SIZES + epoch], np.uint64)
        most = len(self) // min(kind.batch for kind in kinds) + 1
        drawn = np.random.Philox(key=key).random_raw(most) / 2.0**64
        bounds = np.cumsum(self.config.probs)[:-1]
        chosen = np.searchsorted(bounds, drawn, side="right")
        ends = np.cumsum(np.array([kind.batch for kind in kinds])[chosen])
        return [kinds[i] for i in chosen[ends <= len(self)]]

    def _count_slots(self, batch_size: int, seed: int, epoch: int) -> int:
        kinds = self._kinds(batch_size)
        if self.config.sampling == "step":
            return len(self._draw(kinds, seed, epoch))
        return sum(kind.images // kind.batch for kind in kinds)

    def slots(self, batch_size: int, seed: int = 0, epoch: int = 0) -> int:
        """Returns the steps of an epoch; with `sampling=data` all have as many."""
        alike = self.config.sampling == "data"
        return self._count(batch_size, *(0, 0) if alike else (seed, epoch))

    def slot(self, number: int, batch_size: int, seed: int) -> Slot:
        """Returns slot `number` of the endless sequence of epochs."""
        if self.config.sampling == "data":
            epoch, place = divmod(number, self.slots(batch_size))
        else:
            epoch, place = 0, number
            while place >= (count := self.slots(batch_size, seed, epoch)):
                epoch, place = epoch + 1, place - count
        return self.plan(batch_size, seed, epoch)[place]

    def rows(self, number: int, batch_size: int, seed: int) -> int:
        """Returns the rows of batch `number`, copies among them."""
        slot = self.slot(number, batch_size, seed)
        return slot.copies * len(slot.indices)

    def shapes(self, batch_size: int) -> list[Batch]:
        """Returns a batch of zeros for each size, in the order of `sizes`."""
        found = []
        for kind in self._kinds(batch_size):
            one = self._make(np.zeros(1, int), kind.size, example_rng(0, 0))
            found.append({name: _zeros(v, kind.rows) for name, v in one.items()})
        return found

    def sample(
        self, number: int, batch_size: int, seed: int, shard: tuple[int, int]
    ) -> Batch:
        """Returns the shard's rows of a batch: images of one size, copies side by side.

        Raises:
          ConfigError: the shards do not divide the rows of a batch.
        """
        from hpcjax.data.pipeline import shard_rows

        slot = self.slot(number, batch_size, seed)
        indices = np.repeat(slot.indices, slot.copies)
        rows = shard_rows(len(indices), shard)
        # Draws belong to rows: no two rows of a run have the same place.
        most = max(kind.rows for kind in self._kinds(batch_size))
        rng = example_rng(seed, number * most + rows.start)
        return self._make(indices[rows], slot.size, rng)

    def _make(self, indices: np.ndarray, size: int, rng: np.random.Generator) -> Batch:
        """Returns images that are read once, augmented in each copy, and resized."""
        source, augment = self.whole.train, self.whole.augment
        distinct, place = np.unique(indices, return_inverse=True)
        found = source.gather(distinct)
        batch = {name: values[place] for name, values in found.items()}
        if augment is not None:
            batch = augment(batch, rng, source)
        return {**batch, "x": resize(batch["x"], size, self.config.filter)}


def _zeros(one: np.ndarray, rows: int) -> np.ndarray:
    """Returns zeros of that shape and dtype for so many rows, which take no memory."""
    return np.broadcast_to(np.zeros_like(one[:1]), (rows, *one.shape[1:]))


def _slot(kind: _Kind, first: int, order: np.ndarray) -> Slot:
    return Slot(kind.size, kind.copies, order[first : first + kind.batch])
