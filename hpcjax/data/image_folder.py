"""Pictures in a folder for each class, the usual form of ImageNet on disk."""

import contextlib
import dataclasses
import functools
import io
import pathlib
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

import numpy as np
from jaxtyping import Float32, Int, Int32, UInt8

from hpcjax.core import checks, files
from hpcjax.core.config import Config, FileName, Positive, Size
from hpcjax.core.errors import DataFormatError
from hpcjax.core.objective import Objective
from hpcjax.data import catalog
from hpcjax.data.augment import CropFlipConfig, MixupConfig
from hpcjax.data.objectives import CLASSIFICATION
from hpcjax.data.source import Batch, Dataset, check_indices, subset

SUFFIXES = (".jpg", ".jpeg", ".png")


class Listing(NamedTuple):
    """The pictures of one split: their paths, labels, and the names of the classes."""

    paths: list[pathlib.Path]
    labels: Int32[np.ndarray, " n"]
    classes: list[str]


class Pictures:
    """Encoded pictures; what their records are read from is for subclasses to say.

    x = (byte / 255 − mean) / std, after a resize of the shorter side and a centre crop.
    """

    def __init__(
        self,
        labels: Int32[np.ndarray, " n"],
        *,
        size: int,
        resize: int,
        mean: tuple[float, float, float],
        std: tuple[float, float, float],
    ) -> None:
        self.labels = labels
        self.size = size
        self.resize = resize
        self.mean = np.asarray(mean, np.float32)
        self.std = np.asarray(std, np.float32)

    def __len__(self) -> int:
        return len(self.labels)

    def name_of(self, index: int) -> str:
        """Returns where a picture is, for errors."""
        raise NotImplementedError

    def read(self, index: int) -> bytes:
        """Returns a picture as it is stored."""
        raise NotImplementedError

    def decode(self, records: list[bytes], indices: Int[np.ndarray, " batch"]) -> Batch:
        """Returns standardised pictures [batch, size, size, 3] and labels [batch].

        Raises:
          DataFormatError: a record that is no whole picture; names it.
        """
        raw = [
            decode_image(record, self.name_of(i), self.resize, self.size)
            for record, i in zip(records, indices, strict=True)
        ]
        pixels = np.stack(raw).astype(np.float32) / np.float32(255)
        x: Float32[np.ndarray, "batch size size 3"] = (pixels - self.mean) / self.std
        return {"x": x, "y": self.labels[indices]}

    def gather(self, indices: Int[np.ndarray, " batch"]) -> Batch:
        """Returns what `decode` does of the records at `indices`.

        Raises:
          DataFormatError: a record that is no whole picture; names it.
        """
        check_indices(indices, len(self))
        return self.decode([self.read(i) for i in indices], indices)


class FolderSource(Pictures):
    """Pictures in files of their own, which are read when they are gathered."""

    def __init__(
        self, paths: list[pathlib.Path], labels: Int32[np.ndarray, " n"], **form: Any
    ) -> None:
        super().__init__(labels, **form)
        self.paths = paths

    @functools.cached_property
    def sizes(self) -> Int[np.ndarray, " n"]:
        """Bytes of each file.

        Raises:
          DataFormatError: one is not there.
        """
        return np.array([_size(path) for path in self.paths])

    def name_of(self, index: int) -> str:
        """Returns the path of a picture."""
        return str(self.paths[index])

    def read(self, index: int) -> bytes:
        """Returns the content of a file.

        Raises:
          DataFormatError: it cannot be read.
        """
        return _content(self.paths[index])


@dataclasses.dataclass(frozen=True, kw_only=True)
class PicturesConfig(Config):
    """How encoded pictures become examples.

    Attributes:
      size: side of the centre crop.
      resize: length to which the shorter side is resized before the crop.
      mean: per channel, of values in [0, 1]; the default is that of ImageNet.
      std: likewise.
      limit: at most this many training examples, the first after a fixed shuffle.
      augment: how training images are changed, each in its own way in each epoch.
    """

    objective: ClassVar[Objective] = CLASSIFICATION

    size: Size = 224
    resize: Size = 256
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[Positive, Positive, Positive] = (0.229, 0.224, 0.225)
    limit: Size | None = None
    augment: CropFlipConfig | MixupConfig | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "resize must be at least size"
        checks.require(
            self.resize >= self.size, rule, resize=self.resize, size=self.size
        )

    @property
    def form(self) -> dict[str, Any]:
        """What `Pictures` takes of this."""
        names = ("size", "resize", "mean", "std")
        return {name: getattr(self, name) for name in names}

    def dataset(self, train: Pictures, validation: Pictures, outputs: int) -> Dataset:
        """Returns the data set of two sources."""
        augment = None if self.augment is None else self.augment.make()
        inputs = (self.size, self.size, 3)
        return Dataset(
            train, validation, inputs, outputs, CLASSIFICATION, augment=augment
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageFolderConfig(PicturesConfig):
    """Pictures in `<root>/<name>/{train,val}/<class>/*.jpg|jpeg|png`, such as ImageNet.

    Attributes:
      name: the folder of the data set.
    """

    name: FileName = "image-folder"

    def load(self, root: pathlib.Path) -> Dataset:
        """Lists the pictures; they are decoded when a batch needs them.

        Raises:
          ConfigError: a symbolic link out of `root`.
          DataMissing: no such folder.
          DataFormatError: an empty class, a file of another type, or classes in `val`
            that are not those of `train`.
        """
        folder = files.inside(root, self.name)
        parts = []
        for split in ("train", "val"):
            place = files.inside(root, self.name, split)
            if not place.is_dir():
                raise catalog.missing_error(catalog.entry("image-folder"), place)
            parts.append(list_images(place, root))
        train, validation = parts
        if train.classes != validation.classes:
            odd = sorted(set(train.classes) ^ set(validation.classes))
            raise DataFormatError(
                f"{folder / 'val'}: expected the {len(train.classes)} classes of "
                f"train, found {len(validation.classes)}; not in both: {odd[:5]}"
            )
        kept = subset(len(train.paths), self.limit)
        paths = [train.paths[i] for i in kept]
        return self.dataset(
            FolderSource(paths, train.labels[kept], **self.form),
            FolderSource(validation.paths, validation.labels, **self.form),
            len(train.classes),
        )


def list_images(folder: pathlib.Path, root: pathlib.Path) -> Listing:
    """Lists the pictures of one split; classes and files are sorted by name.

    Hidden files are ignored.

    Args:
      folder: the split.
      root: the data root, out of which no symbolic link may lead.

    Raises:
      ConfigError: a symbolic link out of `root`.
      DataFormatError: no class, an empty class, or a file that is no picture.
    """
    classes = [
        path.name for path in catalog.list_visible(folder, root) if path.is_dir()
    ]
    if not classes:
        raise DataFormatError(f"{folder}: expected one folder per class, found none")
    paths: list[pathlib.Path] = []
    labels: list[int] = []
    for label, name in enumerate(classes):
        members = catalog.list_visible(folder / name, root)
        for path in members:
            if path.suffix.lower() not in SUFFIXES:
                raise DataFormatError(
                    f"{path}: expected a name ending in {', '.join(SUFFIXES)}, found "
                    f"{path.name!r}"
                )
        if not members:
            raise DataFormatError(f"{folder / name}: expected pictures, found none")
        paths += members
        labels += [label] * len(members)
    return Listing(paths, np.asarray(labels, np.int32), classes)


def read_image(
    path: pathlib.Path, resize: int, size: int
) -> UInt8[np.ndarray, "size size 3"]:
    """Returns what `decode_image` makes of a file.

    Raises:
      DataFormatError: the file is absent, no JPEG or PNG, or ends early.
    """
    return decode_image(_content(path), str(path), resize, size)


def _content(path: pathlib.Path) -> bytes:
    with _telling(path):
        return path.read_bytes()


def _size(path: pathlib.Path) -> int:
    with _telling(path):
        return path.stat().st_size


@contextlib.contextmanager
def _telling(path: pathlib.Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise DataFormatError(
            f"{path}: expected a whole JPEG or PNG, found: {error}"
        ) from error


def decode_image(
    content: bytes, name: str, resize: int, size: int
) -> UInt8[np.ndarray, "size size 3"]:
    """Decodes a JPEG or PNG, resizes its shorter side to `resize`, crops the centre.

    Only the crop is resampled, so that a long and thin picture needs little memory.

    Raises:
      DataFormatError: no JPEG or PNG, or one that ends early; says the name.
    """
    from PIL import Image

    try:
        with Image.open(io.BytesIO(content), formats=("JPEG", "PNG")) as picture:
            image = picture.convert("RGB")
    except (OSError, SyntaxError, ValueError, Image.DecompressionBombError) as error:
        said = str(error).partition(" <")[0]  # the rest names a place in memory
        raise DataFormatError(
            f"{name}: expected a whole JPEG or PNG, found: {said}"
        ) from error
    scale = resize / min(image.size)
    (left, right), (top, bottom) = (
        _middle(side, max(resize, round(side * scale)), size) for side in image.size
    )
    box = (left, top, right, bottom)
    return np.asarray(image.resize((size, size), Image.Resampling.BILINEAR, box=box))


def _middle(side: int, resized: int, size: int) -> tuple[float, float]:
    """Returns both ends of the crop along one side, in pixels of the original.

    The side is resized to `resized` pixels, of which the middle `size` are the crop.
    """
    start = (resized - size) // 2
    return start * side / resized, (start + size) * side / resized
