"""Model configs from checkpoints' `config.json` or GGUF data, and back; no JAX."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from hpcjax.core.errors import ConfigError, DataFormatError, UnsupportedOp, nearest
from hpcjax.models.bert_config import BertConfig
from hpcjax.models.transformer_config import (
    BERT,
    BLOOM,
    GPT2,
    LLAMA,
    OPT,
    CausalLmConfig,
    RopeScaling,
    TransformerOptions,
)

FamilyName = Literal["gpt2", "opt", "bloom", "llama", "bert"]

# The largest size that is believed; a file with a larger one is damaged.
MOST = 2**31 - 1
_ACTIVATIONS: dict[str, Any] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu_erf",
    "relu": "relu",
}
_OPTIONS = {"gpt2": GPT2, "opt": OPT, "bloom": BLOOM, "llama": LLAMA}
_BERT_CLASSES = {
    "pretraining": "BertForPreTraining",
    "masked_lm": "BertForMaskedLM",
    "pooler": "BertModel",
    "none": "BertModel",
}


class Architecture(NamedTuple):
    """The architecture of a checkpoint.

    Attributes:
      family: the family whose names its tensors have.
      config: the model's config.
      context: rows of the position table, or the longest sequence it was trained for.
      vocabulary: number of words.
    """

    family: FamilyName
    config: CausalLmConfig | BertConfig
    context: int
    vocabulary: int


class Description:
    """Typed access to a description by keys; errors name the file and the key."""

    def __init__(self, source: str, content: Mapping[str, Any]) -> None:
        self.source, self.content = source, content

    def size(self, key: str, default: int | None = None) -> int:
        """Returns the value of a key, an integer from 1 to `MOST`."""
        value = self._get(key, default)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (whole and 1 <= value <= MOST):
            raise self._wrong(key, f"a whole number from 1 to {MOST}", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Returns the value of a key, a number."""
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, "a number", value)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Returns the value of a key, a boolean."""
        value = self._get(key, default)
        if not isinstance(value, bool):
            raise self._wrong(key, "true or false", value)
        return value

    def part(self, key: str) -> "Description":
        """Returns the object below a key; an empty one if it is null or absent."""
        value = self.content.get(key) or {}
        if not isinstance(value, dict):
            raise self._wrong(key, "an object", value)
        return Description(f"{self.source}: {key}", value)

    def require_one_of(self, key: str, *allowed: Any) -> None:
        """Raises UnsupportedOp unless a key is absent or has one of the values."""
        value = self.content.get(key, allowed[0])
        if value not in allowed:
            raise UnsupportedOp(
                f"{self.source}: only {key}={' or '.join(map(repr, allowed))} is "
                f"implemented: got {value!r}"
            )

    def activation(self, key: str, default: str) -> Any:
        """Returns our name of the activation that a key names."""
        value = self.content.get(key, default)
        self.require_one_of(key, default, *_ACTIVATIONS)
        return _ACTIVATIONS[value]

    def _get(self, key: str, default: Any) -> Any:
        value = self.content.get(key)
        return default if value is None else value

    def _wrong(self, key: str, wanted: str, value: Any) -> DataFormatError:
        return DataFormatError(
            f"{self.source}: expected {wanted} as {key!r}, found {value!r}"
        )


def from_json(
    content: Mapping[str, Any], names: Collection[str], source: str
) -> Architecture:
    """Returns the architecture that a `config.json` describes.

    Args:
      content: the file.
      names: of the checkpoint's tensors, which tell the heads of a BERT.
      source: the file's name, for errors.

    Raises:
      UnsupportedOp: an unknown architecture, or an option that is not implemented.
      DataFormatError: a key is absent or has a value of another type.
      ConfigError: sizes that do not divide.
    """
    description = Description(source, content)
    description.part("quantization_config").require_one_of("quant_method", "gptq")
    family = content.get("model_type")
    if not isinstance(family, str) or family not in _READERS:
        raise UnsupportedOp(
            f"{source}: unknown architecture {family!r}{nearest(str(family), _READERS)}"
        )
    return _READERS[family](description, names)


def _gpt2(description: Description, _: Collection[str]) -> Architecture:
    description.require_one_of("scale_attn_weights", True)
    description.require_one_of("scale_attn_by_inverse_layer_idx", False)
    description.require_one_of("add_cross_attention", False)
    width = description.size("n_embd")
    options = dataclasses.replace(
        GPT2,
        norm_eps=description.number("layer_norm_epsilon", 1e-5),
        mlp=description.activation("activation_function", "gelu_new"),
        tied_head=description.flag("tie_word_embeddings", True),
    )
    config = CausalLmConfig(
        depth=description.size("n_layer"),
        width=width,
        heads=description.size("n_head"),
        mlp_width=description.size("n_inner", 4 * width),
        options=options,
    )
    context = description.size("n_positions", description.content.get("n_ctx"))
    return Architecture("gpt2", config, context, description.size("vocab_size"))


def _opt(description: Description, _: Collection[str]) -> Architecture:
    description.require_one_of("enable_bias", True)
    description.require_one_of("layer_norm_elementwise_affine", True)
    width, before = (
        description.size("hidden_size"),
        description.flag("do_layer_norm_before", True),
    )
    narrow = description.size("word_embed_proj_dim", width)
    options = dataclasses.replace(
        OPT,
        norm_position="pre" if before else "post",
        final_norm=before and not description.flag("_remove_final_layer_norm", False),
        mlp=description.activation("activation_function", "relu"),
        embed_width=None if narrow == width else narrow,
        tied_head=description.flag("tie_word_embeddings", True),
    )
    config = CausalLmConfig(
        depth=description.size("num_hidden_layers"),
        width=width,
        heads=description.size("num_attention_heads"),
        mlp_width=description.size("ffn_dim"),
        options=options,
    )
    context = description.size("max_position_embeddings")
    return Architecture("opt", config, context, description.size("vocab_size"))


def _bloom(description: Description, _: Collection[str]) -> Architecture:
    description.require_one_of("apply_residual_connection_post_layernorm", False)
    # Files disagree about the names of the sizes.
    width, depth, heads = (
        next((name for name in names if description.content.get(name)), names[0])
        for names in (
            ("hidden_size", "n_embed"),
            ("n_layer", "num_hidden_layers"),
            ("n_head", "num_attention_heads"),
        )
    )
    description.require_one_of("n_inner", None, 4 * description.size(width))
    options = dataclasses.replace(
        BLOOM,
        norm_eps=description.number("layer_norm_epsilon", 1e-5),
        tied_head=description.flag("tie_word_embeddings", True),
    )
    config = CausalLmConfig(
        depth=description.size(depth),
        width=description.size(width),
        heads=description.size(heads),
        options=options,
    )
    context = description.size("seq_length", 2048)
    return Architecture("bloom", config, context, description.size("vocab_size"))


def _llama(description: Description, _: Collection[str]) -> Architecture:
    description.require_one_of("hidden_act", "silu")
    description.require_one_of("attention_bias", False)
    description.require_one_of("mlp_bias", False)
    width, heads = (
        description.size("hidden_size"),
        description.size("num_attention_heads"),
    )
    head_dim = None
    if description.content.get("head_dim") is not None:
        head_dim = description.size("head_dim")
        # None for the usual size, so that equal models have equal configs.
        head_dim = None if head_dim * heads == width else head_dim
    theta, scaling = _rope(description)
    options = dataclasses.replace(
        LLAMA,
        norm_eps=description.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied_head=description.flag("tie_word_embeddings", False),
    )
    kv_heads = description.size("num_key_value_heads", heads)
    config = CausalLmConfig(
        depth=description.size("num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=None if kv_heads == heads else kv_heads,
        head_dim=head_dim,
        mlp_width=description.size("intermediate_size"),
        options=options,
    )
    context = description.size("max_position_embeddings")
    return Architecture("llama", config, context, description.size("vocab_size"))


def _rope(description: Description) -> tuple[float, RopeScaling | None]:
    """Returns base and scaling of rotary embeddings.

    New files have both in `rope_parameters`, old ones beside each other.
    """
    new = description.part("rope_parameters")
    scaling = new if new.content else description.part("rope_scaling")
    scaling.require_one_of("partial_rotary_factor", 1.0)
    theta = new.number("rope_theta", description.number("rope_theta", 1e4))
    key = "rope_type" if "rope_type" in scaling.content else "type"
    scaling.require_one_of(key, "default", "llama3")
    if scaling.content.get(key, "default") == "default":
        scaling.require_one_of("factor", 1.0, None)
        return theta, None
    return theta, RopeScaling(
        factor=scaling.number("factor"),
        low=scaling.number("low_freq_factor"),
        high=scaling.number("high_freq_factor"),
        context=scaling.size("original_max_position_embeddings"),
    )


def _bert(description: Description, names: Collection[str]) -> Architecture:
    description.require_one_of("hidden_act", "gelu")
    description.require_one_of("type_vocab_size", 2)
    description.require_one_of("layer_norm_eps", BERT.norm_eps)
    description.require_one_of("position_embedding_type", "absolute", None)
    description.require_one_of("is_decoder", False)
    description.require_one_of("tie_word_embeddings", True)

    def has(part: str) -> bool:
        return any(name.removeprefix("bert.").startswith(part) for name in names)

    without = "pooler" if has("pooler.") else "none"
    words = "pretraining" if has("cls.seq_relationship.") else "masked_lm"
    config = BertConfig(
        depth=description.size("num_hidden_layers"),
        width=description.size("hidden_size"),
        heads=description.size("num_attention_heads"),
        mlp_width=description.size("intermediate_size"),
        head=words if has("cls.") else without,
    )
    context = description.size("max_position_embeddings")
    return Architecture("bert", config, context, description.size("vocab_size"))


_READERS = {
    "gpt2": _gpt2,
    "opt": _opt,
    "bloom": _bloom,
    "llama": _llama,
    "bert": _bert,
}


def from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], source: str
) -> Architecture:
    """Returns the architecture that a GGUF file describes, which must be llama.

    Args:
      metadata: the file's keys with their values.
      shapes: of the tensors. The embedding table gives the size of the vocabulary, and
        the head is tied to it if there is no tensor "output.weight".
      source: the file's name, for errors.

    Raises:
      UnsupportedOp: another architecture, or an option that is not implemented.
      DataFormatError: a key is absent or has a value of another type.
      ConfigError: sizes that do not divide.
    """
    description = Description(source, metadata)
    description.require_one_of("general.architecture", "llama")
    description.require_one_of("llama.rope.scaling.type", "none", "", None)
    # A scaling factor without a type is that of linear scaling.
    for key in ("scaling.factor", "scale_linear", "scaling.attn_factor"):
        description.require_one_of(f"llama.rope.{key}", 1.0, 0.0, None)
    description.require_one_of("llama.expert_count", 0, None)
    width = description.size("llama.embedding_length")
    heads = description.size("llama.attention.head_count")
    description.require_one_of("llama.rope.dimension_count", width // heads)
    options = dataclasses.replace(
        LLAMA,
        norm_eps=as_decimal(
            description.number("llama.attention.layer_norm_rms_epsilon")
        ),
        rope_theta=as_decimal(description.number("llama.rope.freq_base", 1e4)),
        tied_head="output.weight" not in shapes,
    )
    kv_heads = description.size("llama.attention.head_count_kv", heads)
    config = CausalLmConfig(
        depth=description.size("llama.block_count"),
        width=width,
        heads=heads,
        kv_heads=None if kv_heads == heads else kv_heads,
        mlp_width=description.size("llama.feed_forward_length"),
        options=options,
    )
    if "token_embd.weight" not in shapes:
        raise DataFormatError(f"{source}: no tensor 'token_embd.weight'")
    context = description.size("llama.context_length")
    return Architecture("llama", config, context, shapes["token_embd.weight"][0])


def as_decimal(value: float) -> float:
    """Returns the shortest decimal that rounds to the float32 `value`.

    GGUF stores 1e-5 as float32, which as a Python float is 9.999999747378752e-06.
    """
    return float(str(np.float32(value)))


def family_of(config: CausalLmConfig | BertConfig) -> FamilyName:
    """Returns the family whose `config.json` can express a config.

    Raises:
      ConfigError: there is none.
    """
    if isinstance(config, BertConfig):
        return "bert"
    options = config.options
    families: dict[str, FamilyName] = {
        "learned": "gpt2",
        "offset": "opt",
        "alibi": "bloom",
        "rope": "llama",
    }
    family = families[options.position]
    # The fields in which the family's models may differ from each other.
    free = {
        "gpt2": ("norm_eps", "mlp", "tied_head"),
        "opt": ("norm_position", "final_norm", "mlp", "tied_head", "embed_width"),
        "bloom": ("norm_eps", "tied_head"),
        "llama": ("norm_eps", "rope_theta", "rope_scaling", "tied_head"),
    }
    good = _differs_only_in(options, _OPTIONS[family], *free[family])
    if family != "llama":
        grouped = config.kv_heads not in (None, config.heads)
        good &= options.mlp != "silu_gated" and not grouped
        good &= config.head_dim in (None, config.width // config.heads)
    if family == "bloom":
        good &= config.mlp_width in (None, 4 * config.width)
    if family == "opt":
        good &= options.norm_position == "pre" or not options.final_norm
    if not good:
        raise ConfigError(f"no config.json of {family!r} can express {config}")
    return family


def _differs_only_in(
    options: TransformerOptions, family: TransformerOptions, *free: str
) -> bool:
    """Returns whether options differ from a family's at most in the fields `free`."""
    # A checkpoint does not tell how parameters were drawn and trained.
    free = (*free, "init_scale", "scale_residual")
    free = (*free, "dropout", "attention_dropout", "block")
    return (
        dataclasses.replace(family, **{name: getattr(options, name) for name in free})
        == options
    )


def to_json(architecture: Architecture) -> dict[str, Any]:
    """Returns the content of a `config.json` for `transformers`."""
    config = architecture.config
    content = {"model_type": architecture.family, "vocab_size": architecture.vocabulary}
    if isinstance(config, BertConfig):
        return content | {
            "architectures": [_BERT_CLASSES[config.head]],
            **_sizes(config, architecture.context, "intermediate_size"),
            "hidden_act": "gelu",
            "layer_norm_eps": BERT.norm_eps,
            "type_vocab_size": 2,
        }
    options = config.options
    # Reversed, so that of two names the first, "gelu_new", is the one that remains.
    named = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
    content |= {"tie_word_embeddings": options.tied_head}
    if architecture.family == "gpt2":
        return content | {
            "architectures": ["GPT2LMHeadModel"],
            "n_layer": config.depth,
            "n_embd": config.width,
            "n_head": config.heads,
            "n_inner": config.mlp_width,
            "n_positions": architecture.context,
            "layer_norm_epsilon": options.norm_eps,
            "activation_function": named[options.mlp],
        }
    if architecture.family == "opt":
        return content | {
            "architectures": ["OPTForCausalLM"],
            **_sizes(config, architecture.context, "ffn_dim"),
            "activation_function": named[options.mlp],
            "do_layer_norm_before": options.norm_position == "pre",
            "_remove_final_layer_norm": not options.final_norm,
            "word_embed_proj_dim": options.embed_width or config.width,
        }
    if architecture.family == "bloom":
        return content | {
            "architectures": ["BloomForCausalLM"],
            "n_layer": config.depth,
            "hidden_size": config.width,
            "n_head": config.heads,
            "layer_norm_epsilon": options.norm_eps,
            "seq_length": architecture.context,
        }
    return content | {
        "architectures": ["LlamaForCausalLM"],
        **_sizes(config, architecture.context, "intermediate_size"),
        "num_key_value_heads": config.kv_heads or config.heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": options.norm_eps,
        **_rope_keys(options),
    }


def _sizes(
    config: CausalLmConfig | BertConfig, context: int, mlp_width: str
) -> dict[str, int]:
    """Returns the keys that OPT, LLaMA and BERT have in common."""
    return {
        "num_hidden_layers": config.depth,
        "hidden_size": config.width,
        "num_attention_heads": config.heads,
        mlp_width: config.mlp_width or 4 * config.width,
        "max_position_embeddings": context,
    }


def _rope_keys(options: TransformerOptions) -> dict[str, Any]:
    """Returns the keys of rotary embeddings that old and new versions both read."""
    scaling = options.rope_scaling
    if scaling is None:
        return {"rope_theta": options.rope_theta}
    return {
        "rope_theta": options.rope_theta,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": scaling.factor,
            "low_freq_factor": scaling.low,
            "high_freq_factor": scaling.high,
            "original_max_position_embeddings": scaling.context,
        },
    }
