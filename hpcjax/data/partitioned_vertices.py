"""A graph's vertices shared out over devices, an example being a part; no JAX."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from hpcjax.core import checks
from hpcjax.core.config import Config, Seed, Size
from hpcjax.core.objective import Objective
from hpcjax.core.parts import Part
from hpcjax.data.knn_digits import KnnDigitsConfig
from hpcjax.data.objectives import PARTS
from hpcjax.data.source import Dataset


@dataclasses.dataclass(frozen=True, kw_only=True)
class PartitionedVerticesConfig(Config):
    """The vertices of one graph, shared out over the devices of a run.

    An example is a part of them, and a batch is all parts: `train.batch_size` must be
    `partitions`. Devices divide these, and exchange what they need of each other as
    `model.scheme` says.

    Attributes:
      source: a graph, a part whose examples are vertices; sparse features become dense.
      partitions: how many parts.
      method: how vertices are shared out, see `graphs.partition`.
      draw_seed: of its random orders; it is not the seed of the run.
    """

    objective: ClassVar[Objective] = PARTS
    draws: ClassVar[bool] = True  # its batches itself
    # A batch is all parts, which the forward pass of each needs.
    whole_batches: ClassVar[bool] = True
    smoke: ClassVar[Mapping[str, str]] = {"partitions": "16"}

    source: Annotated[Any, Part("dataset")] = KnnDigitsConfig()
    partitions: Size = 8
    method: Literal["hash", "contiguous", "rcm", "label_propagation"] = "rcm"
    draw_seed: Seed = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = self.source.objective.name
        rule = f"source must be of vertices, such as knn_digits: got one of {kind}"
        checks.require(kind == "vertices", rule)

    def load(self, root: pathlib.Path | None = None) -> Dataset:
        """Returns the parts; `root` is that of the source.

        Raises:
          ConfigError: more parts than vertices.

        Examples:
          >>> parts = PartitionedVerticesConfig(partitions=4).load()
          >>> len(parts.train), parts.inputs, parts.owner[:4].tolist()
          (4, (451, 64), [0, 2, 2, 3])
        """
        from hpcjax import graphs
        from hpcjax.data.part_source import PartSource

        whole = self.source.load(root)
        features = graphs.make_dense(whole.graph.features)
        graph = dataclasses.replace(whole.graph, features=features)
        cut = graphs.partition(graph, self.partitions, self.method, seed=self.draw_seed)
        own: list[Any] = [
            PartSource(cut, features, each.labels, each.numbers)
            for each in (whole.train, whole.validation)
        ]
        return whole._replace(
            train=own[0],
            validation=own[1],
            inputs=(cut.rows, features.shape[1]),
            objective=PARTS,
            graph=graph,
            owner=cut.owner,
        )
