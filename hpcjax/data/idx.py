"""The IDX format of MNIST and Fashion-MNIST, plain or gzipped.

A file has two zero bytes, a byte for the type of its values, a byte for the number of
dimensions, each dimension as a big-endian 32-bit integer, and the values in C order.
Only unsigned bytes (type 0x08) can be read; all files of both data sets have that type.
"""

import dataclasses
import gzip
import io
import pathlib
import zlib
from collections.abc import Mapping
from typing import ClassVar, Literal

import numpy as np
from jaxtyping import Int32, UInt8

from hpcjax.core.config import Config, Count, Size
from hpcjax.core.errors import DataFormatError
from hpcjax.core.objective import Objective
from hpcjax.data import catalog
from hpcjax.data.augment import CropFlipConfig, MixupConfig
from hpcjax.data.objectives import CLASSIFICATION
from hpcjax.data.source import Dataset, images_dataset

CLASSES = 10
SIDE = 28
# Larger than any file of this format in use; a damaged header can ask for terabytes.
_MOST_BYTES = 1 << 31


@dataclasses.dataclass(frozen=True, kw_only=True)
class IdxConfig(Config):
    """Base of the configs of MNIST and Fashion-MNIST.

    Attributes:
      folder: where the files are below the data root.
      limit: at most this many training examples, the first after a fixed shuffle.
      validation_limit: at most this many validation examples, chosen likewise.
      pool: height and width of the blocks of pixels whose means make smaller images.
      pad: zero pixels added on each side afterwards; 2 gives 32x32.
      augment: how training images are changed, each in its own way in each epoch.
    """

    objective: ClassVar[Objective] = CLASSIFICATION

    folder: ClassVar[str]
    smoke: ClassVar[Mapping[str, str]] = {"limit": "32", "validation_limit": "8"}

    limit: Size | None = None
    validation_limit: Size | None = None
    pool: Literal[1, 2, 4, 7, 14] = 1
    pad: Count = 0
    augment: CropFlipConfig | MixupConfig | None = None

    def load(self, root: pathlib.Path) -> Dataset:
        """Reads the four files, plain or gzipped.

        Raises:
          DataMissing: a file is absent; the message has the command to get it.
          DataFormatError: a file is not what its header, or the data set, says.
        """
        paths = catalog.locate(self.folder, root)
        train, validation = (
            _pair(
                paths[f"{part}-images-idx3-ubyte"],
                paths[f"{part}-labels-idx1-ubyte"],
                self.pool,
            )
            for part in ("train", "t10k")
        )
        return images_dataset(
            train,
            validation,
            outputs=CLASSES,
            limit=self.limit,
            validation_limit=self.validation_limit,
            pad=self.pad,
            augment=self.augment,
            path=paths["train-images-idx3-ubyte"],
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class MnistConfig(IdxConfig):
    """MNIST, 60 000 + 10 000 images of 28x28x1 in 10 classes, below `<root>/mnist`."""

    folder: ClassVar[str] = "mnist"


@dataclasses.dataclass(frozen=True, kw_only=True)
class FashionMnistConfig(IdxConfig):
    """Fashion-MNIST, the same sizes as MNIST, below `<root>/fashion-mnist`."""

    folder: ClassVar[str] = "fashion-mnist"


def _pair(
    images_path: pathlib.Path, labels_path: pathlib.Path, pool: int
) -> tuple[UInt8[np.ndarray, "n side side 1"], Int32[np.ndarray, " n"]]:
    images = read_idx(images_path, 3)
    labels = read_idx(labels_path, 1)
    if images.shape[1:] != (SIDE, SIDE):
        raise DataFormatError(
            f"{images_path}: offset 8: expected images of {SIDE}x{SIDE}, found "
            f"{images.shape[1]}x{images.shape[2]}"
        )
    if len(images) != len(labels):
        raise DataFormatError(
            f"{labels_path}: offset 4: expected {len(images)} labels, one per image of "
            f"{images_path.name}, found {len(labels)}"
        )
    if pool > 1:
        blocks = images.reshape(-1, SIDE // pool, pool, SIDE // pool, pool)
        images = blocks.mean((2, 4), dtype=np.float32).round().astype(np.uint8)
    return images[..., None], check_labels(labels, CLASSES, labels_path, 8)


def check_labels(
    labels: UInt8[np.ndarray, " n"],
    classes: int,
    path: pathlib.Path,
    offset: int,
    stride: int = 1,
) -> Int32[np.ndarray, " n"]:
    """Returns the labels as int32.

    Args:
      labels: one byte per example.
      classes: number of classes.
      path: the file they come from, for the message.
      offset: position of the first label in the file.
      stride: bytes from one label to the next.

    Raises:
      DataFormatError: a label is not below `classes`; names its record and offset.
    """
    bad = np.flatnonzero(labels >= classes)
    if bad.size:
        raise DataFormatError(
            f"{path}: record {bad[0]} at offset {offset + stride * bad[0]}: expected a "
            f"label below {classes}, found {labels[bad[0]]}"
        )
    return labels.astype(np.int32)


def read_idx(path: pathlib.Path, ndim: int) -> np.ndarray:
    """Reads one IDX file of unsigned bytes.

    Whether it is gzipped is decided by its first two bytes, not by its name.

    Args:
      path: the file.
      ndim: the number of dimensions that it must have.

    Returns:
      uint8 array with `ndim` dimensions.

    Raises:
      DataFormatError: no regular file, wrong magic number, an empty dimension, fewer or
        more bytes than the header says, or a damaged gzip stream.
    """
    catalog.check_regular(path)
    with path.open("rb") as plain:
        zipped = plain.read(2) == b"\x1f\x8b"
    try:
        with gzip.GzipFile(path) if zipped else path.open("rb") as file:
            return _read(file, path, ndim)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise DataFormatError(
            f"{path}: expected a whole gzip stream, found: {error}"
        ) from error


def _read(
    file: gzip.GzipFile | io.BufferedReader, path: pathlib.Path, ndim: int
) -> np.ndarray:
    magic = bytes((0, 0, 8, ndim))
    header = file.read(4 + 4 * ndim)
    if header[:4] != magic:
        raise DataFormatError(
            f"{path}: offset 0: expected magic number 0x{magic.hex()}, found "
            f"0x{header[:4].hex()}"
        )
    if len(header) < 4 + 4 * ndim:
        raise DataFormatError(
            f"{path}: offset {len(header)}: expected a header of {4 + 4 * ndim} bytes, "
            "found the end of the file"
        )
    shape = tuple(int(n) for n in np.frombuffer(header, ">u4", ndim, 4))
    size = int(np.prod(shape, dtype=object))
    if not 0 < size <= _MOST_BYTES:
        raise DataFormatError(
            f"{path}: offset 4: expected 1 to {_MOST_BYTES} values, found shape {shape}"
        )
    # One byte more, to notice a file that is too long.
    data = file.read(size + 1)
    if len(data) != size:
        found = "more" if len(data) > size else f"the end of the file after {len(data)}"
        raise DataFormatError(
            f"{path}: offset {len(header) + min(size, len(data))}: expected {size} "
            f"bytes for shape {shape}, found {found}"
        )
    return np.frombuffer(data, np.uint8).reshape(shape)
