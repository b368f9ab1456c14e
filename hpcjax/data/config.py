"""Which data an experiment uses; reading this module loads neither JAX nor readers."""

import dataclasses
import pathlib
from typing import Any

from hpcjax.core import files
from hpcjax.core.errors import ConfigError
from hpcjax.data.augment import Augment
from hpcjax.data.source import Dataset


def _at_least(config: Any, least: int, *names: str) -> None:
    for name in names:
        value = getattr(config, name)
        if value is not None and value < least:
            raise ConfigError(f"{name} must be at least {least}: got {name}={value}")


def _share(config: Any, name: str) -> None:
    value = getattr(config, name)
    if not 0 < value < 1:
        raise ConfigError(f"{name} must be in (0, 1): got {name}={value}")


def _values(config: Any) -> dict[str, Any]:
    return {
        field.name: getattr(config, field.name) for field in dataclasses.fields(config)
    }


@dataclasses.dataclass(frozen=True, kw_only=True)
class DigitsConfig:
    """Handwritten digits, 1 797 images of 8x8x1 in 10 classes, part of scikit-learn.

    Attributes:
      validation: share of each class that is held out.
      split_seed: chooses which; not the seed of the run.
      limit: at most this many training examples, the first after a fixed shuffle.
      scale: pixels become squares of so many pixels a side.
    """

    validation: float = 0.2
    split_seed: int = 0
    limit: int | None = None
    scale: int = 1

    def __post_init__(self) -> None:
        _share(self, "validation")
        _at_least(self, 0, "split_seed")
        _at_least(self, 1, "limit", "scale")

    def load(self, root: pathlib.Path) -> Dataset:
        """Reads the data set; `root` is not used."""
        from hpcjax.data import digits

        return digits.load_digits(root, **_values(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MnistConfig:
    """MNIST, 60 000 + 10 000 images of 28x28x1 in 10 classes, below `<root>/mnist`.

    Attributes:
      limit: at most this many training examples, the first after a fixed shuffle.
      validation_limit: at most this many validation examples, chosen likewise.
      pad: zero pixels added on each side; 2 gives 32x32.
    """

    limit: int | None = None
    validation_limit: int | None = None
    pad: int = 0

    def __post_init__(self) -> None:
        _at_least(self, 0, "pad")
        _at_least(self, 1, "limit", "validation_limit")

    def load(self, root: pathlib.Path) -> Dataset:
        """Reads the IDX files, plain or gzipped.

        Raises:
          DataMissing: a file is absent; the message has the command to get it.
          DataFormatError: a file is damaged.
        """
        from hpcjax.data import idx

        return idx.load_idx(root, name="mnist", **_values(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class FashionMnistConfig:
    """Fashion-MNIST, the same sizes as MNIST, below `<root>/fashion-mnist`.

    Attributes:
      limit: at most this many training examples, the first after a fixed shuffle.
      validation_limit: at most this many validation examples, chosen likewise.
      pad: zero pixels added on each side; 2 gives 32x32.
    """

    limit: int | None = None
    validation_limit: int | None = None
    pad: int = 0

    def __post_init__(self) -> None:
        _at_least(self, 0, "pad")
        _at_least(self, 1, "limit", "validation_limit")

    def load(self, root: pathlib.Path) -> Dataset:
        """Reads the IDX files, plain or gzipped.

        Raises:
          DataMissing: a file is absent; the message has the command to get it.
          DataFormatError: a file is damaged.
        """
        from hpcjax.data import idx

        return idx.load_idx(root, name="fashion-mnist", **_values(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class Cifar10Config:
    """CIFAR-10, 50 000 + 10 000 images of 32x32x3, binary version in `<root>/cifar10`.

    Attributes:
      limit: at most this many training examples, the first after a fixed shuffle.
    """

    limit: int | None = None

    def __post_init__(self) -> None:
        _at_least(self, 1, "limit")

    def load(self, root: pathlib.Path) -> Dataset:
        """Reads the six binary files.

        Raises:
          DataMissing: a file is absent.
          DataFormatError: a file is damaged.
        """
        from hpcjax.data import cifar10

        return cifar10.load_cifar10(root, **_values(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class ImageFolderConfig:
    """Pictures in `<root>/<name>/{train,val}/<class>/*.jpg|jpeg|png`, such as ImageNet.

    Attributes:
      name: the folder of the data set.
      size: side of the centre crop.
      resize: length the shorter side is brought to before the crop.
      mean: per channel, of values in [0, 1]; the default is that of ImageNet.
      std: likewise.
      limit: at most this many training examples, the first after a fixed shuffle.
    """

    name: str = "image-folder"
    size: int = 224
    resize: int = 256
    mean: tuple[float, float, float] = (0.485, 0.456, 0.406)
    std: tuple[float, float, float] = (0.229, 0.224, 0.225)
    limit: int | None = None

    def __post_init__(self) -> None:
        files.check_name(self.name)
        _at_least(self, 1, "size", "limit")
        if self.resize < self.size:
            raise ConfigError(
                f"resize must be at least size: got resize={self.resize}, "
                f"size={self.size}"
            )
        if min(self.std) <= 0:
            raise ConfigError(f"std must be positive: got std={self.std}")

    def load(self, root: pathlib.Path) -> Dataset:
        """Lists the pictures; they are decoded when a batch needs them.

        Raises:
          DataMissing: no such folder.
          DataFormatError: an empty class or a file of another type.
        """
        from hpcjax.data import image_folder

        return image_folder.load_image_folder(root, **_values(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class CharTextConfig:
    """Characters of a text, in windows of `context` that do not overlap.

    Attributes:
      corpus: "python-reference" (ships with Python; its text differs between versions),
        "kjv" (the King James Bible), or a UTF-8 file `<root>/text/<name>.txt`.
      context: length of x and y.
      validation: share of the characters, at the end of the text, that is held out.
    """

    corpus: str = "python-reference"
    context: int = 256
    validation: float = 0.1

    def __post_init__(self) -> None:
        _share(self, "validation")
        _at_least(self, 1, "context")
        files.check_name(self.corpus, "corpus")

    def load(self, root: pathlib.Path) -> Dataset:
        """Reads and codes the text.

        Raises:
          ConfigError: no such corpus.
          DataMissing: it is not below `root`.
          DataFormatError: it is not UTF-8, or too short.
        """
        from hpcjax.data import text

        return text.load_text(root, **_values(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenTextConfig:
    """Byte-pair tokens of texts, in windows of `context` that do not overlap.

    Attributes:
      corpora: each one of "kjv", "python-reference", "python-library", "kernel-docs",
        "wordnet", "wikitext-2", "ptb", "c4", or a UTF-8 file `<root>/text/<name>.txt`
        with blank lines between documents. Documents are held out by their names.
      context: length of x and y.
      vocabulary: most tokens of a vocabulary trained on the documents trained on.
      limit: at most this many documents of each corpus to train on, the first after a
        fixed shuffle.
    """

    corpora: tuple[str, ...] = ("python-reference",)
    context: int = 256
    vocabulary: int = 4096
    limit: int | None = None

    def __post_init__(self) -> None:
        _at_least(self, 1, "context", "limit")
        _at_least(self, 257, "vocabulary")
        if not self.corpora:
            raise ConfigError("corpora must name at least one: got corpora=()")
        for corpus in self.corpora:
            files.check_name(corpus, "corpora")

    def load(self, root: pathlib.Path) -> Dataset:
        """Reads the texts, makes or finds the vocabulary, and codes them.

        Raises:
          ConfigError: no such corpus, or the package `tokenizers` is not installed.
          DataMissing: a corpus is not below `root`.
          DataFormatError: it is damaged, or too short.
        """
        from hpcjax.data import token_text

        return token_text.load_token_text(root, **_values(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MaskedTextConfig:
    """Pairs of sentences with masked words, in sequences of `context` pieces of words.

    Attributes:
      corpus: as in `CharTextConfig`; a file has a sentence per line and blank lines
        between documents.
      context: length of a sequence.
      vocabulary: most pieces of a vocabulary trained on the documents trained on.
      vocabulary_file: name of a `vocab.txt` below `<root>/text` to use instead.
      lowercase: whether letters lose their case and their accents.
      mask_rate: share of the tokens to be predicted.
      copies: how often each run of sentences is used, paired and masked anew.
      validation: share of the documents held out.
      draw_seed: chooses which, and the draws; not the seed of the run.
    """

    corpus: str = "python-reference"
    context: int = 128
    vocabulary: int = 4096
    vocabulary_file: str | None = None
    lowercase: bool = True
    mask_rate: float = 0.15
    copies: int = 5
    validation: float = 0.1
    draw_seed: int = 0

    def __post_init__(self) -> None:
        _share(self, "mask_rate")
        _share(self, "validation")
        _at_least(self, 0, "draw_seed")
        _at_least(self, 1, "vocabulary", "copies")
        _at_least(self, 5, "context")
        files.check_name(self.corpus, "corpus")
        if self.vocabulary_file is not None:
            files.check_name(self.vocabulary_file, "vocabulary_file")

    def load(self, root: pathlib.Path) -> Dataset:
        """Reads and codes the text.

        Raises:
          ConfigError: no such corpus, or a vocabulary smaller than the alphabet.
          DataMissing: it is not below `root`.
          DataFormatError: it is damaged, or holds too few documents.
        """
        from hpcjax.data import masked_text

        return masked_text.load_masked_text(root, **_values(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PhantomsConfig:
    """Heads made of ellipsoids, slice by slice, with masks of their lesions.

    Attributes:
      patients: how many volumes; every other number of them has the same first ones.
      slices: of each volume.
      size: height and width of a slice.
      noise: standard deviation of Gaussian noise, in grey levels of 255; lesions are
        50 brighter than what is around them.
      validation: share of the patients held out, at least one.
      draw_seed: chooses phantoms and split; not the seed of the run.
    """

    patients: int = 24
    slices: int = 8
    size: int = 32
    noise: float = 20.0
    validation: float = 0.25
    draw_seed: int = 0

    def __post_init__(self) -> None:
        _share(self, "validation")
        _at_least(self, 0, "noise", "draw_seed")
        _at_least(self, 1, "slices", "size")
        _at_least(self, 2, "patients")

    def load(self, root: pathlib.Path) -> Dataset:
        """Draws the data set; `root` is not used."""
        from hpcjax.data import phantoms

        return phantoms.load_phantoms(root, **_values(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class MriSlicesConfig:
    """Slices with masks in `<root>/<name>/<patient>/*.tif` and `*_mask.tif`, as LGG.

    Attributes:
      name: the folder of the data set.
      size: height and width the slices are brought to.
      mean: per channel, of values in [0, 1].
      std: likewise.
      validation: share of the patients held out, at least one.
      split_seed: chooses which; not the seed of the run.
    """

    name: str = "lgg"
    size: int = 256
    mean: tuple[float, float, float] = (0.0, 0.0, 0.0)
    std: tuple[float, float, float] = (1.0, 1.0, 1.0)
    validation: float = 0.09
    split_seed: int = 0

    def __post_init__(self) -> None:
        files.check_name(self.name)
        _share(self, "validation")
        _at_least(self, 0, "split_seed")
        _at_least(self, 1, "size")
        if min(self.std) <= 0:
            raise ConfigError(f"std must be positive: got std={self.std}")

    def load(self, root: pathlib.Path) -> Dataset:
        """Lists the slices; they are decoded when a batch needs them.

        Raises:
          DataMissing: no such folder.
          DataFormatError: a slice without its mask, or too few patients.
        """
        from hpcjax.data import mri_slices

        return mri_slices.load_mri_slices(root, **_values(self))


@dataclasses.dataclass(frozen=True, kw_only=True)
class PadCropFlipConfig:
    """Random shifts and mirror images of training pictures.

    Attributes:
      pad: largest shift in each direction; must be below the side of the image.
      flip: also mirror left and right with probability 1/2.
    """

    pad: int = 4
    flip: bool = True

    def __post_init__(self) -> None:
        _at_least(self, 0, "pad")

    def make(self) -> Augment:
        """Returns the augmentation for `batches(..., augment=...)`."""
        from hpcjax.data import augment

        return augment.pad_crop_flip(**_values(self))


ImageConfig = (
    DigitsConfig | MnistConfig | FashionMnistConfig | Cifar10Config | ImageFolderConfig
)
SegmentationConfig = PhantomsConfig | MriSlicesConfig
TextConfig = CharTextConfig | TokenTextConfig | MaskedTextConfig
DataConfig = ImageConfig | TextConfig | SegmentationConfig
