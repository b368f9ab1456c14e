"""A drawn graph of communities, with a long tail of degrees."""

import dataclasses
import pathlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import numpy as np

from hpcjax.core import checks
from hpcjax.core.config import (
    Above,
    Config,
    Count,
    NotNegative,
    Seed,
    Several,
    Size,
    Within,
)
from hpcjax.core.objective import Objective
from hpcjax.data.citations import vertex_dataset
from hpcjax.data.objectives import VERTICES
from hpcjax.data.source import Dataset

_TAIL = 2.0  # exponent of the degrees' Pareto distribution


@dataclasses.dataclass(frozen=True, kw_only=True)
class CommunityGraphConfig(Config):
    """Vertices of several classes that mostly know their own, drawn when it is loaded.

    Degrees have a Pareto tail of exponent 2. A vertex's features are its class, one
    column each, and noise. Half of the vertices are trained on, a fifth is for
    validation, the rest for test.

    Attributes:
      vertices: how many.
      degree: mean of the edges that a vertex receives.
      classes: how many, equally likely.
      homophily: share of edges whose ends are of one class by choice; the others have
        ends of any class.
      noise: standard deviation of the noise in features.
      width: columns of features, of which the first are those of classes; their noise
        is a hash of the vertex's number then, so that rows can be made in pieces. 0 for
        one a class, drawn.
      labelled: vertices that are trained on; none for half of all.
      held: vertices for validation, and at most as many for test; none for a fifth.
      draw_seed: of everything; it is not the seed of the run.
      holdout: the part that is held out.
    """

    objective: ClassVar[Objective] = VERTICES
    smoke: ClassVar[Mapping[str, str]] = {
        "vertices": "40",
        "degree": "4.0",
        "labelled": "20",
        "held": "8",
    }

    vertices: Several = 10_000
    degree: Annotated[float, Above(0)] = 25.0
    classes: Several = 10
    homophily: Annotated[float, Within("[0, 1]")] = 0.7
    noise: NotNegative = 0.55
    width: Count = 0
    labelled: Size | None = None
    held: Size | None = None
    draw_seed: Seed = 0
    holdout: Literal["validation", "test"] = "validation"

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = f"width must be 0, or at least the {self.classes} classes"
        good = self.width == 0 or self.width >= self.classes
        checks.require(good, rule, width=self.width)
        train, held = self._sizes
        rule = "vertices must be more than are labelled and held out"
        given = {"labelled": train, "held": held}
        checks.require(train + held < self.vertices, rule, **given)

    @property
    def _sizes(self) -> tuple[int, int]:
        """Vertices that are trained on, and those for validation."""
        return (
            self.vertices // 2 if self.labelled is None else self.labelled,
            self.vertices // 5 if self.held is None else self.held,
        )

    def load(self, root: pathlib.Path | None = None) -> Dataset:
        """Returns the vertices; `root` is not used.

        Examples:
          >>> held = CommunityGraphConfig(vertices=1000, degree=10.0).load()
          >>> len(held.train), len(held.validation), len(held.graph.senders)
          (500, 200, 10000)
        """
        found, rows = self.stream(root)
        features = rows(np.arange(self.vertices))
        graph = dataclasses.replace(found.graph, features=features)
        return found._replace(graph=graph)

    def stream(
        self, root: pathlib.Path | None = None
    ) -> tuple[Dataset, Callable[[np.ndarray], np.ndarray]]:
        """Returns the vertices without features, and a function that makes rows.

        For who has no room for all rows at once; with `width` they are not made before.
        """
        from hpcjax import graphs

        del root
        rng = np.random.Generator(np.random.Philox(self.draw_seed))
        labels = np.sort(rng.integers(0, self.classes, self.vertices))
        one, other = self._draw_pairs(rng, labels)
        drawn: Any = None
        if not self.width:
            drawn = rng.normal(0, self.noise, (self.vertices, self.classes))
            drawn[np.arange(self.vertices), labels] += 1
        place = rng.permutation(self.vertices)  # numbers do not tell the class
        ends = place[np.r_[one, other]], place[np.r_[other, one]]
        order = np.argsort(place)
        train, held = self._sizes
        parts = np.split(rng.permutation(self.vertices), (train, train + held))
        if self.held is not None:
            parts[2] = parts[2][:held]
        held_out, labels = parts[2 if self.holdout == "test" else 1], labels[order]
        graph = graphs.make_graph(*ends, self.vertices)

        def rows(vertices: np.ndarray) -> np.ndarray:
            if drawn is not None:
                return drawn[order[vertices]].astype(np.float32)
            return self._hash_rows(vertices, labels[vertices])

        return vertex_dataset(graph, labels, parts[0], held_out), rows

    def _hash_rows(self, vertices: np.ndarray, labels: np.ndarray) -> np.ndarray:
        """Returns features whose noise is uniform, of the same deviation."""
        from hpcjax import graphs

        pairs = -(-self.width // 2)  # a hash has the bits of two
        own = vertices[:, None] * np.int64(pairs) + np.arange(pairs)
        bits = graphs.Draw(self.draw_seed).keys(own).view(np.uint32)[:, : self.width]
        uniform = bits.astype(np.float32) * np.float32(2**-32) - np.float32(0.5)
        features = uniform * np.float32(self.noise * 12**0.5)
        features[np.arange(len(vertices)), labels] += 1
        return features

    def _draw_pairs(
        self, rng: np.random.Generator, labels: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Returns the ends of edges, by the weights of vertices sorted by class."""
        pairs = round(self.vertices * self.degree / 2)
        ends = np.r_[0, np.cumsum(1 + rng.pareto(_TAIL, self.vertices))]

        def draw(low: np.ndarray, high: np.ndarray) -> np.ndarray:
            at = low + rng.random(pairs) * (high - low)
            found = np.searchsorted(ends, at, side="right") - 1
            return np.clip(found, 0, self.vertices - 1)

        every = np.zeros(pairs), np.full(pairs, ends[-1])
        one = draw(*every)
        starts = ends[np.searchsorted(labels, np.arange(self.classes + 1))]
        own = rng.random(pairs) < self.homophily
        low = np.where(own, starts[labels[one]], 0)
        high = np.where(own, starts[labels[one] + 1], ends[-1])
        return one, draw(low, high)
