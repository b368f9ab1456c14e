"""Heads made of ellipsoids, slice by slice, with masks of their lesions."""

import pathlib

import numpy as np
from jaxtyping import Bool, Float, UInt8

from hpcjax.data.source import Dataset, images_dataset, split

CLASSES = 2
AIR, TISSUE, VENTRICLE, LESION = 20.0, 100.0, 50.0, 150.0
# Without noise tissue is darker and a lesion brighter, whatever the field is.
BETWEEN = (TISSUE + LESION) / 2
FIELD = 0.1


def load_phantoms(
    root: pathlib.Path | None = None,
    *,
    patients: int = 24,
    slices: int = 8,
    size: int = 32,
    noise: float = 20.0,
    validation: float = 0.25,
    draw_seed: int = 0,
) -> Dataset:
    """Returns slices of phantoms and the masks of their lesions, split by patient.

    Without noise a threshold finds every mask, so the Dice score's ceiling is 1; with
    it a threshold finds some of it, and the rest is told by shape.

    Args:
      root: unused: nothing is read.
      patients: how many volumes; every other number of them has the same first ones.
      slices: of each volume.
      size: height and width of a slice.
      noise: standard deviation of Gaussian noise, in grey levels of 255; lesions are
        50 brighter than what is around them.
      validation: share of the patients held out, at least one.
      draw_seed: chooses phantoms and split; it is apart from the seed of a run.

    Examples:
      >>> phantoms = load_phantoms(patients=4)
      >>> len(phantoms.train), len(phantoms.validation), phantoms.inputs
      (24, 8, (32, 32, 1))
    """
    del root
    parts = []
    for numbers in split(patients, validation, draw_seed):
        volumes = [
            phantom(int(number), slices, size, noise, draw_seed) for number in numbers
        ]
        images, masks = (np.concatenate(part) for part in zip(*volumes, strict=True))
        parts.append((images[..., None], masks.astype(np.int32)))
    return images_dataset(
        parts[0], parts[1], outputs=CLASSES, limit=None, kind="segmentation"
    )


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
