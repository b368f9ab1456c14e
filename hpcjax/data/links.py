"""Links of a knowledge graph, in the order of the partitions that hold their ends."""

import dataclasses
import logging
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from jaxtyping import Int32

from hpcjax.core import checks
from hpcjax.core.config import Config, Seed, Size, Within
from hpcjax.core.errors import DataFormatError, DataMissing, nearest
from hpcjax.core.objective import Objective
from hpcjax.data import catalog, wordnet
from hpcjax.data.objectives import LINKS
from hpcjax.data.records import read_lines
from hpcjax.data.source import Dataset

if TYPE_CHECKING:
    from hpcjax.graphs import Ordering

log = logging.getLogger(__name__)
NAMED = ("wn18rr", "nations", "kinships", "umls")
PARTS = ("train", "valid", "test")
_HELD_OUT = 3000  # triples of WordNet in each of two parts
# Pointers of WordNet whose inverse is a pointer too: one direction tells both.
_INVERSES = ("~", "~i", "%m", "%p", "%s", "-c", "-r", "-u", "\\")


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

    Of two directions that tell the same one is left out. 3,000 triples each are held
    out, or a tenth of them.

    Raises:
      DataMissing: WordNet is not below `root`.
      DataFormatError: it is damaged.
    """
    from hpcjax.data.access import shuffle

    found = wordnet.read_pointers(root)
    kept = ~np.isin(found.symbols.astype(str), _INVERSES)
    symbols, kinds = np.unique(found.symbols[kept].astype(str), return_inverse=True)
    ends = found.senders[kept], found.receivers[kept]
    every = np.unique(np.stack([ends[0], kinds, ends[1]], 1), axis=0).astype(np.int32)
    every = every[shuffle(len(every), seed, 0)]
    entities = int(max(found.senders.max(), found.receivers.max())) + 1
    count = min(_HELD_OUT, len(every) // 10)
    held = every[:count], every[count : 2 * count]
    return Triples(every[2 * count :], *held, entities, len(symbols))


def _find_triples(source: str, root: pathlib.Path) -> dict[str, pathlib.Path]:
    """Returns the files of a source that is named, or is a folder."""
    files = [f"{part}.txt" for part in PARTS]
    if source in NAMED:
        found = catalog.locate(source, root)
    else:
        folder = pathlib.Path(source)
        own = {
            file: next(
                (p for p in (folder / file, folder / f"{file}.gz") if p.exists()), None
            )
            for file in files
        }
        lost = [file for file, path in own.items() if path is None]
        if lost:
            raise DataMissing(
                f"no {folder / lost[0]}, nor its .gz: source must be a folder of "
                f"{', '.join(files)}, or one of wordnet, {', '.join(NAMED)}"
                f"{nearest(source, (*NAMED, 'wordnet'))}"
            )
        found = {file: path for file, path in own.items() if path is not None}
    return {part: found[file] for part, file in zip(PARTS, files, strict=True)}


def rng_of(*numbers: int) -> np.random.Generator:
    """Returns the generator of some numbers, such as a seed and an epoch."""
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(numbers)))


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinksConfig(Config):
    """Links of a knowledge graph, and in which order of partitions they are trained.

    An example is a chunk of links with negatives of its own, entities that are ends in
    their place; all are resident in one state of the order, and so are all examples of
    a batch. An epoch has ⌈links / (edges · batch_size)⌉ + states − 1 batches.

    Attributes:
      source: "wn18rr", of WordNet 18 without inverse relations, whose files you have
        to put there; "nations", "kinships", "umls" or "wordnet", see `hpcjax data
        fetch`; or a folder with train.txt, valid.txt and test.txt, or their .gz.
      order: "memory", all entities are resident; "beta" or "comet", see `graphs.beta`;
        or "one_fill", the first state of "beta" alone, for as many batches.
      partitions: that entities are cut into, by their numbers.
      capacity: partitions that are resident.
      group: partitions that "comet" swaps at once.
      edges: most links of an example.
      negatives: of an example in each direction, of resident entities.
      by_degree: share of them that are ends of random links of the state; the rest are
        drawn uniformly.
      filtered: whether negatives that make a training link are masked; those that make
        the link itself always are.
      permuted: whether numbers of entities are permuted, so that partitions are random.
        Sorted names carry structure.
      split_seed: of the permutation, and of what is held out of "wordnet".
      holdout: the part that is held out.
    """

    objective: ClassVar[Objective] = LINKS
    smoke: ClassVar[Mapping[str, str]] = {
        **{"source": "nations", "partitions": "4", "capacity": "2", "group": "1"},
        **{"edges": "16", "negatives": "4"},
    }

    source: str = "wn18rr"
    order: Literal["memory", "beta", "comet", "one_fill"] = "memory"
    partitions: Size = 64
    capacity: Size = 16
    group: Size = 8
    edges: Size = 1024
    negatives: Size = 512
    by_degree: Annotated[float, Within("[0, 1]")] = 0.5
    filtered: bool = False
    permuted: bool = True
    split_seed: Seed = 0
    holdout: Literal["validation", "test"] = "validation"

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.order != "memory":
            self.draw(0, 0)

    def draw(self, seed: int, epoch: int) -> "Ordering":
        """Returns the order of an epoch."""
        from hpcjax import graphs

        if self.order == "memory":
            return graphs.Ordering(np.zeros((1, 1), int), np.zeros((1, 1), int))
        cut = self.partitions, self.capacity
        if self.order == "one_fill":
            return graphs.beta(*cut, rng_of(seed, 0))
        rng = rng_of(seed, epoch)
        if self.order == "comet":
            return graphs.comet(*cut, self.group, rng)
        return graphs.beta(*cut, rng)

    def read(self, root: pathlib.Path) -> Triples:
        """Returns the links, with permuted numbers of entities."""
        from hpcjax.data.access import shuffle

        if self.source == "wordnet":
            found = wordnet_triples(root, self.split_seed)
        else:
            found = read_triples(_find_triples(self.source, root))
        if not self.permuted:
            return found
        order = shuffle(found.entities, self.split_seed, 1).astype(np.int32)
        moved: dict[str, Any] = {
            part: np.stack([order[x[:, 0]], x[:, 1], order[x[:, 2]]], 1)
            for part, x in zip(PARTS, found[:3], strict=True)
        }
        return found._replace(**moved)

    def load(self, root: pathlib.Path) -> Dataset:
        """Returns the links.

        Raises:
          ConfigError: fewer entities may be resident than there are negatives.
          DataMissing: the source is not here.
          DataFormatError: a file of another form.
        """
        from hpcjax.data.link_source import LinkSampler, LinkSource

        links = self.read(root)
        train: Any = LinkSampler(links, self)
        given = {"negatives": self.negatives, "resident": train.fewest_resident}
        rule = "negatives must be at most the entities that are resident in each state"
        checks.require(self.negatives <= train.fewest_resident, rule, **given)
        shapes: Any = {"triples": (self.edges, 3), "negatives": (2, self.negatives)}
        held = links.test if self.holdout == "test" else links.valid
        return Dataset(
            train,
            LinkSource(links, held, self.edges),
            shapes,
            links.entities,
            LINKS,
            tables=(links.entities, links.relations),
        )
