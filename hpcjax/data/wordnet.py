"""Reading WordNet's data files: sets of synonyms, their glosses, and pointers."""

import itertools
import pathlib
import re
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import numpy as np

from hpcjax.core.errors import DataFormatError
from hpcjax.data import catalog
from hpcjax.data.records import read_lines

if TYPE_CHECKING:
    from hpcjax.graphs import lpg

Speech = Literal["noun", "verb", "adj", "adv"]
_SPEECHES = dict(zip("nvar", get_args(Speech), strict=True))
# `lexnames(5WN)`: the lexicographers' files, by number.
_NOUNS = (
    "Tops act animal artifact attribute body cognition communication event feeling "
    "food group location motive object person phenomenon plant possession process "
    "quantity relation shape state substance time"
)
_VERBS = (
    "body change cognition communication competition consumption contact creation "
    "emotion motion perception possession social stative weather"
)
FILES = (
    *("adj.all", "adj.pert", "adv.all"),
    *(f"noun.{name}" for name in _NOUNS.split()),
    *(f"verb.{name}" for name in _VERBS.split()),
    "adj.ppl",
)
# `wninput(5WN)`: symbols of pointers. Symbol, offset, part of speech, and the numbers
# of two words, 0000 between sets.
_SYMBOL = r"(?:[-;][cru]|[#%][mps]|[@~]i?|[!=+*>^$&<\\])"
_POINTERS = re.compile(rf"(?:{_SYMBOL} \d{{8}} [nvar] [0-9a-f]{{4}} )*")


class Synset(NamedTuple):
    """A set of synonyms.

    Attributes:
      name: part of speech and offset in its file, such as "noun:00001740".
      words: the synonyms, compounds with spaces between their parts.
      gloss: their definition, followed by examples in quotes.
      file: the lexicographers' file that it is from, such as "noun.animal".
      pointers: four fields each, as in the file: symbol, offset, part of speech, and
        hexadecimal numbers of two words.
    """

    name: str
    words: tuple[str, ...]
    gloss: str
    file: str
    pointers: tuple[str, ...]

    @property
    def definition(self) -> str:
        """The gloss without its examples."""
        return self.gloss.partition('; "')[0]


class Pointers(NamedTuple):
    """Pointers from a set of synonyms, or one of its words, to another.

    Attributes:
      symbols: such as "@", a hypernym; object [pointers].
      senders: numbers of the sets that they leave, int32 [pointers].
      receivers: of those that they reach, int32 [pointers].
      words: of sender and receiver, counted from 1, int32 [pointers, 2]; 0 for all, of
        a pointer between sets.
    """

    symbols: np.ndarray
    senders: np.ndarray
    receivers: np.ndarray
    words: np.ndarray


def read_wordnet(root: pathlib.Path, speech: Speech) -> list[Synset]:
    """Reads the sets of synonyms of one part of speech below `root/wordnet`.

    Raises:
      DataMissing: it is not below `root`.
      DataFormatError: a line is not in the form of `wndb(5)`.
    """
    return [synset for _, synset in _read(root, speech)]


def _read(root: pathlib.Path, speech: Speech) -> list[tuple[str, Synset]]:
    """Returns the place of each set of synonyms, for messages, and the set."""
    path = catalog.locate("wordnet", root)[f"data.{speech}"]
    # The licence at the beginning is indented.
    return [
        (place, _synset(line, speech, place))
        for place, line in read_lines(path, ended=True)
        if not line.startswith("  ")
    ]


def _synset(line: str, speech: Speech, place: str) -> Synset:
    """Parses a line: offset, file, type, hexadecimal count, then (word, id) pairs.

    Pointers follow; and frames, of verbs.
    """
    head, bar, gloss = line.partition(" | ")
    parts = head.split(" ")
    try:
        offset, count = parts[0], int(parts[3], 16)
        words = parts[4 : 4 + 2 * count : 2]
        if not bar or not offset.isdigit() or not 0 < count == len(words):
            raise ValueError
        file = FILES[int(parts[1])]
    except (ValueError, IndexError) as error:
        raise DataFormatError(
            f"{place}: expected offset, file, words and a gloss, found {line[:40]!r}"
        ) from error
    # Adjectives may end in a syntactic marker, such as "(p)" for predicative.
    plain = tuple(word.partition("(")[0].replace("_", " ") for word in words)
    pointers = _fields(parts[4 + 2 * count :], place)
    return Synset(f"{speech}:{offset}", plain, gloss.strip(), file, pointers)


def _fields(parts: list[str], place: str) -> tuple[str, ...]:
    """Returns the four fields of each pointer, of which `parts` has the count first."""
    count = int(parts[0]) if parts and parts[0].isdecimal() else -1
    fields = parts[1 : 1 + 4 * count]
    whole = _POINTERS.fullmatch("".join(f"{each} " for each in fields))
    if len(fields) != 4 * count or not whole:
        raise DataFormatError(
            f"{place}: expected a count of pointers, and symbol, offset, part of "
            f"speech and words of each, found {' '.join(parts)[:60]!r}"
        )
    return tuple(fields)


def read_all(root: pathlib.Path) -> list[Synset]:
    """Reads the sets of synonyms of all parts of speech.

    Raises:
      DataMissing: it is not below `root`.
      DataFormatError: a line is not in the form of `wndb(5)`.
    """
    return [synset for _, synset in _read_all(root)]


def _read_all(root: pathlib.Path) -> list[tuple[str, Synset]]:
    return [each for speech in get_args(Speech) for each in _read(root, speech)]


def read_pointers(root: pathlib.Path) -> Pointers:
    """Reads the pointers between the sets of `read_all`, and between their words.

    Raises:
      DataMissing: it is not below `root`.
      DataFormatError: a line is not in the form of `wndb(5)`, or points at no set.
    """
    return _link(_read_all(root))


def _link(placed: list[tuple[str, Synset]]) -> Pointers:
    """Finds the sets that pointers reach."""
    import pandas as pd

    counts = [len(synset.pointers) // 4 for _, synset in placed]
    senders = np.repeat(np.arange(len(placed), dtype=np.int32), counts)
    fields = itertools.chain.from_iterable(synset.pointers for _, synset in placed)
    table = np.array(list(fields), object).reshape(-1, 4)
    columns: list[Any] = [pd.Series(column) for column in table.T]
    symbols, offsets, speeches, words = columns
    reached = speeches.map(_SPEECHES) + ":" + offsets
    receivers = pd.Index([synset.name for _, synset in placed]).get_indexer(reached)
    for lost in np.flatnonzero(receivers < 0)[:1]:
        place = placed[senders[lost]][0]
        raise DataFormatError(f"{place}: a pointer to {reached[lost]}, which is no set")
    codes, known = pd.factorize(words)
    pairs = np.array([[int(x[:2], 16), int(x[2:], 16)] for x in known], np.int32)
    return Pointers(
        symbols.to_numpy(),
        senders,
        receivers.astype(np.int32),
        pairs.reshape(-1, 2)[codes],
    )


def read_graph(root: pathlib.Path) -> "lpg.PropertyGraph":
    """Reads the sets of synonyms as a property graph.

    A vertex has its part of speech as label, and the keys `gloss`, `words`, a list, and
    `lexicographer`, the file that it is from. Edges are the pointers between sets, of
    22 symbols; those between words, such as antonyms, are left out.

    Raises:
      DataMissing: it is not below `root`.
      DataFormatError: a line is not in the form of `wndb(5)`, or points at no set.
    """
    import pandas as pd

    from hpcjax.graphs import lpg

    placed = _read_all(root)
    synsets = [synset for _, synset in placed]
    ids = np.array([synset.name for synset in synsets], object)
    columns: dict[str, list[Any]] = {
        "_labels": [(synset.name.partition(":")[0],) for synset in synsets],
        "gloss": [synset.gloss for synset in synsets],
        "lexicographer": [synset.file for synset in synsets],
        "words": [list(synset.words) for synset in synsets],
    }
    found = _link(placed)
    whole = ~found.words.any(1)
    ends = {"_start": ids[found.senders[whole]], "_end": ids[found.receivers[whole]]}
    edges = {**ends, "_type": found.symbols[whole]}
    vertices = pd.DataFrame({"_id": ids, **columns}, dtype=object)
    return lpg.PropertyGraph(vertices, pd.DataFrame(edges, dtype=object))
