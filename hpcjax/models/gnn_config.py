"""Config of graph networks; importing this module imports no JAX."""

import dataclasses
from collections.abc import Mapping
from typing import Annotated, ClassVar, Literal

from hpcjax.core.config import NotNegative, Size, Within
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

    @classmethod
    def takes(cls, objective: Objective) -> bool:
        """Says whether it is of the vertices of a graph, or of blocks of them."""
        return objective.name in ("vertices", "blocks")
