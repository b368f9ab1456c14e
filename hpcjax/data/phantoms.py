"""Synthetic scans of heads made of ellipsoids, with masks of their lesions."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, ClassVar

import numpy as np
from jaxtyping import Bool, Float, UInt8

from hpcjax.core.config import AtLeast, Config, Count, NotNegative, Share, Size
from hpcjax.core.objective import Objective
from hpcjax.data.augment import CropFlipConfig
from hpcjax.data.objectives import SEGMENTATION, VOLUME_SEGMENTATION
from hpcjax.data.source import Dataset, images_dataset, split

CLASSES = 2
AIR, TISSUE, VENTRICLE, LESION = 20.0, 100.0, 50.0, 150.0
# A threshold between the two: without noise tissue is below and lesions are above it,
# as the bias field changes grey levels by 10 % at most.
BETWEEN = (TISSUE + LESION) / 2
# Amplitude of a linear bias field, as the coils of a scanner have.
FIELD = 0.1


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhantomsConfig(Config):
    """Slices of synthetic heads made of ellipsoids, with masks of their lesions.

    Attributes:
      patients: number of volumes; volume n is the same for every number of them.
      slices: number of slices of each volume.
      size: height and width of a slice.
      noise: standard deviation of Gaussian noise, in grey levels of 255; lesions are
        50 brighter than what is around them.
      validation: share of the patients held out, at least one.
      draw_seed: chooses phantoms and split; it is not the seed of the run.
      augment: how training slices and their masks are moved, each in its own way in
        each epoch.
    """

    objective: ClassVar[Objective] = SEGMENTATION
    smoke: ClassVar[Mapping[str, str]] = {"patients": "4", "slices": "2", "size": "16"}

    patients: Annotated[int, AtLeast(2)] = 24
    slices: Size = 8
    size: Size = 32
    noise: NotNegative = 20.0
    validation: Share = 0.25
    draw_seed: Count = 0
    augment: CropFlipConfig | None = None

    def load(self, root: pathlib.Path | None = None) -> Dataset:
        """Returns slices and the masks of their lesions, split by patient.

        Without noise a threshold separates the lesions, so a Dice score of 1 can be
        reached; with noise it does so in part, and shapes tell the rest. `root` is not
        used.

        Examples:
          >>> phantoms = PhantomsConfig(patients=4).load()
          >>> len(phantoms.train), len(phantoms.validation), phantoms.inputs
          (24, 8, (32, 32, 1))
        """
        del root
        return images_dataset(
            *_draw_parts(self, self.slices, np.concatenate),
            outputs=CLASSES,
            limit=None,
            objective=SEGMENTATION,
            augment=self.augment,
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhantomVolumesConfig(Config):
    """Whole synthetic heads made of ellipsoids, with masks of their lesions.

    Attributes:
      patients: number of volumes; volume n is the same for every number of them.
      depth: number of slices of a volume.
      size: height and width of a slice.
      noise: see `PhantomsConfig`.
      validation: share of the patients held out, at least one.
      draw_seed: chooses phantoms and split; it is not the seed of the run.
    """

    objective: ClassVar[Objective] = VOLUME_SEGMENTATION
    smoke: ClassVar[Mapping[str, str]] = {"patients": "4", "depth": "8", "size": "8"}

    patients: Annotated[int, AtLeast(2)] = 24
    depth: Size = 32
    size: Size = 32
    noise: NotNegative = 20.0
    validation: Share = 0.25
    draw_seed: Count = 0

    def load(self, root: pathlib.Path | None = None) -> Dataset:
        """Returns the volumes of `PhantomsConfig` with as many slices, uncut.

        Examples:
          >>> PhantomVolumesConfig(patients=4, depth=8).load().inputs
          (8, 32, 32, 1)
        """
        del root
        return images_dataset(
            *_draw_parts(self, self.depth, np.stack),
            outputs=CLASSES,
            limit=None,
            objective=VOLUME_SEGMENTATION,
        )


def _draw_parts(
    config: PhantomsConfig | PhantomVolumesConfig,
    slices: int,
    join: Callable[[Sequence[np.ndarray]], np.ndarray],
) -> tuple[Any, Any]:
    """Returns images and masks of the patients to train on, and of the others."""

    def draw(numbers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        volumes = [
            phantom(int(n), slices, config.size, config.noise, config.draw_seed)
            for n in numbers
        ]
        images, masks = (join(part) for part in zip(*volumes, strict=True))
        return images[..., None], masks.astype(np.int32)

    train, held_out = split(config.patients, config.validation, config.draw_seed)
    return draw(train), draw(held_out)


def phantom(
    number: int, slices: int, size: int, noise: float, seed: int
) -> tuple[UInt8[np.ndarray, "z y x"], Bool[np.ndarray, "z y x"]]:
    """Returns the volume of one patient and the mask of its lesions."""
    rng = np.random.Generator(np.random.Philox(key=seed, counter=number << 64))
    grid = np.meshgrid(
        *(np.linspace(-1, 1, length) for length in (slices, size, size)), indexing="ij"
    )
    head = ellipsoid(grid, np.zeros(3), np.array([1.5, *rng.uniform(0.75, 0.9, 2)]))
    dark, bright = np.zeros_like(head), np.zeros_like(head)
    for side in (-1, 1):
        centre = np.array([0, 0, 0.2 * side]) + rng.uniform(-0.05, 0.05, 3)
        dark |= ellipsoid(grid, centre, rng.uniform((0.5, 0.2, 0.05), (0.8, 0.4, 0.12)))
    for _ in range(rng.integers(1, 3)):
        centre = rng.uniform(-0.45, 0.45, 3) * (1.5, 1, 1)
        bright |= ellipsoid(
            grid, centre, rng.uniform((0.3, 0.15, 0.15), (0.7, 0.35, 0.35))
        )
    values = np.where(head, TISSUE, AIR)
    values = np.where(dark, VENTRICLE, values)
    values = np.where(bright, LESION, values)
    slope = rng.uniform(-1, 1, 3)
    values *= 1 + FIELD * np.tensordot(slope / np.abs(slope).sum(), grid, 1)
    values += noise * rng.normal(size=values.shape)
    return np.clip(np.round(values), 0, 255).astype(np.uint8), bright


def ellipsoid(
    grid: list[np.ndarray] | tuple[np.ndarray, ...],
    centre: Float[np.ndarray, "3"],
    half_axes: Float[np.ndarray, "3"],
) -> Bool[np.ndarray, "z y x"]:
    """Returns where the points of a grid are inside an ellipsoid."""
    parts = zip(grid, centre, half_axes, strict=True)
    distance = [((axis - c) / a) ** 2 for axis, c, a in parts]
    return np.sum(distance, axis=0) <= 1
