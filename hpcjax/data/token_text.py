"""Texts as windows of byte-pair tokens, for training language models."""

import hashlib
import pathlib
from collections.abc import Sequence

import numpy as np
from jaxtyping import Int32

from hpcjax.core import files
from hpcjax.core.errors import ConfigError, DataFormatError
from hpcjax.data import corpora as texts
from hpcjax.data.corpora import Part
from hpcjax.data.source import Dataset, subset
from hpcjax.data.text import TextSource
from hpcjax.data.tokenizer import (
    END,
    Tokenizer,
    package,
    read_tokenizer,
    train_byte_pairs,
)

FOLDER = "tokenizers"


def load_token_text(
    root: pathlib.Path,
    *,
    corpora: tuple[str, ...] = ("python-reference",),
    context: int = 256,
    vocabulary: int = 4096,
    limit: int | None = None,
) -> Dataset:
    """Reads texts, makes a byte-pair vocabulary of them, and cuts tokens in windows.

    Vocabulary and training windows are of the parts "train" of the corpora, validation
    windows of their parts "validation"; "test" is not read. Each document is followed
    by the token that ends a text. The vocabulary is kept below `root`, by what it was
    made of.

    Args:
      root: the data root.
      corpora: names as in `read_part`.
      context: length of x and y.
      vocabulary: most tokens, at least 257.
      limit: at most this many documents of each corpus to train on, the first after a
        fixed shuffle.

    Raises:
      ConfigError: no such corpus, or the package `tokenizers` is not installed.
      DataMissing: a corpus is not below `root`.
      DataFormatError: a file is damaged, or a part is too short for one window.
    """
    training: list[str] = []
    held_out: list[str] = []
    for corpus in corpora:
        train, validation = texts.read_parts(root, corpus, "train", "validation")
        training += (train[number] for number in subset(len(train), limit))
        held_out += validation
    coder = cached_byte_pairs(root, training, vocabulary)
    sources = [
        _source(coder, documents, context, part)
        for documents, part in ((training, "train"), (held_out, "validation"))
    ]
    return Dataset(sources[0], sources[1], (context,), len(coder), "language", coder)


def cached_byte_pairs(
    root: pathlib.Path, documents: Sequence[str], size: int
) -> Tokenizer:
    """Returns `train_byte_pairs(documents, size)`, read if it was made before.

    It is kept as `<root>/tokenizers/<digest>.json`, the digest being that of the
    documents, the size and the version of `tokenizers`.

    Raises:
      ConfigError: `size` is too small, or `tokenizers` is not installed.
      DataFormatError: the file is damaged.
      DiskFull: no space is left below `root`.
    """
    path = files.inside(root, FOLDER, f"{fingerprint(documents, size)}.json")
    if not path.exists():
        made = train_byte_pairs(documents, size)
        files.write_atomic(path, made.inner.to_str())
    return read_tokenizer(path, eos=END)


def fingerprint(documents: Sequence[str], size: int) -> str:
    """Returns 32 hexadecimal digits of what a vocabulary is made of.

    Raises:
      ConfigError: `tokenizers` is not installed.
    """
    version = package().__version__
    digest = hashlib.sha256(f"byte pairs 1, {version}, {size}".encode())
    for document in documents:
        coded = document.encode()
        digest.update(f"\n{len(coded)}\n".encode())
        digest.update(coded)
    return digest.hexdigest()[:32]


def encode_documents(
    coder: Tokenizer, documents: Sequence[str]
) -> Int32[np.ndarray, " tokens"]:
    """Returns the tokens of documents in a row, each followed by `coder.eos`.

    Raises:
      ConfigError: the tokenizer has no token that ends a text.
    """
    if coder.eos is None:
        raise ConfigError("the tokenizer must have a token that ends a text: eos")
    end = np.array([coder.eos], np.int32)
    parts = [part for codes in coder.encode_all(documents) for part in (codes, end)]
    return np.concatenate([np.empty(0, np.int32), *parts])


def _source(
    coder: Tokenizer, documents: Sequence[str], context: int, part: Part
) -> TextSource:
    tokens = encode_documents(coder, documents)
    if len(tokens) <= context:
        raise DataFormatError(
            f"part {part!r}: expected more than context={context} tokens, found "
            f"{len(tokens)} in {len(documents)} documents"
        )
    return TextSource(tokens, context)
