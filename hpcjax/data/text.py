"""Plain text as sequences of characters."""

import dataclasses
import importlib
import json
import pathlib
import re
from collections.abc import Mapping
from typing import ClassVar

import numpy as np
from jaxtyping import Int, Int32

from hpcjax.core import files
from hpcjax.core.config import Config, FileName, Share, Size
from hpcjax.core.errors import ConfigError, DataFormatError, nearest
from hpcjax.core.objective import Objective
from hpcjax.data import catalog
from hpcjax.data.objectives import LANGUAGE
from hpcjax.data.source import Batch, Dataset, check_indices

CORPORA = ("python-reference", "kjv")
_LAST_VERSE = "Revelation 22:21"
UNKNOWN = 0


class TextSource:
    """Windows of a text that do not overlap: window i starts at `i · context`.

    Examples:
      >>> source = TextSource(np.arange(7, dtype=np.int32), context=3)
      >>> len(source), source.gather(np.array([1]))
      (2, {'x': array([[3, 4, 5]], dtype=int32), 'y': array([[4, 5, 6]], dtype=int32)})
    """

    def __init__(self, codes: Int32[np.ndarray, " characters"], context: int) -> None:
        self.codes = codes
        self.context = context

    def __len__(self) -> int:
        return (len(self.codes) - 1) // self.context

    def gather(self, indices: Int[np.ndarray, " batch"]) -> Batch:
        """Returns x and y [batch, context], y being x one character later."""
        check_indices(indices, len(self))
        places = indices[:, None] * self.context + np.arange(self.context + 1)
        windows: Int32[np.ndarray, "batch context_and_1"] = self.codes[places]
        return {"x": windows[:, :-1], "y": windows[:, 1:]}


@dataclasses.dataclass(frozen=True, kw_only=True)
class CharTextConfig(Config):
    """Characters of a text, in windows of `context` that do not overlap.

    Attributes:
      corpus: "python-reference" (ships with Python; its text differs between versions),
        "kjv" (the King James Bible), or a UTF-8 file `<root>/text/<name>.txt`.
      context: length of x and y.
      validation: share of the characters, at the end of the text, that is held out.
    """

    objective: ClassVar[Objective] = LANGUAGE
    smoke: ClassVar[Mapping[str, str]] = {"context": "8"}

    corpus: FileName = "python-reference"
    context: Size = 256
    validation: Share = 0.1

    def load(self, root: pathlib.Path) -> Dataset:
        """Cuts a text into two contiguous parts and encodes its characters.

        The last share `validation` of the characters is held out. Codes 1, 2, … are the
        characters of the training part in order of code points, and 0 is any other
        character, so that the vocabulary depends on the training part only.

        Raises:
          ConfigError: no such corpus.
          DataMissing: the corpus is not below `root`.
          DataFormatError: the text is not UTF-8, or a part too short for a window.
        """
        text = read_corpus(root, self.corpus)
        cut = len(text) - round(self.validation * len(text))
        for part, length in (("training", cut), ("validation", len(text) - cut)):
            if length <= self.context:
                raise DataFormatError(
                    f"corpus {self.corpus!r}: expected more than context={self.context}"
                    f" characters in the {part} part, found {length} of {len(text)}"
                )
        vocabulary = sorted(set(text[:cut]))
        codes = encode(text, vocabulary)
        train, held_out = (
            TextSource(codes[:cut], self.context),
            TextSource(codes[cut:], self.context),
        )
        return Dataset(train, held_out, (self.context,), 1 + len(vocabulary), LANGUAGE)


def encode(text: str, vocabulary: list[str]) -> Int32[np.ndarray, " characters"]:
    """Returns 1 + the place of each character in the sorted vocabulary, 0 if absent.

    Raises:
      DataFormatError: a lone surrogate, which is half a character of UTF-16.

    Examples:
      >>> encode("abxa", ["a", "b"])
      array([1, 2, 0, 1], dtype=int32)
    """
    check_characters(text, "text")
    points = np.frombuffer(text.encode("utf-32-le"), np.uint32)
    # The last entry is no code point, so that `searchsorted` never returns the end.
    known = np.array([*map(ord, vocabulary), 2**32 - 1], np.uint32)
    places = np.searchsorted(known, points)
    return np.where(known[places] == points, places + 1, UNKNOWN).astype(np.int32)


def check_characters(text: str, place: str) -> None:
    """Raises DataFormatError for a lone surrogate, at its offset in `place`."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise DataFormatError(
            f"{place}: character {error.start}: expected Unicode text, found the lone "
            f"surrogate U+{ord(text[error.start]):04X}"
        ) from error


def check_corpus(corpus: str) -> None:
    """Raises ConfigError unless `corpus` is a known one or a plain name "….txt"."""
    if corpus in CORPORA:
        return
    files.check_name(corpus, "corpus")
    if not corpus.endswith(".txt"):
        raise ConfigError(
            f"corpus must be one of {CORPORA} or a file name ending in .txt: got "
            f"{corpus!r}{nearest(corpus, CORPORA)}"
        )


def read_corpus(root: pathlib.Path, corpus: str) -> str:
    """Returns the whole text of a corpus.

    Raises:
      ConfigError: no such corpus, or a name that is no plain file name.
      DataMissing: it is not below `root`.
      DataFormatError: it is not UTF-8, or a record is not what it should be.
    """
    check_corpus(corpus)
    if corpus == "python-reference":
        topics = topics_text()
        return "\n".join(topics[name] for name in sorted(topics))
    if corpus == "kjv":
        verses = read_verses(catalog.locate("kjv", root)["kjv.jsonl"])
        return "\n".join(verse for _, verse in verses) + "\n"
    return read_utf8(own_text(root, corpus))


def read_documents(root: pathlib.Path, corpus: str) -> list[list[str]]:
    """Returns the documents of a corpus, each a list of sentences.

    Documents of "kjv" are chapters, sentences are verses; of "python-reference" topics
    and paragraphs. A file has a sentence per line and blank lines between documents.

    Raises:
      ConfigError: no such corpus, or a name that is no plain file name.
      DataMissing: it is not below `root`.
      DataFormatError: it is not UTF-8, or a record is not what it should be.
    """
    check_corpus(corpus)
    if corpus == "python-reference":
        topics = topics_text()
        return [topics[name].split("\n\n") for name in sorted(topics)]
    if corpus == "kjv":
        return list(read_chapters(root).values())
    return [part.split("\n") for part in read_paragraphs(own_text(root, corpus))]


def read_chapters(root: pathlib.Path) -> dict[str, list[str]]:
    """Returns the verses of each chapter of "kjv", by a name such as "Genesis 1".

    Raises:
      DataMissing: it is not below `root`.
      DataFormatError: it is not UTF-8, or a record is not what it should be.
    """
    chapters: dict[str, list[str]] = {}
    for citation, verse in read_verses(catalog.locate("kjv", root)["kjv.jsonl"]):
        chapters.setdefault(citation.rpartition(":")[0], []).append(verse)
    return chapters


def read_paragraphs(path: pathlib.Path) -> list[str]:
    """Returns the paragraphs of a file, which blank lines separate.

    Spaces at both ends of lines are removed.

    Raises:
      DataFormatError: no regular file, or not UTF-8.
    """
    text = "\n".join(line.strip() for line in read_utf8(path).split("\n"))
    return re.split("\n\n+", text.strip())


def own_text(root: pathlib.Path, name: str) -> pathlib.Path:
    """Returns the path of a user's file below `root/text`.

    Raises:
      ConfigError: no plain file name, or a link out of `root`.
      DataMissing: it is not there.
    """
    path = files.inside(root, "text", name)
    if not path.exists():
        raise catalog.missing_error(catalog.entry("text"), path)
    return path


def topics_text() -> dict[str, str]:
    """Returns the texts of Python's `help()`, by topic."""
    # Imported by name, because the type stubs of the standard library do not have it.
    return importlib.import_module("pydoc_data.topics").topics


def read_verses(path: pathlib.Path) -> list[tuple[str, str]]:
    """Reads one JSON object per line and returns their "citation" and "text".

    Raises:
      DataFormatError: no regular file, a line that is no such object, or the last verse
        is not there.
    """
    verses: list[tuple[str, str]] = []
    citation = None
    for number, line in enumerate(read_utf8(path).removesuffix("\n").split("\n")):
        try:
            record = json.loads(line)
            verse, citation = record["text"], record["citation"]
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            raise DataFormatError(
                f"{path}: record {number}: expected an object with 'text' and "
                f"'citation', found {line[:40]!r}"
            ) from error
        if not isinstance(verse, str) or not isinstance(citation, str):
            raise DataFormatError(
                f"{path}: record {number}: expected 'text' and 'citation' to be "
                f"strings, found {verse!r} and {citation!r}"
            )
        check_characters(verse, f"{path}: record {number}")
        verses.append((citation, verse))
    if citation != _LAST_VERSE:
        raise DataFormatError(
            f"{path}: record {len(verses) - 1}: expected the last verse to be "
            f"{_LAST_VERSE}, found {citation}"
        )
    return verses


def read_utf8(path: pathlib.Path) -> str:
    """Reads a whole text file.

    Raises:
      DataFormatError: no regular file, or not UTF-8.
    """
    catalog.check_regular(path)
    try:
        return path.read_bytes().decode()
    except UnicodeDecodeError as error:
        raise DataFormatError(
            f"{path}: offset {error.start}: expected UTF-8, found "
            f"0x{error.object[error.start]:02x}"
        ) from error
