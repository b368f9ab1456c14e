"""The names of parameters in checkpoints: one table for each family of models.

The tables serve both reading and writing. Below `blocks/` our parameters are stacked
over layers along axis 0, where checkpoints have a tensor for each layer `{i}`.
"""

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Name:
    """A parameter and the tensor in which checkpoints store it.

    Attributes:
      path: of the parameter in our tree.
      name: of the tensor, without the family's prefix; `{i}` stands for the layer.
      transposed: whether the tensor is `[outputs, inputs]`; ours is `[inputs,
        outputs]`.
      third: which third of the tensor's last axis the parameter is, if query, key and
        value are in one tensor; None for the whole tensor.
      by_head: whether that tensor has query, key and value of the first head, then of
        the second, and so on, instead of one third after the other.
      interleaved: whether the rows of a head are in the order of interleaved rotation.
    """

    path: str
    name: str
    transposed: bool = False
    third: int | None = None
    by_head: bool = False
    interleaved: bool = False


@dataclasses.dataclass(frozen=True)
class Family:
    """The names of one kind of checkpoint.

    Attributes:
      names: the table; entries for parameters that a model does not have are ignored.
      prefixes: what new files put before a name, in this order; old files may lack it.
      outside: beginnings of names without a prefix.
      harmless: patterns of tensors that may be ignored, because they hold masks,
        counters or copies of tied tables.
      renamed: `{ending in old files: ending in new files}`.
    """

    names: tuple[Name, ...]
    prefixes: tuple[str, ...] = ()
    outside: tuple[str, ...] = ()
    harmless: tuple[str, ...] = ()
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def canonical(self, name: str) -> str:
        """Returns a tensor's name in the table from its name in a file, old or new."""
        for prefix in self.prefixes:
            name = name.removeprefix(prefix)
        for old, new in self.renamed.items():
            if name.endswith(old):
                name = name.removesuffix(old) + new
        return name

    def full(self, name: str) -> str:
        """Returns a tensor's name in new files from its name in the table."""
        if name.startswith(self.outside):
            return name
        return "".join(self.prefixes) + name


def _dense(path: str, name: str, *, transposed: bool = True) -> tuple[Name, ...]:
    return (
        Name(f"{path}/kernel", f"{name}.weight", transposed),
        Name(f"{path}/bias", f"{name}.bias"),
    )


def _norm(path: str, name: str) -> tuple[Name, ...]:
    return Name(f"{path}/scale", f"{name}.weight"), Name(f"{path}/bias", f"{name}.bias")


def _table(path: str, name: str) -> tuple[Name, ...]:
    return (Name(f"{path}/table", f"{name}.weight"),)


def _fused(name: str, *, transposed: bool, by_head: bool) -> tuple[Name, ...]:
    """Returns the entries of query, key and value that share one tensor."""
    return tuple(
        dataclasses.replace(line, third=third, by_head=by_head)
        for third, part in enumerate(("query", "key", "value"))
        for line in _dense(f"blocks/attention/{part}", name, transposed=transposed)
    )


_HEAD = Name("head/kernel", "lm_head.weight", transposed=True)

# GPT-2's `Conv1D` stores [inputs, outputs] as we do, query, key and value side by side
# in one matrix. Its buffers `attn.bias` are causal masks, not biases.
GPT2 = Family(
    (
        *_table("embed", "wte"),
        *_table("position", "wpe"),
        *_fused("h.{i}.attn.c_attn", transposed=False, by_head=False),
        *_dense("blocks/attention/output", "h.{i}.attn.c_proj", transposed=False),
        *_norm("blocks/attention_norm", "h.{i}.ln_1"),
        *_dense("blocks/mlp/up", "h.{i}.mlp.c_fc", transposed=False),
        *_dense("blocks/mlp/down", "h.{i}.mlp.c_proj", transposed=False),
        *_norm("blocks/mlp_norm", "h.{i}.ln_2"),
        *_norm("final_norm", "ln_f"),
        _HEAD,
    ),
    prefixes=("transformer.",),
    outside=("lm_head.",),
    harmless=(r"h\.\d+\.attn\.(masked_)?bias", r"lm_head\.weight"),
)

# In a layer, `final_layer_norm` is the norm of the feed-forward part; outside of the
# layers it is the norm before the head.
OPT = Family(
    (
        *_table("embed", "embed_tokens"),
        *_table("position", "embed_positions"),
        *_dense("project_in", "project_in"),
        *_dense("project_out", "project_out"),
        *_dense("blocks/attention/query", "layers.{i}.self_attn.q_proj"),
        *_dense("blocks/attention/key", "layers.{i}.self_attn.k_proj"),
        *_dense("blocks/attention/value", "layers.{i}.self_attn.v_proj"),
        *_dense("blocks/attention/output", "layers.{i}.self_attn.out_proj"),
        *_norm("blocks/attention_norm", "layers.{i}.self_attn_layer_norm"),
        *_dense("blocks/mlp/up", "layers.{i}.fc1"),
        *_dense("blocks/mlp/down", "layers.{i}.fc2"),
        *_norm("blocks/mlp_norm", "layers.{i}.final_layer_norm"),
        *_norm("final_norm", "final_layer_norm"),
        _HEAD,
    ),
    prefixes=("model.", "decoder."),
    outside=("lm_head.",),
    harmless=(r"version", r"lm_head\.weight"),
)

# `query_key_value` is [outputs, inputs], its outputs [heads, 3, head_dim].
BLOOM = Family(
    (
        *_table("embed", "word_embeddings"),
        *_norm("embed_norm", "word_embeddings_layernorm"),
        *_fused("h.{i}.self_attention.query_key_value", transposed=True, by_head=True),
        *_dense("blocks/attention/output", "h.{i}.self_attention.dense"),
        *_norm("blocks/attention_norm", "h.{i}.input_layernorm"),
        *_dense("blocks/mlp/up", "h.{i}.mlp.dense_h_to_4h"),
        *_dense("blocks/mlp/down", "h.{i}.mlp.dense_4h_to_h"),
        *_norm("blocks/mlp_norm", "h.{i}.post_attention_layernorm"),
        *_norm("final_norm", "ln_f"),
        _HEAD,
    ),
    prefixes=("transformer.",),
    outside=("lm_head.",),
    harmless=(r"lm_head\.weight",),
)

LLAMA = Family(
    (
        *_table("embed", "embed_tokens"),
        *_dense("blocks/attention/query", "layers.{i}.self_attn.q_proj"),
        *_dense("blocks/attention/key", "layers.{i}.self_attn.k_proj"),
        *_dense("blocks/attention/value", "layers.{i}.self_attn.v_proj"),
        *_dense("blocks/attention/output", "layers.{i}.self_attn.o_proj"),
        *_norm("blocks/attention_norm", "layers.{i}.input_layernorm"),
        *_dense("blocks/mlp/gate", "layers.{i}.mlp.gate_proj"),
        *_dense("blocks/mlp/up", "layers.{i}.mlp.up_proj"),
        *_dense("blocks/mlp/down", "layers.{i}.mlp.down_proj"),
        *_norm("blocks/mlp_norm", "layers.{i}.post_attention_layernorm"),
        *_norm("final_norm", "norm"),
        _HEAD,
    ),
    prefixes=("model.",),
    outside=("lm_head.",),
    harmless=(r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq", r"lm_head\.weight"),
)

_SELF = "encoder.layer.{i}.attention"
BERT = Family(
    (
        *_table("embed", "embeddings.word_embeddings"),
        *_table("position", "embeddings.position_embeddings"),
        *_table("types", "embeddings.token_type_embeddings"),
        *_norm("embed_norm", "embeddings.LayerNorm"),
        *_dense("blocks/attention/query", f"{_SELF}.self.query"),
        *_dense("blocks/attention/key", f"{_SELF}.self.key"),
        *_dense("blocks/attention/value", f"{_SELF}.self.value"),
        *_dense("blocks/attention/output", f"{_SELF}.output.dense"),
        *_norm("blocks/attention_norm", f"{_SELF}.output.LayerNorm"),
        *_dense("blocks/mlp/up", "encoder.layer.{i}.intermediate.dense"),
        *_dense("blocks/mlp/down", "encoder.layer.{i}.output.dense"),
        *_norm("blocks/mlp_norm", "encoder.layer.{i}.output.LayerNorm"),
        *_dense("pooler", "pooler.dense"),
        *_dense("order", "cls.seq_relationship"),
        *_dense("transform", "cls.predictions.transform.dense"),
        *_norm("transform_norm", "cls.predictions.transform.LayerNorm"),
        Name("decoder_bias", "cls.predictions.bias"),
    ),
    prefixes=("bert.",),
    outside=("cls.",),
    harmless=(r"embeddings\.position_ids", r"cls\.predictions\.decoder\.(weight|bias)"),
    renamed={"LayerNorm.gamma": "LayerNorm.weight", "LayerNorm.beta": "LayerNorm.bias"},
)

FAMILIES: Mapping[str, Family] = {
    "gpt2": GPT2,
    "opt": OPT,
    "bloom": BLOOM,
    "llama": LLAMA,
    "bert": BERT,
}

# llama.cpp rotates neighbouring pairs of features: its converter has permuted the rows
# of the query and key matrices, which `interleaved` undoes.
GGUF_LLAMA = Family(
    (
        *_table("embed", "token_embd"),
        Name(
            "blocks/attention/query/kernel",
            "blk.{i}.attn_q.weight",
            transposed=True,
            interleaved=True,
        ),
        Name(
            "blocks/attention/key/kernel",
            "blk.{i}.attn_k.weight",
            transposed=True,
            interleaved=True,
        ),
        *_dense("blocks/attention/value", "blk.{i}.attn_v"),
        *_dense("blocks/attention/output", "blk.{i}.attn_output"),
        *_norm("blocks/attention_norm", "blk.{i}.attn_norm"),
        *_dense("blocks/mlp/gate", "blk.{i}.ffn_gate"),
        *_dense("blocks/mlp/up", "blk.{i}.ffn_up"),
        *_dense("blocks/mlp/down", "blk.{i}.ffn_down"),
        *_norm("blocks/mlp_norm", "blk.{i}.ffn_norm"),
        *_norm("final_norm", "output_norm"),
        *_dense("head", "output"),
    ),
)
