"""Links of a knowledge graph, in the order of the partitions that hold their ends."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

import numpy as np

from hpcjax.core import checks
from hpcjax.core.config import Config, Positive, Seed, Size, Within
from hpcjax.core.errors import DataMissing, nearest
from hpcjax.core.objective import Objective
from hpcjax.data import catalog
from hpcjax.data.objectives import LINKS
from hpcjax.data.source import Dataset
from hpcjax.data.triples import PARTS, Triples, read_triples, rng_of, wordnet_triples

if TYPE_CHECKING:
    from hpcjax.graphs import Ordering

NAMED = ("wn18rr", "nations", "kinships", "umls")


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
      memory: bytes of rows and links that may be resident, by which these three are
        chosen in place of those given, see `graphs.choose_partitions`.
      row_bytes: of an entity then, with what the optimizer keeps for it.
      disk_block: of the disk then, the least that links of two partitions take.
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
    memory: Positive | None = None
    row_bytes: Size = 512
    disk_block: Size = 512 * 1024
    edges: Size = 1024
    negatives: Size = 512
    by_degree: Annotated[float, Within("[0, 1]")] = 0.5
    filtered: bool = False
    permuted: bool = True
    split_seed: Seed = 0
    holdout: Literal["validation", "test"] = "validation"

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "memory is of order=beta and comet, which move partitions"
        good = self.memory is None or self.order in ("beta", "comet")
        checks.require(good, rule, memory=self.memory, order=self.order)
        if self.order != "memory" and self.memory is None:
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

    def choose(self, links: Triples) -> Self:
        """Returns the config with the partitions that `memory` has room for.

        Raises:
          ConfigError: it has not even room for two.
        """
        from hpcjax import graphs

        if self.memory is None:
            return self
        rows, edges = links.entities * self.row_bytes, links.train.nbytes
        size = graphs.GraphBytes(rows, edges)
        cut = graphs.choose_partitions(size, int(self.memory), self.disk_block)
        order: Any = "memory" if cut.partitions == 1 else self.order
        return dataclasses.replace(self, memory=None, order=order, **cut._asdict())

    def load(self, root: pathlib.Path) -> Dataset:
        """Returns the links.

        Raises:
          ConfigError: fewer entities may be resident than there are negatives, or
            less memory than two partitions need.
          DataMissing: the source is not here.
          DataFormatError: a file of another form.
        """
        from hpcjax.data.link_source import LinkSampler, LinkSource

        links = self.read(root)
        train: Any = LinkSampler(links, self.choose(links))
        given = {"negatives": self.negatives, "resident": train.fewest_resident}
        rule = "negatives must be at most the entities that are resident in each state"
        checks.require(self.negatives <= train.fewest_resident, rule, **given)
        shapes: Any = {"triples": (self.edges, 3), "negatives": (2, self.negatives)}
        if self.memory is not None:
            train.row_bytes = self.row_bytes
        held = links.test if self.holdout == "test" else links.valid
        return Dataset(
            train,
            LinkSource(links, held, self.edges),
            shapes,
            links.entities,
            LINKS,
            tables=(links.entities, links.relations),
        )
