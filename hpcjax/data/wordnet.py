"""Reading WordNet's data files: sets of synonyms with their glosses."""

import pathlib
from typing import Literal, NamedTuple, get_args

from hpcjax.core.errors import DataFormatError
from hpcjax.data import catalog
from hpcjax.data.records import read_lines

Speech = Literal["noun", "verb", "adj", "adv"]


class Synset(NamedTuple):
    """A set of synonyms.

    Attributes:
      name: part of speech and offset in its file, such as "noun:00001740".
      words: the synonyms, compounds with spaces between their parts.
      gloss: their definition, followed by examples in quotes.
    """

    name: str
    words: tuple[str, ...]
    gloss: str

    @property
    def definition(self) -> str:
        """The gloss without its examples."""
        return self.gloss.partition('; "')[0]


def read_wordnet(root: pathlib.Path, speech: Speech) -> list[Synset]:
    """Reads the sets of synonyms of one part of speech below `root/wordnet`.

    Raises:
      DataMissing: it is not below `root`.
      DataFormatError: a line is not in the form of `wndb(5)`.
    """
    path = catalog.locate("wordnet", root)[f"data.{speech}"]
    # The licence at the beginning is indented.
    return [
        _synset(line, speech, place)
        for place, line in read_lines(path, ended=True)
        if not line.startswith("  ")
    ]


def _synset(line: str, speech: Speech, place: str) -> Synset:
    """Parses a line: offset, file, type, hexadecimal count, then (word, id) pairs."""
    head, bar, gloss = line.partition(" | ")
    parts = head.split(" ")
    try:
        offset, count = parts[0], int(parts[3], 16)
        words = parts[4 : 4 + 2 * count : 2]
        if not bar or not offset.isdigit() or not 0 < count == len(words):
            raise ValueError
    except (ValueError, IndexError) as error:
        raise DataFormatError(
            f"{place}: expected offset, words and a gloss, found {line[:40]!r}"
        ) from error
    # Adjectives may end in a syntactic marker, such as "(p)" for predicative.
    plain = tuple(word.partition("(")[0].replace("_", " ") for word in words)
    return Synset(f"{speech}:{offset}", plain, gloss.strip())


def read_all(root: pathlib.Path) -> list[Synset]:
    """Reads the sets of synonyms of all parts of speech.

    Raises:
      DataMissing: it is not below `root`.
      DataFormatError: a line is not in the form of `wndb(5)`.
    """
    return [each for speech in get_args(Speech) for each in read_wordnet(root, speech)]
