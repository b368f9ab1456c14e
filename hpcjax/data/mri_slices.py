"""Slices of scans with masks in a folder for each patient, as in the LGG data set."""

import dataclasses
import pathlib
from typing import ClassVar, Literal, NamedTuple

import numpy as np
from jaxtyping import Float32, Int, Int32, UInt8

from hpcjax.core import files
from hpcjax.core.config import Config, Count, FileName, Positive, Share, Size
from hpcjax.core.errors import DataFormatError
from hpcjax.core.objective import Objective
from hpcjax.data import catalog
from hpcjax.data.augment import CropFlipConfig
from hpcjax.data.objectives import SEGMENTATION
from hpcjax.data.source import Batch, Dataset, check_indices, split

CLASSES = 2
SUFFIX, MASK = ".tif", "_mask.tif"


class Slice(NamedTuple):
    """The files of one slice."""

    image: pathlib.Path
    mask: pathlib.Path


class SliceSource:
    """Slices that are decoded when gathered: x = (byte / 255 − mean) / std."""

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


@dataclasses.dataclass(frozen=True, kw_only=True)
class MriSlicesConfig(Config):
    """Slices `<root>/<name>/<patient>/*.tif` with masks `*_mask.tif`, such as LGG.

    Attributes:
      name: the folder of the data set.
      size: height and width to which slices are resized.
      mean: per channel, of values in [0, 1].
      std: likewise.
      validation: share of the patients held out, at least one.
      split_seed: chooses which patients; it is not the seed of the run.
      augment: how training slices and their masks are moved, each in its own way in
        each epoch.
    """

    objective: ClassVar[Objective] = SEGMENTATION

    name: FileName = "lgg"
    size: Size = 256
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[Positive, Positive, Positive] = (1.0, 1.0, 1.0)
    validation: Share = 0.09
    split_seed: Count = 0
    augment: CropFlipConfig | None = None

    def load(self, root: pathlib.Path) -> Dataset:
        """Lists the slices; they are decoded when a batch needs them.

        All slices of a patient are in one part. The defaults are those of LGG, 110
        patients of whom 10 are held out.

        Raises:
          ConfigError: a symbolic link out of `root`.
          DataMissing: no such folder.
          DataFormatError: a file of another type, a slice without its mask or the
            reverse, or fewer than two patients.
        """
        folder = files.inside(root, self.name)
        if not folder.is_dir():
            raise catalog.missing_error(catalog.entry("lgg"), folder)
        folders = [
            list_slices(path, root)
            for path in catalog.list_visible(folder, root)
            if path.is_dir()
        ]
        patients = [slices for slices in folders if slices]
        if len(patients) < 2:
            raise DataFormatError(
                f"{folder}: expected a folder for each of two patients or more, found "
                f"{len(patients)} with slices"
            )
        sources = [
            SliceSource(
                [one for number in numbers for one in patients[number]],
                size=self.size,
                mean=self.mean,
                std=self.std,
            )
            for numbers in split(len(patients), self.validation, self.split_seed)
        ]
        inputs = (self.size, self.size, 3)
        return Dataset(
            sources[0],
            sources[1],
            inputs,
            CLASSES,
            SEGMENTATION,
            augment=None if self.augment is None else self.augment.make(),
        )


def list_slices(folder: pathlib.Path, root: pathlib.Path) -> list[Slice]:
    """Lists the slices of one patient, sorted by name, without hidden files.

    Raises:
      ConfigError: a symbolic link out of `root`.
      DataFormatError: a file of another type, or a slice without its mask or the
        reverse.
    """
    paths = catalog.list_visible(folder, root)
    for path in paths:
        if path.suffix != SUFFIX:
            raise DataFormatError(
                f"{path}: expected a name ending in {SUFFIX}, found {path.name!r}"
            )
    names = {path.name for path in paths}
    images = sorted(name for name in names if not name.endswith(MASK))
    masks = [name.removesuffix(SUFFIX) + MASK for name in images]
    # Images and the masks they should have, against what is there, in both directions.
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
    from PIL import Image

    try:
        with Image.open(path, formats=("TIFF",)) as picture:
            image = picture.convert(mode)
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        raise DataFormatError(
            f"{path}: expected a whole TIFF, found: {error}"
        ) from error
    # Interpolating a mask of two values would make values between them.
    how = Image.Resampling.BILINEAR if mode == "RGB" else Image.Resampling.NEAREST
    return np.asarray(image.resize((size, size), how))
