"""The IDX format of MNIST and Fashion-MNIST, plain or gzipped.

A file is two zero bytes, one byte for the type of the values, one for the number of
dimensions, each dimension as a big-endian 32-bit integer, then the values in C order.
Only unsigned bytes (type 0x08) are read: all files of both data sets hold these.
"""

import gzip
import io
import pathlib
import zlib

import numpy as np
from jaxtyping import Int32, UInt8

from hpcjax.core.errors import DataFormatError
from hpcjax.data import catalog
from hpcjax.data.source import Dataset, images_dataset

CLASSES = 10
SIDE = 28
# Larger than any file of this format in use; a damaged header can ask for terabytes.
_MOST_BYTES = 1 << 31


def load_idx(
    root: pathlib.Path,
    *,
    name: str,
    limit: int | None = None,
    validation_limit: int | None = None,
    pad: int = 0,
) -> Dataset:
    """Reads the four files of `mnist` or `fashion-mnist` below `root/name`.

    Args:
      root: the data root.
      name: the data set.
      limit: at most this many training examples, the first after a fixed shuffle.
      validation_limit: at most this many validation examples, chosen likewise.
      pad: zero pixels added on each side; 2 gives 32x32.

    Raises:
      DataMissing: a file is absent.
      DataFormatError: a file is not what its header, or the data set, says.
    """
    paths = catalog.locate(name, root)
    parts = [
        _pair(paths[f"{part}-images-idx3-ubyte"], paths[f"{part}-labels-idx1-ubyte"])
        for part in ("train", "t10k")
    ]
    return images_dataset(
        parts[0],
        parts[1],
        outputs=CLASSES,
        limit=limit,
        validation_limit=validation_limit,
        pad=pad,
        path=paths["train-images-idx3-ubyte"],
    )


def _pair(
    images_path: pathlib.Path, labels_path: pathlib.Path
) -> tuple[UInt8[np.ndarray, "n 28 28 1"], Int32[np.ndarray, " n"]]:
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
      classes: how many there are.
      path: the file they come from.
      offset: where in it the first label lies.
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
      ndim: how many dimensions it must have.

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
    data = file.read(size + 1)
    if len(data) != size:
        found = "more" if len(data) > size else f"the end of the file after {len(data)}"
        raise DataFormatError(
            f"{path}: offset {len(header) + min(size, len(data))}: expected {size} "
            f"bytes for shape {shape}, found {found}"
        )
    return np.frombuffer(data, np.uint8).reshape(shape)
