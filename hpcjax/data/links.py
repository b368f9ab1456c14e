"""Links of a knowledge graph, in the order of the partitions that hold their ends."""

import dataclasses
import functools
import logging
import math
import pathlib
from collections import defaultdict
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

import numpy as np
from jaxtyping import Int32

from hpcjax.core import checks
from hpcjax.core.config import Config, Seed, Size, Within
from hpcjax.core.errors import DataFormatError, DataMissing, nearest
from hpcjax.core.objective import Objective
from hpcjax.data import catalog, wordnet
from hpcjax.data.access import shuffle
from hpcjax.data.objectives import LINKS
from hpcjax.data.pipeline import check_number, shard_rows
from hpcjax.data.records import read_lines
from hpcjax.data.source import Batch, Dataset, check_indices

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
            return graphs.beta(*cut, _rng(seed, 0))
        rng = _rng(seed, epoch)
        if self.order == "comet":
            return graphs.comet(*cut, self.group, rng)
        return graphs.beta(*cut, rng)

    def read(self, root: pathlib.Path) -> Triples:
        """Returns the links, with permuted numbers of entities."""
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


def _rng(*numbers: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(np.random.SeedSequence(numbers)))


def share_batches(counts: np.ndarray, size: int, total: int) -> np.ndarray:
    """Returns of how many batches each state is, all of them `total`.

    Args:
      counts: links of each state.
      size: most links of a batch.
      total: at least the batches of full size. Those that are left go where batches
        have most links.

    Examples:
      >>> share_batches(np.array([10, 3]), 4, 5).tolist()
      [4, 1]
    """
    batches = -(-counts // size)
    while batches.sum() < total:
        batches[np.argmax(counts / np.maximum(batches, 1))] += 1
    return batches


class _Epoch(NamedTuple):
    """The links of an epoch, state after state, and of how many batches each state is.

    Attributes:
      links: numbers of training links.
      firsts: where each state begins in `links`, and the last ends.
      starts: likewise, of batches.
      states: resident partitions of each.
    """

    links: np.ndarray
    firsts: np.ndarray
    starts: np.ndarray
    states: np.ndarray


class LinkSampler:
    """Training links as examples, in the order of a config."""

    def __init__(self, links: Triples, config: LinksConfig) -> None:
        self._triples, self._relations = links.train, links.relations
        self._entities, self._config = links.entities, config
        first = config.draw(0, 0)
        self._states, partitions = len(first.states), len(first.buckets)
        self._size = -(-links.entities // partitions)
        starts = np.arange(partitions) * self._size
        sizes = np.clip(links.entities - starts, 0, self._size)
        self.fewest_resident = int(np.sort(sizes)[: first.states.shape[1]].sum())
        self._plan = functools.lru_cache(4)(self._make_plan)

    def __len__(self) -> int:
        """Returns how many batches of one example are an epoch."""
        return self.epoch_batches(1)

    def epoch_batches(self, batch_size: int) -> int:
        """Returns how many batches are an epoch."""
        size = self._config.edges * batch_size
        return math.ceil(len(self._triples) / size) + self._states - 1

    def _make_plan(self, seed: int, epoch: int, batch_size: int) -> _Epoch:
        order = self._config.draw(seed, epoch)
        links = shuffle(len(self._triples), seed, epoch)
        sides = self._triples[links][:, ::2] // self._size
        state = order.buckets[sides[:, 0], sides[:, 1]]
        total, size = self.epoch_batches(batch_size), self._config.edges * batch_size
        if self._config.order == "one_fill":
            held = np.isin(sides, order.states[0]).all(1)
            own, rng = links[held], _rng(seed, epoch, 1)
            passes = max(1, total // max(1, math.ceil(len(own) / size)))
            links = np.concatenate([rng.permutation(own) for _ in range(passes)])
            state = np.repeat(np.arange(passes), len(own))
            order = order._replace(states=np.repeat(order.states[:1], passes, 0))
        links = links[np.argsort(state, kind="stable")]
        counts = np.bincount(state, minlength=len(order.states))
        batches = share_batches(counts, size, total)
        firsts, starts = (np.append(0, np.cumsum(x)) for x in (counts, batches))
        return _Epoch(links, firsts, starts, order.states)

    def sample(
        self, number: int, batch_size: int, seed: int, shard: tuple[int, int]
    ) -> Batch:
        """Returns the shard's examples of a batch.

        Returns:
          "x", of int32: "triples" [batch, edges, 3], numbers of head, relation and
          tail, and "negatives" [batch, 2, negatives] in place of tails, and of heads;
          "scored", float32 [batch, edges], 0 for what fills up; and where they are
          asked for "hidden", bool [batch, 2, edges, negatives], the known ones.
        """
        check_number(number)
        epoch, place = divmod(number, self.epoch_batches(batch_size))
        plan = self._plan(seed, epoch, batch_size)
        state = int(np.searchsorted(plan.starts, place, side="right")) - 1
        every = plan.links[plan.firsts[state] : plan.firsts[state + 1]]
        turn, turns = place - plan.starts[state], np.diff(plan.starts)[state]
        own = every[_cut(len(every), turn, turns)]
        rows = range(batch_size)[shard_rows(batch_size, shard)]
        resident = self._resident(plan.states[state])
        made = [
            self._example(
                own[_cut(len(own), row, batch_size)],
                every,
                resident,
                _rng(seed, epoch, 2 + place, row),
            )
            for row in rows
        ]
        triples, scored, negatives = (
            np.stack(each) for each in zip(*made, strict=True)
        )
        batch = {"x": {"triples": triples, "negatives": negatives}, "scored": scored}
        if self._config.filtered:
            batch["hidden"] = np.stack([self._known(t, n) for t, _, n in made])
        return batch

    def _resident(self, state: np.ndarray) -> np.ndarray:
        """Returns the numbers of the entities of some partitions."""
        every = (state[:, None] * self._size + np.arange(self._size)).ravel()
        return every[every < self._entities]

    def _example(
        self,
        own: np.ndarray,
        every: np.ndarray,
        resident: np.ndarray,
        rng: np.random.Generator,
    ) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Returns triples, which of them are scored, and negatives."""
        edges, count = self._config.edges, self._config.negatives
        triples = np.zeros((edges, 3), np.int32)
        triples[:, ::2] = resident[0]  # what fills up is resident too
        triples[: len(own)] = self._triples[own]
        negatives = resident[rng.integers(len(resident), size=(2, count))]
        if likely := round(self._config.by_degree * count) * bool(len(every)):
            picked = every[rng.integers(len(every), size=(2, likely))]
            ends = rng.integers(2, size=(2, likely)) * 2
            negatives[:, :likely] = self._triples[picked, ends]
        scored = (np.arange(edges) < len(own)).astype(np.float32)
        return triples, scored, negatives.astype(np.int32)

    @functools.cached_property
    def _keys(self) -> np.ndarray:
        return np.sort(self._key(*self._triples.T))

    def _key(
        self, head: np.ndarray, relation: np.ndarray, tail: np.ndarray
    ) -> np.ndarray:
        """Returns one number for each triple."""
        wide = np.int64(self._entities)
        return (head * np.int64(self._relations) + relation) * wide + tail

    def _known(self, triples: np.ndarray, negatives: np.ndarray) -> np.ndarray:
        """Returns which negatives make a training link, [2, edges, negatives]."""
        head, relation, tail = triples.T[:, :, None]
        tails, heads = negatives[:, None]
        made = self._key(head, relation, tails), self._key(heads, relation, tail)
        places = [np.searchsorted(self._keys, each) for each in made]
        found = [self._keys[np.minimum(p, len(self._keys) - 1)] for p in places]
        return np.stack([a == b for a, b in zip(found, made, strict=True)])


def _cut(size: int, index: int, count: int) -> slice:
    """Returns the index-th of `count` parts that differ by one at most."""
    return slice(size * index // count, size * (index + 1) // count)


class LinkSource:
    """Held-out links in chunks, with all known answers to what each asks.

    Args:
      links: all of them.
      held: those that are held out.
      edges: of an example.
    """

    def __init__(self, links: Triples, held: np.ndarray, edges: int) -> None:
        self._held, self._edges = held, edges
        tails, heads = defaultdict(list), defaultdict(list)
        for head, relation, tail in np.concatenate(links[:3]).tolist():
            tails[head, relation].append(tail)
            heads[tail, relation].append(head)
        lists = [
            (tails[head, relation], heads[tail, relation])
            for head, relation, tail in held.tolist()
        ]
        longest = max(len(each) for pair in lists for each in pair)
        # The number after the last entity's fills up: it is none.
        self._known = np.full((len(held), 2, longest), links.entities, np.int32)
        for row, pair in zip(self._known, lists, strict=True):
            for known, each in zip(row, pair, strict=True):
                known[: len(each)] = each

    def __len__(self) -> int:
        return math.ceil(len(self._held) / self._edges)

    def gather(self, indices: np.ndarray) -> Batch:
        """Returns chunks by number.

        Returns:
          "x" with "triples" [batch, edges, 3]; "scored", float32 [batch, edges]; and
          "known", int32 [batch, edges, 2, most], all tails and all heads that make a
          link of any part, filled up with the number of entities.
        """
        check_indices(indices, len(self))
        places = np.asarray(indices)[:, None] * self._edges + np.arange(self._edges)
        real = places < len(self._held)
        places = np.where(real, places, 0)
        x = {"triples": self._held[places]}
        scored = real.astype(np.float32)
        return {"x": x, "scored": scored, "known": self._known[places]}
