"""Graphs that are part of the project: citations of papers, and a club of karate."""

import dataclasses
import pathlib
from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from hpcjax.core.config import Config
from hpcjax.core.objective import Objective
from hpcjax.data.objectives import VERTICES
from hpcjax.data.source import Batch, Dataset, check_indices

if TYPE_CHECKING:
    from hpcjax import graphs

_CORA = pathlib.Path(__file__).parent / "files" / "cora.npz"
# Planetoid's public split: training papers, then those for validation; the last 1,000
# are for test.
_TRAIN, _VALIDATION, _TEST = range(140), range(140, 640), range(1708, 2708)
# Zachary's club: friends outside of it, each pair once, and those who stayed with the
# instructor, vertex 0; the others left with the officer, vertex 33.
_FRIENDS = {
    0: (1, 2, 3, 4, 5, 6, 7, 8, 10, 11, 12, 13, 17, 19, 21, 31),
    1: (2, 3, 7, 13, 17, 19, 21, 30),
    2: (3, 7, 8, 9, 13, 27, 28, 32),
    3: (7, 12, 13),
    4: (6, 10),
    5: (6, 10, 16),
    6: (16,),
    8: (30, 32, 33),
    **dict.fromkeys((9, 13, 19, 27), (33,)),
    **dict.fromkeys((14, 15, 18, 20, 22, 29, 30, 31), (32, 33)),
    23: (25, 27, 29, 32, 33),
    24: (25, 27, 31),
    25: (31,),
    26: (29, 33),
    28: (31, 33),
    32: (33,),
}
_STAYED = (*range(9), 10, 11, 12, 13, 16, 17, 19, 21)
_MEMBERS = 34


class VertexSource:
    """Vertices by number, with their classes."""

    def __init__(self, numbers: np.ndarray, labels: np.ndarray) -> None:
        self.numbers = np.asarray(numbers, np.int32)
        self.labels = np.asarray(labels, np.int32)

    def __len__(self) -> int:
        return len(self.numbers)

    def gather(self, indices: np.ndarray) -> Batch:
        """Returns x, numbers of vertices, and y, their classes, int32 [batch]."""
        check_indices(indices, len(self))
        chosen = self.numbers[indices]
        return {"x": chosen, "y": self.labels[chosen]}


def vertex_dataset(
    graph: "graphs.Graph", labels: np.ndarray, train: Any, held_out: Any
) -> Dataset:
    """Returns two parts of a graph's vertices, by number."""
    return Dataset(
        VertexSource(train, labels),
        VertexSource(held_out, labels),
        inputs=(),
        outputs=int(labels.max()) + 1,
        objective=VERTICES,
        graph=graph,
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class CoraConfig(Config):
    """Cora: 2,708 papers in seven fields, 5,278 pairs that cite, 1,433 words.

    The public split: 140 papers are trained on, 500 are for validation and 1,000 for
    test. The words of each paper are divided by their number.

    Attributes:
      holdout: the part that is held out.
      rewired: whether the papers that are cited are shuffled among the citations; each
        cites and is cited as often as before, and edges have one direction. A control.
    """

    objective: ClassVar[Objective] = VERTICES

    holdout: Literal["validation", "test"] = "validation"
    rewired: bool = False

    def load(self, root: pathlib.Path | None = None) -> Dataset:
        """Returns the papers; `root` is not used.

        Examples:
          >>> cora = CoraConfig().load()
          >>> len(cora.train), len(cora.validation), cora.outputs
          (140, 500, 7)
          >>> cora.graph.vertices, len(cora.graph.senders), cora.graph.features.shape
          (2708, 10556, (2708, 1433))
        """
        from hpcjax import graphs

        del root
        with np.load(_CORA) as file:
            arrays = {name: file[name].astype(np.int32) for name in file.files}
        words = np.diff(arrays["offsets"])
        features = graphs.SparseRows(
            offsets=arrays["offsets"],
            columns=arrays["columns"],
            values=np.repeat(1 / words, words).astype(np.float32),
            width=int(arrays["columns"].max()) + 1,
        )
        one, other = arrays["edges"]
        senders, receivers = np.r_[one, other], np.r_[other, one]
        if self.rewired:
            receivers = np.random.Generator(np.random.Philox(0)).permutation(receivers)
        graph = graphs.make_graph(
            senders, receivers, len(arrays["labels"]), features=features
        )
        held_out = _TEST if self.holdout == "test" else _VALIDATION
        return vertex_dataset(graph, arrays["labels"], _TRAIN, held_out)


@dataclasses.dataclass(frozen=True, kw_only=True)
class KarateConfig(Config):
    """Zachary's karate club: 34 members, 78 friendships, two that lead what it became.

    The two leaders are trained on, the others are held out: with whom did they go? Each
    member's one feature is to be that member.
    """

    objective: ClassVar[Objective] = VERTICES

    def load(self, root: pathlib.Path | None = None) -> Dataset:
        """Returns the club; `root` is not used.

        Examples:
          >>> club = KarateConfig().load()
          >>> len(club.train), len(club.validation), len(club.graph.senders)
          (2, 32, 156)
        """
        from hpcjax import graphs

        del root
        pairs = [(a, b) for a, friends in _FRIENDS.items() for b in friends]
        one, other = np.array(pairs).T
        every = np.arange(_MEMBERS)
        features = graphs.SparseRows(
            offsets=np.arange(_MEMBERS + 1, dtype=np.int32),
            columns=every.astype(np.int32),
            values=np.ones(_MEMBERS, np.float32),
            width=_MEMBERS,
        )
        graph = graphs.make_graph(
            np.r_[one, other], np.r_[other, one], _MEMBERS, features=features
        )
        labels = ~np.isin(every, _STAYED)
        leaders = np.array([0, _MEMBERS - 1])
        return vertex_dataset(graph, labels, leaders, np.delete(every, leaders))
