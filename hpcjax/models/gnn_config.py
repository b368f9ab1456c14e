"""Config of graph networks; importing this module imports no JAX."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from hpcjax.core import checks
from hpcjax.core.config import Count, NotNegative, Size, Within
from hpcjax.core.objective import Objective
from hpcjax.models.model_config import ModelConfig

Layer = Literal[
    "gcn",
    "sage",
    "gat",
    "gin",
    "sgc",
    "mlp",
    "commnet",
    "agnn",
    "monet",
    "vanilla_attention",
    "g_gcn",
    "edge_conv",
]


@dataclasses.dataclass(frozen=True, kw_only=True)
class GnnConfig(ModelConfig):
    """A graph network, see `models.gnn`.

    Attributes:
      layer: the convolution. "sgc" is one matrix and `depth` propagations; "mlp" sees
        the features and no edge. "agnn", "vanilla_attention" and "edge_conv" are of
        dense features; blocks have none from "commnet" on.
      hidden: width of a hidden layer; of each head for "gat".
      depth: number of layers.
      heads: of hidden "gat" layers, which are concatenated; the last layer has one. Of
        "monet" the kernels of all layers, added.
      dropout: share of each layer's inputs that are zero in a training pass; of "gat"
        also of the weights of edges.
      penalty: λ of λ/2 ‖W‖² in the objective, for the matrices of the first layer; of
        "gat" for all.
      activation: after every hidden layer.
      self_loops: of "gcn", "gat", "sgc", "agnn" and "monet", see
        `graphs.add_self_loops`; None for those that the graph has.
      scheme: how devices exchange rows of a graph in parts: "halo" in rounds of pairs,
        "all_to_all" of padded blocks, "allgather" of all rows, "auto" the first or the
        last, what sends less. By "features" each device has all edges and a slice of
        the columns, and products with matrices are reduce-scattered.
      stale: τ, steps by which rows of other devices are late where a hidden layer
        takes them in training; before they arrive they are zeros. 0 for not.
      stale_mean: γ of a running mean of late rows, of which 1 − γ is new in a step.
      delay: "fixed", "random" from 0 to τ, drawn for each pair of devices and step, or
        "never", by which late rows stay zeros, a control.
    """

    factory: ClassVar[str] = "hpcjax.models._gnn:gnn"
    smoke: ClassVar[Mapping[str, str]] = {"hidden": "4", "heads": "2"}

    layer: Layer = "gcn"
    hidden: Size = 16
    depth: Size = 2
    heads: Size = 8
    dropout: Annotated[float, Within("[0, 1)")] = 0.5
    penalty: NotNegative = 0.0
    activation: Literal["relu", "elu"] = "relu"
    self_loops: Literal["one", "plus_i"] | None = "one"
    scheme: Literal["halo", "all_to_all", "allgather", "auto", "features"] = "halo"
    stale: Count = 0
    stale_mean: Annotated[float, Within("[0, 1)")] = 0.0
    delay: Literal["fixed", "random", "never"] = "fixed"

    def __post_init__(self) -> None:
        super().__post_init__()
        given = {"stale_mean": self.stale_mean, "delay": self.delay}
        late = self.stale > 0
        plain = not self.stale_mean and self.delay == "fixed"
        rule = "stale_mean and delay are of stale rows: give stale, steps"
        checks.require(late or plain, rule, **given)
        rule = "stale is of what a hidden layer puts out: depth must be at least 2"
        checks.require(not late or self.depth > 1, rule, depth=self.depth)
        rule = "stale is of rows of other devices, and scheme=features sends none"
        checks.require(not late or self.scheme != "features", rule, stale=self.stale)
        rule = "stale rows are of a layer that sees edges of a graph in parts"
        sends = self.layer not in ("mlp", "sgc")
        checks.require(not late or sends, rule, layer=self.layer)

    @classmethod
    def takes(cls, objective: Objective) -> bool:
        """Says whether it is of the vertices of a graph, in blocks or parts."""
        return objective.name in ("vertices", "blocks", "parts")
