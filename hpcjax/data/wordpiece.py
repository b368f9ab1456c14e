"""WordPiece, BERT's tokenizer: reading a vocabulary, applying it, training one."""

import collections
import heapq
import itertools
import pathlib
import unicodedata
from collections.abc import Iterable, Mapping

import numpy as np
from jaxtyping import Int, Int32

from hpcjax.core.errors import ConfigError, DataFormatError
from hpcjax.data.source import check_indices
from hpcjax.data.text import read_utf8

SPECIAL = ("[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]")
INNER = "##"
LONGEST = 100
_CJK = (
    (0x4E00, 0x9FFF),
    (0x3400, 0x4DBF),
    (0x20000, 0x2A6DF),
    (0x2A700, 0x2B73F),
    (0x2B740, 0x2B81F),
    (0x2B820, 0x2CEAF),
    (0xF900, 0xFAFF),
    (0x2F800, 0x2FA1F),
)


class _CleanTable(dict[int, str]):
    """Translation table: drops control characters, makes ideographs words."""

    def __missing__(self, point: int) -> str:
        character = chr(point)
        kind = unicodedata.category(character)
        if character in "\t\n\r" or kind == "Zs":
            self[point] = " "
        elif point in (0, 0xFFFD) or kind in ("Cc", "Cf"):
            self[point] = ""
        elif any(low <= point <= high for low, high in _CJK):
            self[point] = f" {character} "
        else:
            self[point] = character
        return self[point]


class _SplitTable(dict[int, str]):
    """Translation table: makes punctuation words, drops accents unless `accents`."""

    def __init__(self, accents: bool) -> None:
        super().__init__()
        self.accents = accents

    def __missing__(self, point: int) -> str:
        character = chr(point)
        kind = unicodedata.category(character)
        ascii_sign = 32 < point < 127 and not character.isalnum()
        if ascii_sign or kind.startswith("P"):
            self[point] = f" {character} "
        else:
            self[point] = "" if kind == "Mn" and not self.accents else character
        return self[point]


_CLEAN, _LOWER, _CASED = (
    _CleanTable(),
    _SplitTable(accents=False),
    _SplitTable(accents=True),
)


def split_words(text: str, lowercase: bool = True) -> list[str]:
    """Splits text into words and punctuation, as BERT's basic tokenizer does.

    Args:
      text: any text.
      lowercase: whether to put text in lower case and remove accents.

    Examples:
      >>> split_words("Größe: don't!")
      ['große', ':', 'don', "'", 't', '!']
    """
    text = text.translate(_CLEAN)
    if lowercase:
        # NFD writes an accent as a character of its own (category Mn), to be dropped.
        text = unicodedata.normalize("NFD", text.lower())
    return text.translate(_LOWER if lowercase else _CASED).split()


class WordPiece:
    """A tokenizer with a vocabulary of words and word pieces.

    A word is split greedily: into the longest piece with which it starts, then the
    longest piece "##…" with which the rest starts, and so on. A word for which this
    fails is [UNK].

    This is written here, and not taken from the package `tokenizers`, an extra: masked
    text needs no package then, and codes are the same whether it is there or not. The
    package's are equal for all text whose characters it knows (a test compares them).
    They differ in characters that Unicode has since added, in 256 ideographs (U+2B820
    to U+2B91F) that it makes no words, and in private ones, which it drops as control
    characters; BERT's own code, as this, does not.

    Examples:
      >>> coder = WordPiece([*SPECIAL, "bird", "##s", "s", "ing"])
      >>> coder.encode("Birds sing, bird").tolist()
      [5, 6, 1, 1, 5]
    """

    def __init__(self, pieces: list[str], lowercase: bool = True) -> None:
        self.pieces = pieces
        self.lowercase = lowercase
        self._codes = {piece: code for code, piece in enumerate(pieces)}
        self._known: dict[str, list[int]] = {}
        self.pad, self.unknown, self.start, self.end, self.mask = (
            self._codes[name] for name in SPECIAL
        )

    def __len__(self) -> int:
        return len(self.pieces)

    def encode(self, text: str) -> Int32[np.ndarray, " tokens"]:
        """Returns the codes of a text, without [CLS] and [SEP]."""
        codes: list[int] = []
        for word in split_words(text, self.lowercase):
            if word not in self._known:
                self._known[word] = self._parts(word)
            codes += self._known[word]
        return np.array(codes, np.int32)

    def decode(self, tokens: Int[np.ndarray, " tokens"]) -> str:
        """Returns the words of codes, separated by spaces; spacing and case are lost.

        Raises:
          IndexError: a code outside the vocabulary.

        Examples:
          >>> WordPiece([*SPECIAL, "bird", "##s"]).decode(np.array([5, 6, 5]))
          'birds bird'
        """
        check_indices(tokens, len(self))
        text = " ".join(self.pieces[code] for code in tokens)
        return text.replace(f" {INNER}", "")

    def _parts(self, word: str) -> list[int]:
        codes, begin = [], 0
        while begin < len(word) <= LONGEST:
            inner = INNER if begin else ""
            ends = range(len(word), begin, -1)
            end = next((e for e in ends if inner + word[begin:e] in self._codes), None)
            if end is None:
                return [self.unknown]
            codes.append(self._codes[inner + word[begin:end]])
            begin = end
        return codes or [self.unknown]


def read_vocabulary(path: pathlib.Path) -> list[str]:
    """Reads a `vocab.txt` with a piece on each line; the line number is the code.

    Raises:
      DataFormatError: not a regular file, not UTF-8, a piece that is empty or occurs
        twice, or a special piece is missing.
    """
    pieces = read_utf8(path).removesuffix("\n").split("\n")
    seen: set[str] = set()
    for number, piece in enumerate(pieces):
        if not piece.strip() or piece in seen:
            raise DataFormatError(
                f"{path}: line {number + 1}: expected a piece that is not there yet, "
                f"found {piece!r}"
            )
        seen.add(piece)
    absent = [name for name in SPECIAL if name not in seen]
    if absent:
        raise DataFormatError(
            f"{path}: expected the pieces {SPECIAL}, found no {absent}"
        )
    return pieces


def train_vocabulary(
    texts: Iterable[str], size: int, *, lowercase: bool = True
) -> list[str]:
    """Trains a vocabulary by merging the most frequent pairs of pieces.

    Words start as characters, inner ones written "##c". The two neighbouring pieces
    that occur together most often are merged, again and again, until the vocabulary is
    full or no pair occurs twice. Of equally frequent pairs the alphabetically first is
    taken, so that the result depends on the counts of words only.

    Args:
      texts: the training texts.
      size: largest number of pieces, including the special ones.
      lowercase: as in `split_words`.

    Returns:
      The special pieces, then the characters in order, then the merged pieces.

    Raises:
      ConfigError: `size` does not hold the special pieces and the characters.

    References:
      Sennrich, Haddow, Birch: Neural Machine Translation of Rare Words with Subword
      Units, 2016, Algorithm 1, with WordPiece's way of writing.

    Examples:
      >>> train_vocabulary(["abc abd abc"], 11)[len(SPECIAL):]
      ['##b', '##c', '##d', 'a', 'ab', 'abc']
    """
    counts = collections.Counter(
        word for text in texts for word in split_words(text, lowercase)
    )
    words = [[word[0], *(INNER + c for c in word[1:])] for word in counts]
    alphabet = sorted({piece for word in words for piece in word})
    vocabulary = dict.fromkeys((*SPECIAL, *alphabet))
    if len(vocabulary) > size:
        raise ConfigError(
            f"vocabulary must hold the {len(SPECIAL)} special pieces and the "
            f"{len(alphabet)} characters of the text: got vocabulary={size}"
        )
    _merge(words, list(counts.values()), vocabulary, size)
    return list(vocabulary)


def _merge(
    words: list[list[str]], counts: list[int], vocabulary: dict[str, None], size: int
) -> None:
    """Adds merged pieces to the vocabulary; merges `words` in place.

    Counts of pairs and the words that contain each are updated incrementally: a merge
    changes only the words that contain its pair.
    """
    often: collections.Counter[tuple[str, str]] = collections.Counter()
    places: dict[tuple[str, str], set[int]] = collections.defaultdict(set)
    for number, word in enumerate(words):
        often.update(_scale(_pairs(word), counts[number]))
        for pair in _pairs(word):
            places[pair].add(number)
    heap = [(-count, pair) for pair, count in often.items()]
    heapq.heapify(heap)
    while heap and len(vocabulary) < size:
        count, pair = heapq.heappop(heap)
        if -count != often[pair]:
            # A stale entry: when a count changes, its new value is pushed, and the old
            # one is left in the heap until it is popped.
            continue
        if -count < 2:
            return
        vocabulary[_join(*pair)] = None
        changed: set[tuple[str, str]] = set()
        for number in places.pop(pair):
            before = _pairs(words[number])
            words[number] = _merge_pair(words[number], pair)
            after = _pairs(words[number])
            often.subtract(_scale(before, counts[number]))
            often.update(_scale(after, counts[number]))
            changed |= before.keys() | after.keys()
            for other in after:
                places[other].add(number)
        for other in changed:
            if often[other] > 0:
                heapq.heappush(heap, (-often[other], other))


def _pairs(word: list[str]) -> collections.Counter[tuple[str, str]]:
    return collections.Counter(itertools.pairwise(word))


def _scale(
    pairs: Mapping[tuple[str, str], int], count: int
) -> dict[tuple[str, str], int]:
    return {pair: count * number for pair, number in pairs.items()}


def _join(left: str, right: str) -> str:
    return left + right.removeprefix(INNER)


def _merge_pair(word: list[str], pair: tuple[str, str]) -> list[str]:
    result, at = [], 0
    while at < len(word):
        if tuple(word[at : at + 2]) == pair:
            result.append(_join(*pair))
            at += 2
        else:
            result.append(word[at])
            at += 1
    return result
