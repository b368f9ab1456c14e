"""Blocks of a graph's vertices with sampled neighbourhoods; imports no JAX."""

import dataclasses
import functools
import math
import pathlib
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar, Literal

from hpcjax.core import checks
from hpcjax.core.config import Config, Count, NotNegative, Size, fields_of
from hpcjax.core.objective import Objective
from hpcjax.core.parts import Part
from hpcjax.data.community_graph import CommunityGraphConfig
from hpcjax.data.objectives import BLOCKS
from hpcjax.data.source import Dataset
from hpcjax.graphs.snapshot_policies import FullBatch, FullRefresh, OnTheFly

Build = Callable[..., Any]


def _is_fanout(name: str, value: int) -> None:
    rule = f"{name} must be at least 1, or -1 for all neighbours"
    checks.require(value == -1 or value > 0, rule, **{name: value})


@dataclasses.dataclass(frozen=True, kw_only=True)
class DenseConfig(Config):
    """DENSE: each vertex of a block is sampled once, and its list serves all layers.

    Attributes:
      replace: whether lists that are cut are drawn with replacement, as Marius does.
    """

    factory: ClassVar[str] = "hpcjax.graphs:dense_blocks"

    replace: bool = False

    def build(self, csr: Any, fanouts: tuple[int, ...], epoch: int) -> Build:
        """Returns the function of targets and a draw that makes blocks.

        Args:
          csr: of the graph.
          fanouts: of each hop.
          epoch: blocks of an epoch of training, by which blocks are numbered.
        """
        from hpcjax import graphs

        del epoch

        sample = functools.partial(graphs.sample_neighbours, replace=self.replace)
        return functools.partial(self.find_factory(), csr, fanouts, sample=sample)


@dataclasses.dataclass(frozen=True, kw_only=True)
class LayerwiseConfig(DenseConfig):
    """As loaders commonly sample: each layer samples all that it computes anew."""

    factory: ClassVar[str] = "hpcjax.graphs:layerwise_blocks"


@dataclasses.dataclass(frozen=True, kw_only=True)
class SnapshotConfig(Config):
    """Layer-wise, long lists of neighbours from rows in memory (GraphSnapShot).

    The held-out part is sampled without rows.

    Attributes:
      policy: how rows are kept.
      shared: whether layers have rows in common.
      threshold: lists longer than it are served from rows.
      rows: most rows of a layer; none for all such lists.
    """

    figures: ClassVar[Mapping[str, str]] = {
        "read_entries read_pages read_bytes read_hits read_refreshed read_moved": (
            ": of a training block in the mean, see graphs.Reads"
        ),
        "snapshot_bytes": ": of the rows and their index at the end",
    }

    policy: FullBatch | FullRefresh | OnTheFly = FullRefresh()
    shared: bool = False
    threshold: Count = 30
    rows: Size | None = None

    def build(self, csr: Any, fanouts: tuple[int, ...], epoch: int) -> Build:
        """Returns the function of targets and a draw that makes blocks."""
        from hpcjax import graphs

        options = fields_of(self)
        store, policy = graphs.VersionedCsr(csr), options.pop("policy")
        return graphs.Snapshot(store, fanouts, policy, epoch=epoch, **options)


@dataclasses.dataclass(frozen=True, kw_only=True)
class SampledGraphConfig(Config):
    """Blocks of vertices with sampled neighbourhoods, for training by mini-batches.

    An example is a block, so that `train.batch_size` counts blocks; devices have blocks
    of their own. What is drawn depends on seed, epoch, block and vertex alone.

    Attributes:
      source: a graph, a part whose examples are vertices.
      fanouts: most neighbours of a vertex, one for each layer, that of the targets
        first; −1 for all.
      block: target vertices of a block.
      sampler: how neighbourhoods are sampled.
      evaluate: whether the held-out part has neighbourhoods of fixed draws, or "all".
      spare: by how much the first shape that blocks are padded to is above the largest
        of some, a share. Larger blocks take a shape √2 times as large, and so on, each
        of which is compiled; with several processes they are an error.
    """

    objective: ClassVar[Objective] = BLOCKS
    draws: ClassVar[bool] = True  # its batches itself
    smoke: ClassVar[Mapping[str, str]] = {"block": "4", "spare": "1.0"}

    source: Annotated[Any, Part("dataset")] = CommunityGraphConfig()
    fanouts: tuple[Annotated[int, _is_fanout], ...] = (10, 10)
    block: Size = 128
    sampler: DenseConfig | LayerwiseConfig | SnapshotConfig = DenseConfig()
    evaluate: Literal["sampled", "all"] = "sampled"
    spare: NotNegative = 0.1

    def __post_init__(self) -> None:
        super().__post_init__()
        kind = self.source.objective.name
        rule = f"source must be of vertices, such as community_graph: got one of {kind}"
        checks.require(kind == "vertices", rule)
        checks.require(bool(self.fanouts), "there must be a fanout", fanouts="[]")

    @property
    def figures(self) -> Mapping[str, str]:  # pyrefly: ignore[bad-override]
        """What the sampler adds to a run's."""
        return getattr(self.sampler, "figures", {})

    def load(self, root: pathlib.Path | None = None) -> Dataset:
        """Returns the blocks; `root` is that of the source.

        Raises:
          ConfigError: fewer training vertices than a block has.

        Examples:
          >>> graph = CommunityGraphConfig(vertices=1000)
          >>> blocks = SampledGraphConfig(source=graph, fanouts=(5, 5)).load()
          >>> len(blocks.train), len(blocks.validation), blocks.inputs
          (4, 2, (2, 128))
        """
        from hpcjax import graphs
        from hpcjax.data.block_source import BlockMaker, BlockSampler, BlockSource

        whole: Any = self.source.load(root)
        train, held_out = whole.train, whole.validation
        rule = f"block must be at most the {len(train)} training vertices"
        checks.require(self.block <= len(train), rule, block=self.block)
        csr = graphs.Csr.of(whole.graph)
        maker = BlockMaker(whole.graph, csr, train.labels, self.block)
        epoch = math.ceil(len(train) / self.block)
        build = seen = self.sampler.build(csr, self.fanouts, epoch)
        if isinstance(self.sampler, SnapshotConfig):
            seen = LayerwiseConfig().build(csr, self.fanouts, epoch)
        if self.evaluate == "all":
            seen = DenseConfig().build(csr, (-1,) * len(self.fanouts), epoch)
        return whole._replace(
            train=BlockSampler(maker, build, train.numbers, self.spare),
            validation=BlockSource(maker, seen, held_out.numbers),
            inputs=(len(self.fanouts), self.block),
            objective=BLOCKS,
        )
