"""The nearest neighbours of 8×8 digits as a graph, of which few are labelled."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import ClassVar

import numpy as np

from hpcjax.core import checks
from hpcjax.core.config import Config, Seed, Share, Size
from hpcjax.core.objective import Objective
from hpcjax.data.citations import vertex_dataset
from hpcjax.data.digits import read_digits
from hpcjax.data.objectives import VERTICES
from hpcjax.data.source import Dataset


@dataclasses.dataclass(frozen=True, kw_only=True)
class KnnDigitsConfig(Config):
    """1,797 scans of digits, each with an edge to and from those that are most alike.

    Neighbours are of all scans, by the distance of their 64 pixels, whatever digits
    they are. Some are drawn to be trained on; all others are held out.

    Attributes:
      neighbours: of each scan, to which edges go in both directions.
      labelled: share of the scans that are trained on.
      draw_seed: of the draw of these; it is not the seed of the run.
    """

    objective: ClassVar[Objective] = VERTICES
    smoke: ClassVar[Mapping[str, str]] = {"neighbours": "2"}

    neighbours: Size = 10
    labelled: Share = 0.1
    draw_seed: Seed = 0

    def load(self, root: pathlib.Path | None = None) -> Dataset:
        """Returns the scans; `root` is not used.

        Raises:
          ConfigError: as many neighbours as there are scans, or a part without any.

        Examples:
          >>> digits = KnnDigitsConfig().load()
          >>> len(digits.train), len(digits.validation), digits.graph.features.shape
          (180, 1617, (1797, 64))
        """
        from scipy.spatial import KDTree

        from hpcjax import graphs

        del root
        pixels, labels = read_digits()
        count, x = len(labels), pixels / np.float32(16)
        rule = f"neighbours must be fewer than the {count} scans"
        checks.require(self.neighbours < count, rule, neighbours=self.neighbours)
        # Of a scan that is there twice, its own place may not be the first.
        near = KDTree(x).query(x, self.neighbours + 1)[1]
        own = near == np.arange(count)[:, None]
        own[~own.any(1), -1] = True
        ends = near[~own], np.repeat(np.arange(count), self.neighbours)
        graph = graphs.symmetrize(graphs.make_graph(*ends, count, features=x))
        order = np.random.Generator(np.random.Philox(self.draw_seed)).permutation(count)
        chosen, rest = np.split(order, [round(self.labelled * count)])
        rule = "labelled must leave scans to train on, and others"
        good = 0 < len(chosen) < count
        checks.require(good, rule, labelled=self.labelled)
        return vertex_dataset(graph, labels, np.sort(chosen), np.sort(rest))
