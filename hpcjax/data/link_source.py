"""Links as examples: batches in the order of a config, and held-out ones in chunks."""

import functools
import math
from collections import defaultdict
from typing import Any, NamedTuple

import numpy as np

from hpcjax.core import checks
from hpcjax.data.access import shuffle
from hpcjax.data.pipeline import check_number, shard_rows
from hpcjax.data.source import Batch, check_indices
from hpcjax.data.triples import Triples, rng_of


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
    """Training links as examples, in the order of a `LinksConfig`.

    Attributes:
      fewest_resident: entities of the smallest partitions that a state may have.
      capacity: partitions of a state.
      partition_rows: entities of a partition; the last may have fewer.
      row_bytes: of an entity, where partitions were chosen by it.
    """

    row_bytes: int | None = None

    def __init__(self, links: Triples, config: Any) -> None:
        self._triples, self._relations = links.train, links.relations
        self._entities, self._config = links.entities, config
        rule = "filtered needs entities² · relations below 2**63"
        good = not config.filtered or links.entities**2 * links.relations < 2**63
        given = {"entities": links.entities, "relations": links.relations}
        checks.require(good, rule, **given)
        first = config.draw(0, 0)
        self._states, partitions = len(first.states), len(first.buckets)
        self.partition_rows = self._size = -(-links.entities // partitions)
        starts = np.arange(partitions) * self._size
        sizes = np.clip(links.entities - starts, 0, self._size)
        self.capacity = first.states.shape[1]
        self.fewest_resident = int(np.sort(sizes)[: self.capacity].sum())
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
            own, rng = links[held], rng_of(seed, epoch, 1)
            rule = "the first state of order=one_fill must hold both ends of a link"
            checks.require(len(own) > 0, rule, states=order.states[0], seed=seed)
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
        epoch, place, plan, state = self._find(number, batch_size, seed)
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
                rng_of(seed, epoch, 2 + place, row),
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

    def resident(self, number: int, batch_size: int, seed: int) -> np.ndarray:
        """Returns the partitions that hold all entities of a batch."""
        *_, plan, state = self._find(number, batch_size, seed)
        return plan.states[state]

    def _find(
        self, number: int, batch_size: int, seed: int
    ) -> tuple[int, int, _Epoch, int]:
        """Returns a batch's epoch, its place there, the plan and its state's number."""
        check_number(number)
        epoch, place = divmod(number, self.epoch_batches(batch_size))
        plan = self._plan(seed, epoch, batch_size)
        state = int(np.searchsorted(plan.starts, place, side="right")) - 1
        return epoch, place, plan, state

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
