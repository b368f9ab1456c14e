"""CIFAR-10, in its binary version and in that for Python.

Each of the six binary files is a run of records of 3 073 bytes: the label, then 1 024
bytes of red, of green and of blue, each plane row by row. Those for Python are pickles
of a dictionary with such planes and a list of labels.
"""

import codecs
import dataclasses
import pathlib
import pickle
from typing import Any, ClassVar, Literal

import numpy as np
from jaxtyping import Int32, UInt8

from hpcjax.core.config import Config, Size
from hpcjax.core.errors import DataFormatError
from hpcjax.core.objective import Objective
from hpcjax.data import catalog
from hpcjax.data.augment import CropFlipConfig, MixupConfig
from hpcjax.data.idx import check_labels
from hpcjax.data.objectives import CLASSIFICATION
from hpcjax.data.source import Dataset, images_dataset

CLASSES = 10
SIDE = 32
RECORD = 1 + 3 * SIDE * SIDE


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cifar10Config(Config):
    """CIFAR-10, 50 000 + 10 000 images of 32x32x3, in `<root>/cifar10`.

    Attributes:
      form: "binary", files such as data_batch_1.bin, or "python", such as data_batch_1.
      limit: at most this many training examples, the first after a fixed shuffle.
      augment: how training images are changed, each in its own way in each epoch.
    """

    objective: ClassVar[Objective] = CLASSIFICATION

    form: Literal["binary", "python"] = "binary"
    limit: Size | None = None
    augment: CropFlipConfig | MixupConfig | None = None

    def load(self, root: pathlib.Path) -> Dataset:
        """Reads the five training files and the test file below `root/cifar10`.

        The format has no header. A file that is truncated between two records is
        noticed because all six files must have the same number of records.

        Raises:
          DataMissing: a file is absent.
          DataFormatError: a file is cut, or has a label above 9.
        """
        if self.form == "binary":
            paths, read = catalog.locate("cifar10", root), read_cifar10
        else:
            paths, read = _locate_pickles(root), read_cifar10_python
        parts = [read(path) for path in paths.values()]
        records = max(len(labels) for _, labels in parts)
        for path, (_, labels) in zip(paths.values(), parts, strict=True):
            if len(labels) != records:
                raise DataFormatError(
                    f"{path}: record {len(labels)}: expected {records} records as in "
                    f"the other files, found {len(labels)}"
                )
        train = parts[:-1]
        return images_dataset(
            (
                np.concatenate([images for images, _ in train]),
                np.concatenate([labels for _, labels in train]),
            ),
            parts[-1],
            outputs=CLASSES,
            limit=self.limit,
            augment=self.augment,
            path=next(iter(paths.values())),
        )


def read_cifar10(
    path: pathlib.Path,
) -> tuple[UInt8[np.ndarray, "n 32 32 3"], Int32[np.ndarray, " n"]]:
    """Reads one file.

    Returns:
      Images [n, 32, 32, 3] and labels [n].

    Raises:
      DataFormatError: not a regular file, a size that is not a multiple of a record's,
        an empty file, or a label above 9.
    """
    catalog.check_regular(path)
    size = path.stat().st_size
    if size == 0 or size % RECORD:
        raise DataFormatError(
            f"{path}: record {size // RECORD} at offset {size // RECORD * RECORD}: "
            f"expected {RECORD} bytes, found {size % RECORD}"
        )
    records = np.fromfile(path, np.uint8).reshape(-1, RECORD)
    labels = check_labels(records[:, 0], CLASSES, path, 0, RECORD)
    return _images(records[:, 1:]), labels


def _images(planes: np.ndarray) -> UInt8[np.ndarray, "n 32 32 3"]:
    """Returns images of rows of three planes."""
    planes = planes.reshape(-1, 3, SIDE, SIDE)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1))


def _locate_pickles(root: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns the paths of the six files for Python; raises DataMissing."""
    binary = (*catalog.CIFAR10_TRAIN, catalog.CIFAR10_TEST)
    found = {}
    for name in (each.removesuffix(".bin") for each in binary):
        path = catalog.find(root, "cifar10", name)
        if path is None:
            known = catalog.entry("cifar10")
            raise catalog.missing_error(known, root / "cifar10" / name)
        found[name] = path
    return found


class _Arrays(pickle.Unpickler):
    """Unpickles arrays, and nothing that could run."""

    _ALLOWED: ClassVar[dict[str, Any]] = {
        "_reconstruct": np.zeros(0).__reduce__()[0],
        "ndarray": np.ndarray,
        "dtype": np.dtype,
        "encode": codecs.encode,
    }

    def find_class(self, module: str, name: str) -> Any:
        """Returns what arrays are made with; raises UnpicklingError for others."""
        if module.partition(".")[0] in ("numpy", "_codecs") and name in self._ALLOWED:
            return self._ALLOWED[name]
        raise pickle.UnpicklingError(f"{module}.{name} in the place of an array")


def read_cifar10_python(
    path: pathlib.Path,
) -> tuple[UInt8[np.ndarray, "n 32 32 3"], Int32[np.ndarray, " n"]]:
    """Reads one file of the version for Python; nothing in it is run.

    Returns:
      Images [n, 32, 32, 3] and labels [n].

    Raises:
      DataFormatError: not a regular file, no whole pickle, no such dictionary, or a
        label above 9.
    """
    catalog.check_regular(path)
    wanted = f"expected a pickle of data, bytes [n, {RECORD - 1}], and n labels"
    try:
        with path.open("rb") as file:
            held = _Arrays(file, encoding="bytes").load()
        data, labels = held[b"data"], np.asarray(held[b"labels"])
    except Exception as error:  # of a damaged pickle it may be any
        raise DataFormatError(f"{path}: {wanted}, found: {error!r}") from error
    found = getattr(data, "dtype", None), np.shape(data), labels.shape
    if found != (np.uint8, (len(labels), RECORD - 1), (len(labels),)):
        told = f"{found[0]} {list(found[1])} and labels {list(found[2])}"
        raise DataFormatError(f"{path}: {wanted}, found {told}")
    if not np.issubdtype(labels.dtype, np.integer) or labels.min(initial=0) < 0:
        raise DataFormatError(f"{path}: {wanted} from 0, found {labels.dtype}")
    return _images(data), check_labels(labels, CLASSES, path, 0)
