"""Texts for language models, split into training, validation and test parts."""

import hashlib
import itertools
import os
import pathlib
import re
import sysconfig
import tokenize
from collections.abc import Mapping
from typing import Literal, get_args

import numpy as np
from jaxtyping import Int32

from hpcjax.core import files
from hpcjax.core.errors import ConfigError, DataFormatError, DataMissing, nearest
from hpcjax.data import catalog, text, wordnet
from hpcjax.data.records import field, read_lines, read_records

Part = Literal["train", "validation", "test"]
PARTS = get_args(Part)
# Corpora that are split here by the names of documents, and those published in parts.
_WHOLE = (*text.CORPORA, "python-library", "kernel-docs", "wordnet")
_PARTED = ("wikitext-2", "ptb", "c4")
NAMES = (*_WHOLE, *_PARTED)
_FILES = {
    "wikitext-2": "wiki.{}.raw",
    "ptb": "ptb.{}.txt",
    "c4": "c4-{}.*.json.gz",
}
_NO_LIBRARY = {
    "test",
    "tests",
    "idle_test",
    "site-packages",
    "dist-packages",
    "__pycache__",
}


def part_of(name: str) -> Part:
    """Returns the part that a document belongs to, which depends on its name alone.

    The SHA-1 digest of the name modulo 100 is below 5 for validation, and from 5 to 9
    for test. Adding documents to a corpus moves no other document.

    Examples:
      >>> [part_of(name) for name in ("Genesis 1", "Genesis 20", "Psalms 6")]
      ['train', 'validation', 'train']
    """
    bucket = int(hashlib.sha1(name.encode(), usedforsecurity=False).hexdigest(), 16)
    bucket %= 100
    return "validation" if bucket < 5 else "test" if bucket < 10 else "train"


def check_name(corpus: str) -> None:
    """Raises ConfigError unless `corpus` is a known one or a plain name "….txt"."""
    if corpus in NAMES:
        return
    files.check_name(corpus, "corpus")
    if not corpus.endswith(".txt"):
        raise ConfigError(
            f"corpus must be one of {NAMES} or a file name ending in .txt: got "
            f"{corpus!r}{nearest(corpus, NAMES)}"
        )


def read_part(root: pathlib.Path, corpus: str, part: Part = "train") -> list[str]:
    """Returns the documents of one part of a corpus; see `read_parts`."""
    return read_parts(root, corpus, part)[0]


def read_parts(root: pathlib.Path, corpus: str, *parts: Part) -> list[list[str]]:
    """Returns the documents of parts of a corpus, which is read once.

    "wikitext-2", "ptb" and "c4" are published in parts; a part of the first two is a
    single document. Documents of other corpora are split by `part_of` of their names.

    Args:
      root: the data root.
      corpus: one of `NAMES`, or a UTF-8 file `<root>/text/<name>.txt` with blank lines
        between documents.
      *parts: names of the parts.

    Raises:
      ConfigError: no such corpus, or it has no such part.
      DataMissing: it is not below `root`.
      DataFormatError: it is damaged.
    """
    check_name(corpus)
    if corpus in _PARTED:
        return [_read_parted(root, corpus, part) for part in parts]
    documents: dict[Part, list[str]] = {part: [] for part in PARTS}
    for name, document in read_documents(root, corpus).items():
        documents[part_of(name)].append(document)
    return [documents[part] for part in parts]


def read_documents(root: pathlib.Path, corpus: str) -> Mapping[str, str]:
    """Returns the documents of a corpus without parts, by stable names.

    Documents are chapters of "kjv" (a verse alone would lack its context), topics of
    "python-reference", files of "python-library" and "kernel-docs", glosses of
    "wordnet" and paragraphs of a file.

    Raises:
      ConfigError: no such corpus.
      DataMissing: it is not below `root`.
      DataFormatError: it is damaged.
    """
    if corpus == "kjv":
        chapters = text.read_chapters(root)
        return {name: "\n".join(verses) + "\n" for name, verses in chapters.items()}
    if corpus == "python-reference":
        return dict(sorted(text.topics_text().items()))
    if corpus == "python-library":
        return _library()
    if corpus == "kernel-docs":
        path = catalog.locate("kernel-docs", root)["documents.jsonl"]
        return {
            field(record, "name", str, place): field(record, "text", str, place)
            for place, record in read_records(path)
        }
    if corpus == "wordnet":
        return {each.name: each.gloss for each in wordnet.read_all(root)}
    text.check_corpus(corpus)
    paragraphs = text.read_paragraphs(text.own_text(root, corpus))
    return {
        f"{corpus}:{number}": document for number, document in enumerate(paragraphs)
    }


def read_wikitext(path: pathlib.Path) -> str:
    """Reads a raw WikiText file in the form for which perplexities are published.

    That joins lines, which keep their own newline, by two more newlines; blank lines
    become empty.

    Raises:
      DataFormatError: no regular file, empty, not UTF-8, or cut within a line.
    """
    content = text.read_utf8(path)
    if not content.endswith("\n"):
        raise DataFormatError(
            f"{path}: character {len(content)}: expected the end of a line, found the "
            f"end of the file"
        )
    lines = re.findall("[^\n]*\n", content)
    return "\n\n".join(line if line.strip() else "" for line in lines)


def read_ptb(path: pathlib.Path) -> list[str]:
    """Reads the sentences of a Penn Treebank file, one from each line.

    Raises:
      DataMissing: no such file.
      DataFormatError: no regular file, empty, not UTF-8, or cut within a line.
    """
    return [line.strip() for _, line in read_lines(path, ended=True)]


def read_c4(path: pathlib.Path, limit: int | None = None) -> list[str]:
    """Reads the texts of a file of C4: JSON lines with "text", gzipped or plain.

    Args:
      path: such as `c4-train.00000-of-01024.json.gz`.
      limit: largest number of texts to read; None reads all.

    Raises:
      DataMissing: no such file.
      DataFormatError: damaged, or a line is no object with "text".
    """
    records = itertools.islice(read_records(path), limit)
    return [field(record, "text", str, place) for place, record in records]


def windows(
    tokens: Int32[np.ndarray, " tokens"], size: int
) -> Int32[np.ndarray, "windows size"]:
    """Cuts tokens into windows without overlap; an incomplete last one is dropped.

    Raises:
      DataFormatError: not enough tokens for one window.

    Examples:
      >>> windows(np.arange(7, dtype=np.int32), 3).tolist()
      [[0, 1, 2], [3, 4, 5]]
    """
    _check_size(tokens, size)
    count = len(tokens) // size
    return tokens[: count * size].reshape(count, size)


def random_windows(
    tokens: Int32[np.ndarray, " tokens"], count: int, size: int, seed: int
) -> Int32[np.ndarray, "count size"]:
    """Draws windows that begin at random tokens, such as a calibration set.

    Raises:
      DataFormatError: not enough tokens for one window.

    Examples:
      >>> random_windows(np.arange(9, dtype=np.int32), 2, 3, seed=0).shape
      (2, 3)
    """
    _check_size(tokens, size)
    rng = np.random.Generator(np.random.Philox(seed))
    starts = rng.integers(len(tokens) - size + 1, size=count)
    return tokens[starts[:, None] + np.arange(size)]


def _check_size(tokens: np.ndarray, size: int) -> None:
    if size < 1:
        raise ConfigError(f"size must be at least 1: got size={size}")
    if len(tokens) < size:
        raise DataFormatError(
            f"expected at least one window of size={size} tokens, found {len(tokens)}"
        )


def _read_parted(root: pathlib.Path, corpus: str, part: Part) -> list[str]:
    short = "valid" if part == "validation" and corpus != "c4" else part
    name = _FILES[corpus].format(short)
    if corpus != "c4":
        path = catalog.locate(corpus, root)[name]
        if corpus == "wikitext-2":
            return [read_wikitext(path)]
        return ["\n\n".join(read_ptb(path))]
    if part == "test":
        raise ConfigError("c4 has no part 'test': its parts are train and validation")
    known = catalog.entry(corpus)
    paths = sorted(files.inside(root, corpus).glob(name))
    if not paths:
        raise catalog.missing_error(known, root / corpus / name)
    return [document for path in paths for document in read_c4(path)]


def _library() -> dict[str, str]:
    """Returns the modules of Python's standard library by path, without its tests."""
    library = pathlib.Path(sysconfig.get_path("stdlib"))
    names: list[str] = []
    for folder, inner, here in os.walk(library):
        inner[:] = set(inner) - _NO_LIBRARY
        place = pathlib.Path(folder).relative_to(library)
        names += ((place / name).as_posix() for name in here if name.endswith(".py"))
    modules: dict[str, str] = {}
    for name in sorted(names):
        try:
            # `tokenize.open` heeds the encoding that a source file declares.
            with tokenize.open(library / name) as file:
                modules[name] = file.read()
        except (SyntaxError, UnicodeDecodeError) as error:
            raise DataFormatError(f"{library / name}: no source: {error}") from error
    if not modules:
        raise DataMissing(f"Python's standard library is not in {library} as files")
    return modules
