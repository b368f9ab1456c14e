"""Triples of knowledge graphs: head, relation, tail, of files and of WordNet."""

import logging
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Int32

from hpcjax.core.errors import DataFormatError
from hpcjax.data import wordnet
from hpcjax.data.records import read_lines

log = logging.getLogger(__name__)
PARTS = ("train", "valid", "test")
_HELD_OUT = 3000  # triples of WordNet in each of two parts
# Pointers of WordNet whose inverse is a pointer too: one direction tells both.
# Antonyms and participles are between words alone, and say little of their sets.
_LEFT_OUT = ("~", "~i", "%m", "%p", "%s", "-c", "-r", "-u", "\\", "!", "<")


class Triples(NamedTuple):
    """Links of a knowledge graph: numbers of head, relation and tail, int32 [n, 3]."""

    train: Int32[np.ndarray, "train 3"]
    valid: Int32[np.ndarray, "valid 3"]
    test: Int32[np.ndarray, "test 3"]
    entities: int
    relations: int


def read_triples(paths: Mapping[str, pathlib.Path]) -> Triples:
    """Reads files of lines of head, relation and tail, with tabs between them.

    Things are numbered by their sorted names. How many entities no training triple has
    is logged: they are ranked as others, but cannot be learnt.

    Args:
      paths: of "train", "valid" and "test"; those that end in ".gz" are decompressed.

    Raises:
      DataMissing: no such file.
      DataFormatError: a line of other than three fields, or a held-out relation that no
        training triple has.
    """
    names = {part: np.array(list(_fields(paths[part]))) for part in PARTS}
    for part in PARTS[1:]:
        unseen = np.flatnonzero(~np.isin(names[part][:, 1], names["train"][:, 1]))
        for first in unseen[:1]:
            raise DataFormatError(
                f"{paths[part]}: line {first + 1}: expected a relation that a training "
                f"triple has, found {str(names[part][first, 1])!r}, and {len(unseen)} "
                "such lines"
            )
        known = np.isin(names[part][:, ::2], names["train"][:, ::2])
        for first in np.flatnonzero(~known.all(1))[:1]:
            log.warning(
                "%s: %d ends of links are entities that no training triple has, the "
                "first in line %d: they are ranked, and are not learnt",
                *(paths[part], np.sum(~known), first + 1),
            )
    whole = np.concatenate(list(names.values()))
    entities, ends = np.unique(whole[:, ::2], return_inverse=True)
    relations, kinds = np.unique(whole[:, 1], return_inverse=True)
    ends = ends.reshape(-1, 2)
    numbers = np.stack([ends[:, 0], kinds.reshape(-1), ends[:, 1]], 1).astype(np.int32)
    cuts = np.cumsum([len(names[part]) for part in PARTS[:-1]])
    train, valid, test = np.split(numbers, cuts)
    return Triples(train, valid, test, len(entities), len(relations))


def _fields(path: pathlib.Path) -> Any:
    """Yields the three fields of each line."""
    for place, line in read_lines(path):
        fields = line.split("\t")
        if len(fields) != 3 or not all(fields):
            raise DataFormatError(
                f"{place}: expected head, relation and tail with tabs between them, "
                f"found {line[:60]!r}"
            )
        yield fields


def wordnet_triples(root: pathlib.Path, seed: int) -> Triples:
    """Returns WordNet's pointers between sets of synonyms, or their words, as links.

    Of two directions that tell the same one is left out, and so are antonyms and
    participles. 3,000 triples each are held out, or a tenth of them.

    Raises:
      DataMissing: WordNet is not below `root`.
      DataFormatError: it is damaged.
    """
    from hpcjax.data.access import shuffle

    found = wordnet.read_pointers(root)
    kept = ~np.isin(found.symbols.astype(str), _LEFT_OUT)
    symbols, kinds = np.unique(found.symbols[kept].astype(str), return_inverse=True)
    ends = found.senders[kept], found.receivers[kept]
    every = np.unique(np.stack([ends[0], kinds, ends[1]], 1), axis=0).astype(np.int32)
    every = every[shuffle(len(every), seed, 0)]
    entities = int(max(found.senders.max(), found.receivers.max())) + 1
    count = min(_HELD_OUT, len(every) // 10)
    held = every[:count], every[count : 2 * count]
    return Triples(every[2 * count :], *held, entities, len(symbols))


def rng_of(*numbers: int) -> np.random.Generator:
    """Returns the generator of some numbers, such as a seed and an epoch."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(numbers)))
