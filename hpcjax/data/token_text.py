"""Texts as windows of byte-pair tokens, to train language models on."""

import dataclasses
import pathlib
from collections.abc import Mapping, Sequence
from typing import Annotated, ClassVar

from hpcjax.core import checks, files
from hpcjax.core.config import AtLeast, Config, FileName, Size
from hpcjax.core.errors import DataFormatError
from hpcjax.core.objective import Objective
from hpcjax.data import corpora as texts
from hpcjax.data.corpora import Part
from hpcjax.data.objectives import LANGUAGE
from hpcjax.data.source import Dataset, subset
from hpcjax.data.text import TextSource
from hpcjax.data.token_cache import cached_tokens, digest_of
from hpcjax.data.tokenizer import (
    END,
    Tokenizer,
    package,
    read_tokenizer,
    train_byte_pairs,
)

FOLDER = "tokenizers"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TokenTextConfig(Config):
    """Byte-pair tokens of texts, in windows of `context` that do not overlap.

    Attributes:
      corpora: each one of "kjv", "python-reference", "python-library", "kernel-docs",
        "wordnet", "wikitext-2", "ptb", "c4", or a UTF-8 file `<root>/text/<name>.txt`
        with blank lines between documents. Documents are held out by their names.
      context: length of x and y.
      vocabulary: largest size of the vocabulary, which is made of the training part.
      limit: largest number of training documents of each corpus, the first after a
        fixed shuffle; None takes all.
    """

    objective: ClassVar[Objective] = LANGUAGE
    smoke: ClassVar[Mapping[str, str]] = {"context": "8", "vocabulary": "300"}

    corpora: tuple[FileName, ...] = ("python-reference",)
    context: Size = 256
    vocabulary: Annotated[int, AtLeast(257)] = 4096
    limit: Size | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "corpora must name at least one"
        checks.require(bool(self.corpora), rule, corpora=self.corpora)

    def load(self, root: pathlib.Path) -> Dataset:
        """Reads texts, trains a byte-pair vocabulary, and cuts the tokens into windows.

        Vocabulary and training windows are from the parts "train" of the corpora,
        validation windows from their parts "validation"; "test" is not read. Each
        document is followed by the token that ends a text. Vocabulary and tokens are
        stored below `root`, see `cached_byte_pairs` and `cached_tokens`; batches are
        read from the disk.

        Raises:
          ConfigError: no such corpus, or the package `tokenizers` is not installed.
          DataMissing: a corpus is not below `root`.
          DataFormatError: a file is damaged, or a part is too short for one window.
        """
        training: list[str] = []
        held_out: list[str] = []
        for corpus in self.corpora:
            train, validation = texts.read_parts(root, corpus, "train", "validation")
            training += (train[number] for number in subset(len(train), self.limit))
            held_out += validation
        coder = cached_byte_pairs(root, training, self.vocabulary)
        sources = [
            _source(root, coder, documents, self.context, part)
            for documents, part in ((training, "train"), (held_out, "validation"))
        ]
        return Dataset(
            sources[0], sources[1], (self.context,), len(coder), LANGUAGE, coder
        )


def cached_byte_pairs(
    root: pathlib.Path, documents: Sequence[str], size: int
) -> Tokenizer:
    """Returns `train_byte_pairs(documents, size)`, from a file if there is one.

    The file is `<root>/tokenizers/<digest>.json`, with the digest of the documents, the
    size and the version of `tokenizers`.

    Raises:
      ConfigError: `size` is too small, or `tokenizers` is not installed.
      DataFormatError: the file is damaged.
      DiskFull: no space is left below `root`.
    """
    path = files.inside(root, FOLDER, f"{fingerprint(documents, size)}.json")
    if not path.exists():
        trained = train_byte_pairs(documents, size)
        files.write_atomic(path, trained.inner.to_str())
    return read_tokenizer(path, eos=END)


def fingerprint(documents: Sequence[str], size: int) -> str:
    """Returns a digest of everything on which a vocabulary depends, 32 hex digits.

    Raises:
      ConfigError: `tokenizers` is not installed.
    """
    return digest_of(f"byte pairs 1, {package().__version__}, {size}", documents)


def _source(
    root: pathlib.Path,
    coder: Tokenizer,
    documents: Sequence[str],
    context: int,
    part: Part,
) -> TextSource:
    tokens = cached_tokens(root, coder, documents)
    if len(tokens) <= context:
        raise DataFormatError(
            f"part {part!r}: expected more than context={context} tokens, found "
            f"{len(tokens)} in {len(documents)} documents"
        )
    return TextSource(tokens, context)
