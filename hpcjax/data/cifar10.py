"""The binary version of CIFAR-10.

Each of the six files is a run of records of 3 073 bytes: the label, then 1 024 bytes of
red, of green and of blue, each plane row by row.
"""

import dataclasses
import pathlib
from typing import ClassVar

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
    """CIFAR-10, 50 000 + 10 000 images of 32x32x3, binary version in `<root>/cifar10`.

    Attributes:
      limit: at most this many training examples, the first after a fixed shuffle.
      augment: how training images are changed, each in its own way in each epoch.
    """

    objective: ClassVar[Objective] = CLASSIFICATION

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
        paths = catalog.locate("cifar10", root)
        parts = [read_cifar10(path) for path in paths.values()]
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
            path=paths[catalog.CIFAR10_TRAIN[0]],
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
    planes = records[:, 1:].reshape(-1, 3, SIDE, SIDE)
    return np.ascontiguousarray(planes.transpose(0, 2, 3, 1)), labels
