"""Published sizes of language models, as data; loads no JAX."""

import dataclasses
from collections.abc import Mapping
from typing import Any, NamedTuple

from hpcjax.core.errors import ConfigError, nearest
from hpcjax.models.bert_config import BertConfig
from hpcjax.models.transformer_config import (
    BLOOM,
    LLAMA,
    OPT,
    CausalLmConfig,
    TransformerOptions,
)

# The first LLaMA models add 1e-6 to the variance in RMSNorm, later ones 1e-5.
LLAMA_1 = dataclasses.replace(LLAMA, norm_eps=1e-6)
SMOLLM2 = dataclasses.replace(LLAMA, rope_theta=1e5, tied_head=True)
OPT_350M = dataclasses.replace(
    OPT, norm_position="post", final_norm=False, embed_width=512
)


class Preset(NamedTuple):
    """A model's config, the rows of its position table, and its vocabulary."""

    config: CausalLmConfig | BertConfig
    context: int
    vocabulary: int


def _gpt(depth: int, heads: int, width: int, context: int = 1024) -> Preset:
    return Preset(CausalLmConfig(depth=depth, heads=heads, width=width), context, 50257)


def _opt(
    depth: int, heads: int, width: int, options: TransformerOptions = OPT
) -> Preset:
    config = CausalLmConfig(depth=depth, heads=heads, width=width, options=options)
    return Preset(config, 2048, 50272)


def _bloom(depth: int, heads: int, width: int) -> Preset:
    config = CausalLmConfig(depth=depth, heads=heads, width=width, options=BLOOM)
    return Preset(config, 2048, 250880)


def _llama(
    depth: int,
    heads: int,
    width: int,
    mlp_width: int,
    *,
    options: TransformerOptions = LLAMA_1,
    context: int = 2048,
    vocabulary: int = 32000,
    **more: Any,
) -> Preset:
    config = CausalLmConfig(
        depth=depth,
        heads=heads,
        width=width,
        mlp_width=mlp_width,
        options=options,
        **more,
    )
    return Preset(config, context, vocabulary)


def _bert(depth: int, heads: int, width: int) -> Preset:
    return Preset(BertConfig(depth=depth, heads=heads, width=width), 512, 30522)


PRESETS: Mapping[str, Preset] = {
    "gpt2-small": _gpt(12, 12, 768),
    "gpt2-medium": _gpt(24, 16, 1024),
    "gpt2-large": _gpt(36, 20, 1280),
    "gpt2-xl": _gpt(48, 25, 1600),
    "gpt3-175b": _gpt(96, 96, 12288, context=2048),
    "opt-125m": _opt(12, 12, 768),
    "opt-350m": _opt(24, 16, 1024, OPT_350M),
    "opt-1.3b": _opt(24, 32, 2048),
    "opt-2.7b": _opt(32, 32, 2560),
    "opt-6.7b": _opt(32, 32, 4096),
    "opt-13b": _opt(40, 40, 5120),
    "opt-30b": _opt(48, 56, 7168),
    "opt-66b": _opt(64, 72, 9216),
    "bloom-560m": _bloom(24, 16, 1024),
    "bloom-1b1": _bloom(24, 16, 1536),
    "bloom-1b7": _bloom(24, 16, 2048),
    "bloom-3b": _bloom(30, 32, 2560),
    "bloom-7b1": _bloom(30, 32, 4096),
    "bloom-176b": _bloom(70, 112, 14336),
    "llama-7b": _llama(32, 32, 4096, 11008),
    "llama-13b": _llama(40, 40, 5120, 13824),
    "llama-33b": _llama(60, 52, 6656, 17920),
    "llama-65b": _llama(80, 64, 8192, 22016),
    "llama2-70b": _llama(80, 64, 8192, 28672, kv_heads=8, options=LLAMA, context=4096),
    "smollm2-135m": _llama(
        30, 9, 576, 1536, kv_heads=3, options=SMOLLM2, context=8192, vocabulary=49152
    ),
    "bert-base": _bert(12, 12, 768),
    "bert-large": _bert(24, 16, 1024),
}


def preset(name: str) -> Preset:
    """Returns a published size by its name.

    Raises:
      ConfigError: no such name; the message holds the nearest one.

    Examples:
      >>> config, context, vocabulary = preset("gpt2-medium")
      >>> config.depth, config.width, context, vocabulary
      (24, 1024, 1024, 50257)
    """
    if name not in PRESETS:
        raise ConfigError(f"no preset {name!r}{nearest(name, PRESETS)}")
    return PRESETS[name]
