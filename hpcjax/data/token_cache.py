"""Tokens of a corpus, computed once and then read from the disk as they are needed."""

import hashlib
import pathlib
from collections.abc import Sequence
from typing import IO

import numpy as np
from jaxtyping import Int32

from hpcjax.core import files
from hpcjax.core.errors import ConfigError, DataFormatError
from hpcjax.data.tokenizer import Tokenizer, package

FOLDER = "tokens"
# Documents that are encoded before their tokens are written.
_BATCH = 256
_DTYPE = np.dtype("<i4")


def encode_documents(
    coder: Tokenizer, documents: Sequence[str]
) -> Int32[np.ndarray, " tokens"]:
    """Returns the tokens of all documents, each followed by `coder.eos`.

    Raises:
      ConfigError: the tokenizer has no token that ends a text.
    """
    if coder.eos is None:
        raise ConfigError("the tokenizer must have a token that ends a text: eos")
    end = np.array([coder.eos], np.int32)
    parts = [part for codes in coder.encode_all(documents) for part in (codes, end)]
    return np.concatenate([np.empty(0, np.int32), *parts])


def cached_tokens(
    root: pathlib.Path, coder: Tokenizer, documents: Sequence[str]
) -> Int32[np.ndarray, " tokens"]:
    """Returns `encode_documents(coder, documents)`, mapped from a file of the disk.

    The file is `<root>/tokens/<digest>.npy`, with the digest of the documents, of the
    tokenizer and of the version of `tokenizers`. It is written once, a few documents at
    a time, and replaces nothing before it is whole: what is held in memory is never all
    tokens, neither here nor when batches are read.

    Raises:
      ConfigError: the tokenizer has no token that ends a text.
      DataFormatError: the file is damaged.
      DiskFull: no space is left below `root`.
    """
    name = f"{digest_of(_describe(coder), documents)}.npy"
    path = files.inside(root, FOLDER, name)
    if not path.exists():
        _write(path, coder, documents)
    try:
        tokens = np.load(path, mmap_mode="r" if documents else None)
    except (ValueError, EOFError) as error:
        raise DataFormatError(
            f"{path}: damaged: {error}; delete it, and it is made again"
        ) from error
    if tokens.dtype != _DTYPE or tokens.ndim != 1:
        raise DataFormatError(
            f"{path}: expected int32 [tokens], found {tokens.dtype} "
            f"{list(tokens.shape)}; delete it, and it is made again"
        )
    return tokens


def digest_of(kind: str, documents: Sequence[str]) -> str:
    """Returns a digest of documents and of what is made of them, 32 hex digits."""
    digest = hashlib.sha256(kind.encode())
    for document in documents:
        coded = document.encode()
        # The length keeps apart documents that are the same only when joined.
        digest.update(f"\n{len(coded)}\n".encode())
        digest.update(coded)
    return digest.hexdigest()[:32]


def _describe(coder: Tokenizer) -> str:
    return f"tokens 1, {package().__version__}, {coder.eos}, {coder.inner.to_str()}"


def _write(path: pathlib.Path, coder: Tokenizer, documents: Sequence[str]) -> None:
    count = 0
    with files.replacing(path) as temporary, temporary.open("wb") as file:
        _write_head(file, 0)
        for start in range(0, len(documents), _BATCH):
            tokens = encode_documents(coder, documents[start : start + _BATCH])
            file.write(tokens.astype(_DTYPE).tobytes())
            count += len(tokens)
        # Numpy pads the head of a file such that its first axis may still grow.
        file.seek(0)
        _write_head(file, count)


def _write_head(file: IO[bytes], count: int) -> None:
    head = {"descr": _DTYPE.str, "fortran_order": False, "shape": (count,)}
    np.lib.format.write_array_header_1_0(file, head)
