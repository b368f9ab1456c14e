"""Our configs from the descriptions in checkpoints, and back; loads no JAX."""

import dataclasses
from collections.abc import Collection, Mapping
from typing import Any, Literal, NamedTuple

import numpy as np

from hpcjax.core.errors import ConfigError, DataFormatError, UnsupportedOp, nearest
from hpcjax.models.config import (
    BERT,
    GPT2,
    LLAMA,
    OPT,
    BertConfig,
    CausalLmConfig,
    RopeScaling,
    TransformerOptions,
)

FamilyName = Literal["gpt2", "opt", "llama", "bert"]

# No size of a model is larger: what says so is damaged.
MOST = 2**31 - 1
_ACTIVATIONS: dict[str, Any] = {
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu": "gelu_erf",
    "relu": "relu",
}
_OPTIONS = {"gpt2": GPT2, "opt": OPT, "llama": LLAMA}
_BERT_CLASSES = {
    "pretraining": "BertForPreTraining",
    "masked_lm": "BertForMaskedLM",
    "pooler": "BertModel",
    "none": "BertModel",
}


class Architecture(NamedTuple):
    """What a checkpoint holds.

    Attributes:
      family: whose names its tensors have.
      config: the model.
      context: rows of the position table, or the longest sequence it was trained for.
      vocabulary: words it knows.
    """

    family: FamilyName
    config: CausalLmConfig | BertConfig
    context: int
    vocabulary: int


class Description:
    """A description by keys, whose errors name the file and the key."""

    def __init__(self, source: str, content: Mapping[str, Any]) -> None:
        self.source, self.content = source, content

    def size(self, key: str, default: int | None = None) -> int:
        """Returns a whole number from 1 to `MOST`."""
        value = self._get(key, default)
        whole = isinstance(value, int) and not isinstance(value, bool)
        if not (whole and 1 <= value <= MOST):
            raise self._wrong(key, f"a whole number from 1 to {MOST}", value)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        """Returns a number."""
        value = self._get(key, default)
        if not isinstance(value, int | float) or isinstance(value, bool):
            raise self._wrong(key, "a number", value)
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        """Returns true or false."""
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

    def only(self, key: str, *allowed: Any) -> None:
        """Raises UnsupportedOp for a value that our models do not implement."""
        value = self.content.get(key, allowed[0])
        if value not in allowed:
            raise UnsupportedOp(
                f"{self.source}: only {key}={' or '.join(map(repr, allowed))} is "
                f"implemented: got {value!r}"
            )

    def activation(self, key: str, default: str) -> Any:
        """Returns our name of an activation."""
        value = self.content.get(key, default)
        self.only(key, default, *_ACTIVATIONS)
        return _ACTIVATIONS[value]

    def _get(self, key: str, default: Any) -> Any:
        value = self.content.get(key)
        return default if value is None else value

    def _wrong(self, key: str, wanted: str, found: Any) -> DataFormatError:
        return DataFormatError(
            f"{self.source}: expected {wanted} as {key!r}, found {found!r}"
        )


def from_json(
    content: Mapping[str, Any], names: Collection[str], source: str
) -> Architecture:
    """Returns what a `config.json` describes.

    Args:
      content: the file.
      names: the checkpoint's tensors; they tell which heads a BERT has.
      source: the file's name, for errors.

    Raises:
      UnsupportedOp: an unknown architecture, or an option that is not implemented.
      DataFormatError: a key is absent or has a value of another type.
      ConfigError: sizes that do not divide.
    """
    given = Description(source, content)
    given.part("quantization_config").only("quant_method", "gptq")
    family = content.get("model_type")
    if not isinstance(family, str) or family not in _READERS:
        raise UnsupportedOp(
            f"{source}: unknown architecture {family!r}{nearest(str(family), _READERS)}"
        )
    return _READERS[family](given, names)


def _gpt2(given: Description, _: Collection[str]) -> Architecture:
    given.only("scale_attn_weights", True)
    given.only("scale_attn_by_inverse_layer_idx", False)
    given.only("add_cross_attention", False)
    width = given.size("n_embd")
    options = dataclasses.replace(
        GPT2,
        norm_eps=given.number("layer_norm_epsilon", 1e-5),
        mlp=given.activation("activation_function", "gelu_new"),
        tied_head=given.flag("tie_word_embeddings", True),
    )
    config = CausalLmConfig(
        depth=given.size("n_layer"),
        width=width,
        heads=given.size("n_head"),
        mlp_width=given.size("n_inner", 4 * width),
        options=options,
    )
    context = given.size("n_positions", given.content.get("n_ctx"))
    return Architecture("gpt2", config, context, given.size("vocab_size"))


def _opt(given: Description, _: Collection[str]) -> Architecture:
    given.only("enable_bias", True)
    given.only("layer_norm_elementwise_affine", True)
    width, before = given.size("hidden_size"), given.flag("do_layer_norm_before", True)
    narrow = given.size("word_embed_proj_dim", width)
    options = dataclasses.replace(
        OPT,
        norm_position="pre" if before else "post",
        final_norm=before and not given.flag("_remove_final_layer_norm", False),
        mlp=given.activation("activation_function", "relu"),
        embed_width=None if narrow == width else narrow,
        tied_head=given.flag("tie_word_embeddings", True),
    )
    config = CausalLmConfig(
        depth=given.size("num_hidden_layers"),
        width=width,
        heads=given.size("num_attention_heads"),
        mlp_width=given.size("ffn_dim"),
        options=options,
    )
    context = given.size("max_position_embeddings")
    return Architecture("opt", config, context, given.size("vocab_size"))


def _llama(given: Description, _: Collection[str]) -> Architecture:
    given.only("hidden_act", "silu")
    given.only("attention_bias", False)
    given.only("mlp_bias", False)
    width, heads = given.size("hidden_size"), given.size("num_attention_heads")
    head_dim = None
    if given.content.get("head_dim") is not None:
        head_dim = given.size("head_dim")
        head_dim = None if head_dim * heads == width else head_dim
    theta, scaling = _rope(given)
    options = dataclasses.replace(
        LLAMA,
        norm_eps=given.number("rms_norm_eps", 1e-6),
        rope_theta=theta,
        rope_scaling=scaling,
        tied_head=given.flag("tie_word_embeddings", False),
    )
    kv_heads = given.size("num_key_value_heads", heads)
    config = CausalLmConfig(
        depth=given.size("num_hidden_layers"),
        width=width,
        heads=heads,
        kv_heads=None if kv_heads == heads else kv_heads,
        head_dim=head_dim,
        mlp_width=given.size("intermediate_size"),
        options=options,
    )
    context = given.size("max_position_embeddings")
    return Architecture("llama", config, context, given.size("vocab_size"))


def _rope(given: Description) -> tuple[float, RopeScaling | None]:
    """Returns base and scaling, from new files and from old ones."""
    new = given.part("rope_parameters")
    scaling = new if new.content else given.part("rope_scaling")
    scaling.only("partial_rotary_factor", 1.0)
    theta = new.number("rope_theta", given.number("rope_theta", 1e4))
    key = "rope_type" if "rope_type" in scaling.content else "type"
    scaling.only(key, "default", "llama3")
    if scaling.content.get(key, "default") == "default":
        scaling.only("factor", 1.0, None)
        return theta, None
    return theta, RopeScaling(
        factor=scaling.number("factor"),
        low=scaling.number("low_freq_factor"),
        high=scaling.number("high_freq_factor"),
        context=scaling.size("original_max_position_embeddings"),
    )


def _bert(given: Description, names: Collection[str]) -> Architecture:
    given.only("hidden_act", "gelu")
    given.only("type_vocab_size", 2)
    given.only("layer_norm_eps", BERT.norm_eps)
    given.only("position_embedding_type", "absolute", None)
    given.only("is_decoder", False)
    given.only("tie_word_embeddings", True)

    def has(part: str) -> bool:
        return any(name.removeprefix("bert.").startswith(part) for name in names)

    without = "pooler" if has("pooler.") else "none"
    words = "pretraining" if has("cls.seq_relationship.") else "masked_lm"
    config = BertConfig(
        depth=given.size("num_hidden_layers"),
        width=given.size("hidden_size"),
        heads=given.size("num_attention_heads"),
        mlp_width=given.size("intermediate_size"),
        head=words if has("cls.") else without,
    )
    context = given.size("max_position_embeddings")
    return Architecture("bert", config, context, given.size("vocab_size"))


_READERS = {"gpt2": _gpt2, "opt": _opt, "llama": _llama, "bert": _bert}


def from_gguf(
    metadata: Mapping[str, Any], shapes: Mapping[str, tuple[int, ...]], source: str
) -> Architecture:
    """Returns what the metadata of a GGUF file describe; only llama's kind is known.

    Args:
      metadata: the keys.
      shapes: of the tensors; the table gives the vocabulary, and without a tensor
        "output.weight" the head is tied to it.
      source: the file's name, for errors.

    Raises:
      UnsupportedOp: another architecture, or an option that is not implemented.
      DataFormatError: a key is absent or has a value of another type.
      ConfigError: sizes that do not divide.
    """
    given = Description(source, metadata)
    given.only("general.architecture", "llama")
    given.only("llama.rope.scaling.type", "none", "", None)
    # Without a type, a factor is that of linear scaling.
    for key in ("scaling.factor", "scale_linear", "scaling.attn_factor"):
        given.only(f"llama.rope.{key}", 1.0, 0.0, None)
    given.only("llama.expert_count", 0, None)
    width = given.size("llama.embedding_length")
    heads = given.size("llama.attention.head_count")
    given.only("llama.rope.dimension_count", width // heads)
    options = dataclasses.replace(
        LLAMA,
        norm_eps=_decimal(given.number("llama.attention.layer_norm_rms_epsilon")),
        rope_theta=_decimal(given.number("llama.rope.freq_base", 1e4)),
        tied_head="output.weight" not in shapes,
    )
    kv_heads = given.size("llama.attention.head_count_kv", heads)
    config = CausalLmConfig(
        depth=given.size("llama.block_count"),
        width=width,
        heads=heads,
        kv_heads=None if kv_heads == heads else kv_heads,
        mlp_width=given.size("llama.feed_forward_length"),
        options=options,
    )
    if "token_embd.weight" not in shapes:
        raise DataFormatError(f"{source}: no tensor 'token_embd.weight'")
    context = given.size("llama.context_length")
    return Architecture("llama", config, context, shapes["token_embd.weight"][0])


def _decimal(value: float) -> float:
    """Returns 1e-5 for the float32 next to it, which is what GGUF can hold."""
    return float(str(np.float32(value)))


def family_of(config: CausalLmConfig | BertConfig) -> FamilyName:
    """Returns the family that can express a config.

    Raises:
      ConfigError: none can.
    """
    if isinstance(config, BertConfig):
        return "bert"
    options = config.options
    families: dict[str, FamilyName] = {
        "learned": "gpt2",
        "offset": "opt",
        "rope": "llama",
    }
    family = families[options.position]
    # Those fields that the family's config.json can express.
    free = {
        "gpt2": ("norm_eps", "mlp", "tied_head"),
        "opt": ("norm_position", "final_norm", "mlp", "tied_head", "embed_width"),
        "llama": ("norm_eps", "rope_theta", "rope_scaling", "tied_head"),
    }
    good = _like(options, _OPTIONS[family], *free[family])
    if family != "llama":
        grouped = config.kv_heads not in (None, config.heads)
        good &= options.mlp != "silu_gated" and not grouped
        good &= config.head_dim in (None, config.width // config.heads)
    if family == "opt":
        good &= options.norm_position == "pre" or not options.final_norm
    if not good:
        raise ConfigError(f"no config.json of {family!r} can express {config}")
    return family


def _like(options: TransformerOptions, family: TransformerOptions, *free: str) -> bool:
    """Says whether options differ from a family's in the fields `free` at most."""
    # How parameters are first drawn is no matter of a checkpoint.
    kept = (*free, "init_scale", "scale_residual")
    return (
        dataclasses.replace(family, **{name: getattr(options, name) for name in kept})
        == options
    )


def to_json(found: Architecture) -> dict[str, Any]:
    """Returns a `config.json` that describes a model, as `transformers` reads it."""
    config = found.config
    content = {"model_type": found.family, "vocab_size": found.vocabulary}
    if isinstance(config, BertConfig):
        return content | {
            "architectures": [_BERT_CLASSES[config.head]],
            **_sizes(config, found.context, "intermediate_size"),
            "hidden_act": "gelu",
            "layer_norm_eps": BERT.norm_eps,
            "type_vocab_size": 2,
        }
    options = config.options
    named = {ours: theirs for theirs, ours in reversed(_ACTIVATIONS.items())}
    content |= {"tie_word_embeddings": options.tied_head}
    if found.family == "gpt2":
        return content | {
            "architectures": ["GPT2LMHeadModel"],
            "n_layer": config.depth,
            "n_embd": config.width,
            "n_head": config.heads,
            "n_inner": config.mlp_width,
            "n_positions": found.context,
            "layer_norm_epsilon": options.norm_eps,
            "activation_function": named[options.mlp],
        }
    if found.family == "opt":
        return content | {
            "architectures": ["OPTForCausalLM"],
            **_sizes(config, found.context, "ffn_dim"),
            "activation_function": named[options.mlp],
            "do_layer_norm_before": options.norm_position == "pre",
            "_remove_final_layer_norm": not options.final_norm,
            "word_embed_proj_dim": options.embed_width or config.width,
        }
    return content | {
        "architectures": ["LlamaForCausalLM"],
        **_sizes(config, found.context, "intermediate_size"),
        "num_key_value_heads": config.kv_heads or config.heads,
        "head_dim": config.head_size,
        "hidden_act": "silu",
        "rms_norm_eps": options.norm_eps,
        **_rope_keys(options),
    }


def _sizes(
    config: CausalLmConfig | BertConfig, context: int, mlp_width: str
) -> dict[str, int]:
    return {
        "num_hidden_layers": config.depth,
        "hidden_size": config.width,
        "num_attention_heads": config.heads,
        mlp_width: config.mlp_width or 4 * config.width,
        "max_position_embeddings": context,
    }


def _rope_keys(options: TransformerOptions) -> dict[str, Any]:
    """Returns the keys that old and new versions read."""
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
