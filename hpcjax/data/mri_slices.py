"""Slices of scans with masks, one folder per patient, as the LGG data set is kept."""

import pathlib
from typing import Literal, NamedTuple

import numpy as np
from jaxtyping import Float32, Int, Int32, UInt8
from PIL import Image

from hpcjax.core import files
from hpcjax.core.errors import DataFormatError
from hpcjax.data import catalog
from hpcjax.data.source import Batch, Dataset, check_indices, split

CLASSES = 2
SUFFIX, MASK = ".tif", "_mask.tif"


class Slice(NamedTuple):
    """The files of one slice."""

    image: pathlib.Path
    mask: pathlib.Path


class SliceSource:
    """Slices decoded when they are gathered: x = (byte / 255 − mean) / std."""

    def __init__(
        self,
        slices: list[Slice],
        *,
        size: int,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
    ) -> None:
        self.slices = slices
        self.size = size
        self.mean = np.asarray(mean, np.float32)
        self.std = np.asarray(std, np.float32)

    def __len__(self) -> int:
        return len(self.slices)

    def gather(self, indices: Int[np.ndarray, " batch"]) -> Batch:
        """Returns slices [batch, size, size, 3] and masks [batch, size, size] of 0, 1.

        Raises:
          DataFormatError: a file that is no whole TIFF; names it.
        """
        check_indices(indices, len(self))
        pairs = [self.slices[index] for index in indices]
        raw = np.stack([read_slice(pair.image, self.size, "RGB") for pair in pairs])
        masks = np.stack([read_slice(pair.mask, self.size, "L") for pair in pairs])
        pixels = raw.astype(np.float32) / np.float32(255)
        x: Float32[np.ndarray, "batch size size 3"] = (pixels - self.mean) / self.std
        y: Int32[np.ndarray, "batch size size"] = (masks > 127).astype(np.int32)
        return {"x": x, "y": y}


def load_mri_slices(
    root: pathlib.Path,
    *,
    name: str = "lgg",
    size: int = 256,
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0),
    std: tuple[float, float, float] = (1.0, 1.0, 1.0),
    validation: float = 0.09,
    split_seed: int = 0,
) -> Dataset:
    """Lists `root/name/<patient>/*.tif` and `*_mask.tif`; they are read later.

    All slices of a patient are in one part. The defaults are those of LGG, 110 patients
    of whom 10 are held out.

    Args:
      root: the data root.
      name: the folder of the data set.
      size: height and width the slices are brought to.
      mean: per channel, of values in [0, 1].
      std: likewise.
      validation: share of the patients held out, at least one.
      split_seed: chooses which; not the seed of the run.

    Raises:
      ConfigError: a symbolic link out of `root`.
      DataMissing: no such folder.
      DataFormatError: a file of another type, a slice without its mask or the reverse,
        or fewer than two patients.
    """
    folder = files.inside(root, name)
    if not folder.is_dir():
        raise catalog.missing_error(catalog.entry("lgg"), folder)
    found = [
        list_slices(path, root)
        for path in catalog.visible(folder, root)
        if path.is_dir()
    ]
    patients = [slices for slices in found if slices]
    if len(patients) < 2:
        raise DataFormatError(
            f"{folder}: expected a folder for each of two patients or more, found "
            f"{len(patients)} with slices"
        )
    sources = [
        SliceSource(
            [one for number in numbers for one in patients[number]],
            size=size,
            mean=mean,
            std=std,
        )
        for numbers in split(len(patients), validation, split_seed)
    ]
    return Dataset(sources[0], sources[1], (size, size, 3), CLASSES, "segmentation")


def list_slices(folder: pathlib.Path, root: pathlib.Path) -> list[Slice]:
    """Lists the slices of one patient, sorted by name; hidden files are passed over.

    Raises:
      ConfigError: a symbolic link out of `root`.
      DataFormatError: a file of another type, or a slice without its mask or the
        reverse.
    """
    paths = catalog.visible(folder, root)
    for path in paths:
        if path.suffix != SUFFIX:
            raise DataFormatError(
                f"{path}: expected a name ending in {SUFFIX}, found {path.name!r}"
            )
    names = {path.name for path in paths}
    images = sorted(name for name in names if not name.endswith(MASK))
    masks = [name.removesuffix(SUFFIX) + MASK for name in images]
    odd = sorted(names ^ {*images, *masks})
    if odd:
        raise DataFormatError(
            f"{folder}: expected a mask for each slice and the reverse, found one "
            f"only for {odd[:5]}"
        )
    pairs = zip(images, masks, strict=True)
    return [Slice(folder / image, folder / mask) for image, mask in pairs]


def read_slice(
    path: pathlib.Path, size: int, mode: Literal["RGB", "L"]
) -> UInt8[np.ndarray, "size size ..."]:
    """Decodes one TIFF, as three channels or as grey levels, and resizes it.

    Raises:
      DataFormatError: the file is absent, no TIFF, or ends early.
    """
    try:
        with Image.open(path, formats=("TIFF",)) as picture:
            image = picture.convert(mode)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataFormatError(
            f"{path}: expected a whole TIFF, found: {error}"
        ) from error
    # A mask has two values, between which there is nothing.
    how = Image.Resampling.BILINEAR if mode == "RGB" else Image.Resampling.NEAREST
    return np.asarray(image.resize((size, size), how))
