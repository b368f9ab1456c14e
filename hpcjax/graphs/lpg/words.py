"""Words and trigrams of texts, hashed to a number of columns."""

import itertools
import re
import zlib
from collections.abc import Iterable
from typing import Any

import numpy as np
from scipy import sparse

LISTS = (list, tuple, np.ndarray)


def count_tokens(values: Iterable[Any], buckets: int) -> sparse.csr_array:
    """Returns how many words and trigrams of each value fall into each bucket.

    Args:
      values: texts, or lists of texts; letter case does not count.
      buckets: that tokens are hashed to, by crc32.

    Returns:
      float64 [values, buckets], columns in no order.

    Examples:
      >>> count_tokens(["ab Ab", ["ab"]], 4).toarray().tolist()
      [[2.0, 2.0, 0.0, 2.0], [1.0, 1.0, 0.0, 1.0]]
    """
    known: dict[str, int] = {}
    # Each word is hashed once: counts of a text are those of its words, added up.
    texts = [
        [known.setdefault(word, len(known)) for word in _words(value)]
        for value in values
    ]
    hashed = [_hash(word, buckets) for word in known]
    return _count(texts, len(known)) @ _count(hashed, buckets)


def _words(value: Any) -> list[str]:
    text = " ".join(map(str, value)) if isinstance(value, LISTS) else str(value)
    return re.findall(r"\w+", text.lower())


def _hash(word: str, buckets: int) -> list[int]:
    """Returns the buckets of a word, and of the trigrams of it with its ends marked."""
    marked = f"<{word}>"
    tokens = [word, *(marked[at : at + 3] for at in range(len(marked) - 2))]
    return [zlib.crc32(token.encode()) % buckets for token in tokens]


def _count(lists: list[list[int]], width: int) -> sparse.csr_array:
    """Returns how often each list has each number, [lists, width]."""
    offsets = np.cumsum([0, *map(len, lists)])
    columns = np.fromiter(itertools.chain.from_iterable(lists), np.int32, offsets[-1])
    ones = np.ones(offsets[-1])
    return sparse.csr_array((ones, columns, offsets), shape=(len(lists), width))
