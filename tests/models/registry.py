"""Tiny instances of every model, for tests that hold for all of them."""

import dataclasses
import types
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from hpcjax import graphs
from hpcjax.models.bert_config import BertConfig
from hpcjax.models.dlrm_config import DlrmConfig
from hpcjax.models.ggnn_config import GgnnConfig
from hpcjax.models.gnn_config import GnnConfig
from hpcjax.models.kge_config import KgeConfig
from hpcjax.models.mlp_config import MlpConfig
from hpcjax.models.postprocess_config import (
    BiasUNetConfig,
    ConvLstmConfig,
    EmosConfig,
    FieldCnnConfig,
    FieldUNetConfig,
    LcnConfig,
    MeanAndSpreadConfig,
    MemberAttentionConfig,
    PointMlpConfig,
    RawConfig,
    SpreadNetConfig,
    UNet3dConfig,
)
from hpcjax.models.resnet_config import ResNetConfig
from hpcjax.models.spatial_config import (
    CnnConfig,
    LocallyConnectedConfig,
    SmoeConfig,
)
from hpcjax.models.transformer_config import (
    BLOOM,
    GPT2,
    LLAMA,
    OPT,
    CausalLmConfig,
    ExpertsConfig,
)
from hpcjax.models.unet_config import UNetConfig
from hpcjax.models.vgg_config import VggConfig
from hpcjax.models.volume_config import CosmoFlowConfig, VolumeUNetConfig


class Entry(NamedTuple):
    """A config, with the shape of one example, number of outputs and inputs' dtype.

    And what the data set has for it.
    """

    config: Any
    inputs: Any
    outputs: int
    dtype: str = "float32"
    given: Mapping[str, Any] = types.MappingProxyType({})


def _language(**fields: Any) -> Entry:
    small = CausalLmConfig(width=8, heads=2)
    return Entry(dataclasses.replace(small, **fields), (6,), 11, "int32")


def _members(config: Any) -> Entry:
    return Entry(config, {"members": (5, 8, 3, 2), "fields": (5, 8, 7)}, 2)


def _levels(config: Any) -> Entry:
    shapes = {"members": (4, 8, 3, 2), "fields": (4, 8, 15)}
    return Entry(config, shapes, 2, given={"axes": (2, 2)})


# Of two blocks' mean and deviation of two variables.
_NAMES = tuple(
    f"{block} {each}"
    for block in "ab"
    for each in ("mean x", "deviation x", "control x")
)


def _named(config: Any, **given: Any) -> Entry:
    shapes = {"members": (4, 8, 3, 1), "fields": (4, 8, 9)}
    return Entry(config, shapes, 2, given={"channels": _NAMES, **given})


def _vertices(layer: str, **fields: Any) -> Entry:
    rng = np.random.default_rng(0)
    graph = graphs.make_graph(
        *rng.integers(0, 9, (2, 30)), 9, features=rng.normal(size=(9, 5)).astype("f4")
    )
    config = GnnConfig(layer=layer, hidden=4, heads=2, dropout=0.0, **fields)
    return Entry(config, (), 3, "int32", {"graph": graph})


def _links(decoder: Any) -> Entry:
    shapes = {"triples": (3, 3), "negatives": (2, 5)}
    return Entry(
        KgeConfig(decoder=decoder, width=4), shapes, 9, given={"tables": (9, 2)}
    )


def _programs(**fields: Any) -> Entry:
    config = GgnnConfig(width=4, steps=2, **fields)
    return Entry(config, (9, 14), 2, "int32", {"tables": (5,)})


REGISTRY: dict[str, Entry] = {
    "gcn": _vertices("gcn", penalty=0.1),
    "sage": _vertices("sage", self_loops=None),
    "gat": _vertices("gat", penalty=0.1, activation="elu"),
    "gin": _vertices("gin", depth=1),
    "sgc": _vertices("sgc", self_loops="plus_i"),
    "words": _vertices("mlp", depth=3),
    "programs": _programs(gate="pre"),
    "programs_post": _programs(gate="post", positions=False, backward=False),
    "raw": _members(RawConfig()),
    "emos": _members(EmosConfig()),
    "emos_points": _members(EmosConfig(variant="ens10", per_point=True, jitter=0.1)),
    "climatology": _members(EmosConfig(variant="climatology")),
    "point_mlp": _members(PointMlpConfig(widths=(4,))),
    "field_cnn": _members(FieldCnnConfig(width=2)),
    "field_unet": _members(FieldUNetConfig(width=2)),
    "member_attention": _members(MemberAttentionConfig(width=2)),
    "unet3d": _levels(UNet3dConfig(base=2, poolings=1)),
    "bias_unet": _members(BiasUNetConfig(levels=0, filters=2, features=2)),
    "bias_unet_deep": _named(
        BiasUNetConfig(levels=1, filters=2, norm="group", lcn=LcnConfig(kernel=3))
    ),
    "spread_net": _named(SpreadNetConfig(base=2, blocks=2, remat=True)),
    "spread_net_simple": _named(
        SpreadNetConfig(variant="simple", base=8, blocks=1, norm="none")
    ),
    "mean_and_spread": _named(
        MeanAndSpreadConfig(
            mean=BiasUNetConfig(levels=0, filters=1),
            spread=SpreadNetConfig(base=2, blocks=1),
        ),
        folds=2,
    ),
    "conv_lstm": _levels(ConvLstmConfig(width=2, remat=True)),
    "dlrm": Entry(
        DlrmConfig(width=4, bottom=(5,), top=(6,)),
        {"dense": (3,), "ids": (2,)},
        1,
        given={"tables": (5, 6)},
    ),
    "distmult": _links("distmult"),
    "complex": _links("complex"),
    "transe": _links("transe"),
    "dot": _links("dot"),
    "mlp": Entry(MlpConfig(widths=(7, 5)), (4, 3), 3),
    "linear": Entry(MlpConfig(widths=(), head_init="zeros"), (6,), 4),
    "resnet8": Entry(ResNetConfig(depth=8, width=2), (8, 8, 1), 3),
    "resnet8_group": Entry(
        ResNetConfig(depth=8, width=4, norm="group", shortcut="B"), (8, 8, 3), 3
    ),
    "resnet18": Entry(
        ResNetConfig(depth=18, width=2, zero_init_residual=True), (33, 33, 3), 3
    ),
    "resnet50": Entry(ResNetConfig(depth=50, width=2), (32, 32, 3), 3),
    "unet": Entry(UNetConfig(depth=2, width=2), (8, 12, 3), 3),
    "cosmoflow": Entry(CosmoFlowConfig(width_divisor=16, dropout=0.0), (8, 8, 8, 2), 3),
    "volume_unet": Entry(VolumeUNetConfig(width_divisor=16), (8, 8, 8, 2), 3),
    "cnn": Entry(CnnConfig(widths=(3,), coordinates=True), (5, 6, 2), 3),
    "locally_connected": Entry(LocallyConnectedConfig(), (5, 4, 2), 3),
    "smoe": Entry(SmoeConfig(widths=(2,)), (5, 4, 2), 2),
    "smoe_gate": Entry(SmoeConfig(gate="coord_conv", weighted=True), (5, 4, 2), 1),
    "smoe_forecast": _members(SmoeConfig(products="gather", padding="periodic")),
    "vgg11": Entry(VggConfig(depth=11, width=1), (32, 32, 1), 3),
    "bert": Entry(BertConfig(width=8), (6, 3), 11, "int32"),
    "bert_remat": Entry(
        BertConfig(width=8, heads=4, mlp_width=12, remat="full"), (6, 3), 11, "int32"
    ),
    "gpt2": _language(),
    "gpt2_remat": _language(remat="full"),
    "opt": _language(options=OPT, depth=1, remat="dots"),
    "opt_350m": _language(
        options=dataclasses.replace(
            OPT, norm_position="post", final_norm=False, embed_width=4
        )
    ),
    "bloom": _language(options=BLOOM, width=12, heads=3),
    "llama": _language(options=LLAMA, heads=4, kv_heads=2, mlp_width=12),
    "llama_heads": _language(
        options=LLAMA, heads=3, kv_heads=1, head_dim=6, mlp_width=12
    ),
    "moe": _language(options=dataclasses.replace(GPT2, experts=ExpertsConfig(count=4))),
    "moe_gated": _language(
        options=dataclasses.replace(
            LLAMA, experts=ExpertsConfig(count=3, top_k=1, capacity_factor=3.0)
        ),
        remat="full",
        mlp_width=12,
    ),
    "post_norm": _language(
        options=dataclasses.replace(
            GPT2, norm_position="post", final_norm=False, mlp="gelu_erf"
        )
    ),
}
