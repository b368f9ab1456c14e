"""A drawn graph of communities, with a long tail of degrees."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

import numpy as np

from hpcjax.core.config import Above, Config, NotNegative, Seed, Several, Within
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
      draw_seed: of everything; it is not the seed of the run.
      holdout: the part that is held out.
    """

    objective: ClassVar[Objective] = VERTICES
    smoke: ClassVar[Mapping[str, str]] = {"vertices": "40", "degree": "4.0"}

    vertices: Several = 10_000
    degree: Annotated[float, Above(0)] = 25.0
    classes: Several = 10
    homophily: Annotated[float, Within("[0, 1]")] = 0.7
    noise: NotNegative = 0.55
    draw_seed: Seed = 0
    holdout: Literal["validation", "test"] = "validation"

    def load(self, root: pathlib.Path | None = None) -> Dataset:
        """Returns the vertices; `root` is not used.

        Examples:
          >>> held = CommunityGraphConfig(vertices=1000, degree=10.0).load()
          >>> len(held.train), len(held.validation), len(held.graph.senders)
          (500, 200, 10000)
        """
        from hpcjax import graphs

        del root
        rng = np.random.Generator(np.random.Philox(self.draw_seed))
        labels = np.sort(rng.integers(0, self.classes, self.vertices))
        one, other = self._draw_pairs(rng, labels)
        features = rng.normal(0, self.noise, (self.vertices, self.classes))
        features[np.arange(self.vertices), labels] += 1
        place = rng.permutation(self.vertices)  # numbers do not tell the class
        senders, receivers = place[np.r_[one, other]], place[np.r_[other, one]]
        order = np.argsort(place)
        graph = graphs.make_graph(
            senders, receivers, self.vertices, features=features[order].astype("f4")
        )
        cuts = self.vertices // 2, self.vertices // 2 + self.vertices // 5
        parts = np.split(rng.permutation(self.vertices), cuts)
        held_out = parts[2 if self.holdout == "test" else 1]
        return vertex_dataset(graph, labels[order], parts[0], held_out)

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
