"""Configs of transformers; importing this module imports no JAX."""

import dataclasses
from collections.abc import Mapping
from typing import ClassVar, Literal

from hpcjax.core import checks
from hpcjax.core.config import Config, Decay, NotNegative, Positive, Seed, Share, Size
from hpcjax.core.objective import Numbers, Objective
from hpcjax.models.model_config import ModelConfig


def check_heads(width: int, heads: int) -> None:
    """Raises ConfigError for heads that do not divide the width."""
    rule = "heads must divide width"
    checks.require(width % heads == 0, rule, heads=heads, width=width)


@dataclasses.dataclass(frozen=True, kw_only=True)
class RopeScaling(Config):
    """LLaMA 3's scaling of rotary embeddings to longer contexts.

    A frequency with wavelength 2π / frequency is multiplied by (1 − s) / factor + s,
    with s = (context / wavelength − low) / (high − low), clipped to [0, 1].

    Attributes:
      factor: what the lowest frequencies are divided by.
      low: frequencies with wavelengths of at least context / low are divided by
        `factor`.
      high: frequencies with wavelengths of at most context / high are unchanged.
      context: the context length with which the model was trained before.
    """

    factor: Positive = 8.0
    low: Positive = 1.0
    high: float = 4.0
    context: Size = 8192

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "rope scaling needs high > low"
        checks.require(self.high > self.low, rule, low=self.low, high=self.high)


@dataclasses.dataclass(frozen=True, kw_only=True)
class ExpertsConfig(Config):
    """A mixture of experts as feed-forward part, see `layers.experts`.

    Attributes:
      count: number of experts.
      top_k: number of experts that a token passes through, 1 or 2.
      capacity_factor: capacity of each expert, as a multiple of an even share of the
        tokens in a pass. Tokens beyond it are dropped, so that outputs depend on the
        other tokens of the pass, also on later ones. None drops no token.
      priority: which choices are served first where tokens are dropped: "position" in
        the order of tokens, "probability" the most probable, "random" in an order that
        is drawn in each training step (evaluation takes that of tokens).
      every: the last of so many blocks has experts, the others are dense; divides the
        depth.
      balance_weight: weight of each block's load-balancing loss in the objective.
      router_z_weight: weight of each block's router z-loss in the objective.
    """

    count: Size = 8
    top_k: Literal[1, 2] = 2
    capacity_factor: Positive | None = None
    priority: Literal["position", "probability", "random"] = "position"
    every: Size = 1
    balance_weight: NotNegative = 0.01
    router_z_weight: NotNegative = 0.0

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "top_k must be at most count"
        checks.require(
            self.top_k <= self.count, rule, top_k=self.top_k, count=self.count
        )


@dataclasses.dataclass(frozen=True, kw_only=True)
class SparseAttentionConfig(Config):
    """Attention to a random pattern of keys, see `layers.sparse_attention`.

    The pattern is that of `layers.random_pattern`, the same in all heads and blocks.
    Sequences must be multiples of `vector`, and all keys real; decoding with a cache is
    refused, and so are fewer key heads than query heads.

    Attributes:
      zeros: share of the pairs of query and key that are left out.
      vector: V, queries with the same keys.
      seed: of the pattern.
      bits: "float", or x-y for probabilities in x bits and queries, keys and values in
        y, which have no gradient: for evaluation of what was trained in floats.
      scales: of the integers, "calibrated" or "published".
    """

    zeros: Share = 0.9
    vector: Literal[2, 4, 8] = 8
    seed: Seed = 0
    bits: Literal["float", "16-8", "8-8", "8-4", "4-4"] = "float"
    scales: Literal["calibrated", "published"] = "calibrated"


@dataclasses.dataclass(frozen=True, kw_only=True)
class TransformerOptions(Config):
    """What distinguishes families of transformers; the defaults are GPT-2's.

    Attributes:
      norm: "layer" for LayerNorm, "rms" for RMSNorm without bias.
      norm_position: "pre" normalises the input of each residual branch, "post" the sum
        of branch and input.
      norm_eps: added to the variance.
      final_norm: whether a norm follows the last block.
      position: "learned" for a table, "offset" for one in which position p has row p +
        2 (OPT), "rope" for rotary embeddings, "alibi" for scores that fall linearly
        with the distance of a key, by a slope for each head (BLOOM).
      embed_norm: whether a norm follows the embedding table.
      rope_theta: base of the rotary embeddings' wavelengths.
      rope_scaling: LLaMA 3's scaling of these; None for no scaling.
      rope_divisors: what each of a head's frequencies is divided by, as GGUF files tell
        it in place of a scaling; none for nothing.
      mlp: activation of the feed-forward part; "silu_gated" has a third matrix.
      experts: a mixture of experts, each of them like `mlp`; None for no experts.
      sparse: attention to a pattern of keys; None for attention to all.
      use_bias: whether the blocks' matrices have biases.
      tied_head: whether logits are formed with the embedding table.
      embed_width: width of the embedding table, as in OPT-350M, from which matrices
        without bias project to the blocks' width and back; None for the blocks' width.
      init_scale: standard deviation of matrices and tables at the start.
      scale_residual: whether matrices that end a residual branch start smaller by
        √(2 depth).
      dropout: probability with which a training pass drops a number that the attention
        or the feed-forward part puts out.
      attention_dropout: likewise, of the attention's weights.
      block: "plain", or "fused" with one operation for all that stands between two
        products, see `models.fused`: of post-norm blocks with biases and LayerNorm.
    """

    norm: Literal["layer", "rms"] = "layer"
    norm_position: Literal["pre", "post"] = "pre"
    norm_eps: Positive = 1e-5
    final_norm: bool = True
    position: Literal["learned", "offset", "rope", "alibi"] = "learned"
    embed_norm: bool = False
    rope_theta: Positive = 1e4
    rope_scaling: RopeScaling | None = None
    rope_divisors: tuple[float, ...] = ()
    mlp: Literal["gelu_tanh", "gelu_erf", "relu", "silu_gated"] = "gelu_tanh"
    experts: ExpertsConfig | None = None
    sparse: SparseAttentionConfig | None = None
    use_bias: bool = True
    tied_head: bool = True
    embed_width: Size | None = None
    init_scale: Positive = 0.02
    scale_residual: bool = True
    dropout: Decay = 0.0
    attention_dropout: Decay = 0.0
    block: Literal["plain", "fused"] = "plain"

    def __post_init__(self) -> None:
        super().__post_init__()
        good = self.sparse is None or not self.attention_dropout
        rule = "sparse attention drops no weights"
        checks.require(good, rule, attention_dropout=self.attention_dropout)
        if self.block == "plain":
            return
        wanted = {"norm_position": "post", "norm": "layer", "use_bias": True}
        wanted |= {"experts": None, "sparse": None}
        found = {name: getattr(self, name) for name in wanted}
        good = found == wanted and self.mlp != "silu_gated" and self.position != "alibi"
        rule = (
            "block=fused takes norm_position=post, norm=layer and biases, an mlp that "
            "is not gated, and no experts, alibi or sparse attention"
        )
        found |= {"mlp": self.mlp, "position": self.position}
        checks.require(good, rule, **found)

    @property
    def has_table(self) -> bool:
        """Whether positions have a table, and sequences a longest length."""
        return self.position in ("learned", "offset")


GPT2 = TransformerOptions()
OPT = TransformerOptions(position="offset", mlp="relu", scale_residual=False)
BLOOM = TransformerOptions(position="alibi", embed_norm=True, scale_residual=False)
LLAMA = TransformerOptions(
    norm="rms",
    position="rope",
    mlp="silu_gated",
    use_bias=False,
    tied_head=False,
    scale_residual=False,
)
BERT = TransformerOptions(
    norm_position="post",
    norm_eps=1e-12,
    final_norm=False,
    mlp="gelu_erf",
    scale_residual=False,
)


@dataclasses.dataclass(frozen=True, kw_only=True)
class CausalLmConfig(ModelConfig):
    """A decoder-only language model, see `models.causal_lm`.

    Attributes:
      depth: number of blocks.
      width: features of a token.
      heads: query heads.
      kv_heads: key and value heads; None means as many as query heads.
      head_dim: features of a head; None means width / heads, which must divide. Models
        with pruned heads need it.
      mlp_width: features inside the feed-forward part; None means 4 · width.
      options: the differences between GPT-2, OPT, BLOOM and LLaMA.
      remat: what the backward pass recomputes: "none" nothing; "full" all but the
        inputs of blocks; "dots" all but these and matrix products without batch axes;
        "offload" like "full", with the inputs of blocks kept in the host's memory;
        "collectives" like "full", with what a block's devices receive from each other
        kept, so that nothing is sent again.
      attention: the implementation; "auto" takes cuDNN's on a GPU in half precision.
      pieces: parts of a device's batch on which each block works in turn, so that one
        may be computed while another is summed over devices, see `sharding.tensor3d`.
      loss_chunk: the loss computes logits for chunks of so many positions; None for all
        positions at once.
      batch_axis: mesh axis over which batches are split, under `jit` and inside
        `jax.set_mesh`. Activations between blocks are constrained to that sharding, so
        that where parameters are split over the same axis the compiler gathers these,
        not the activations. None lets the compiler choose.
    """

    factory: ClassVar[str] = "hpcjax.models.transformer:causal_lm"
    stacks: ClassVar[tuple[str, ...]] = ("^blocks/",)
    smoke: ClassVar[Mapping[str, str]] = {"width": "8"}

    depth: Size = 2
    width: Size = 64
    heads: Size = 4
    kv_heads: Size | None = None
    head_dim: Size | None = None
    mlp_width: Size | None = None
    options: TransformerOptions = TransformerOptions()
    remat: Literal["none", "full", "dots", "offload", "collectives"] = "none"
    attention: Literal["auto", "reference", "xla", "cudnn"] = "auto"
    loss_chunk: Size | None = None
    pieces: Size = 1
    batch_axis: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.head_dim is None:
            check_heads(self.width, self.heads)
        rule = "options.experts.every must divide depth"
        checks.require(
            self.depth % self.group == 0, rule, depth=self.depth, every=self.group
        )
        whole = self.pieces == 1 or self.options.experts is None
        rule = "experts are balanced over all tokens, and not in pieces"
        checks.require(whole, rule, pieces=self.pieces)
        shared = self.heads % (self.kv_heads or self.heads) == 0
        rule = "kv_heads must divide heads"
        checks.require(shared, rule, kv_heads=self.kv_heads, heads=self.heads)
        checks.require(
            self.options.position != "rope" or self.head_size % 2 == 0,
            "rope needs an even number of features a head",
            width=self.width,
            heads=self.heads,
            head_dim=self.head_dim,
        )
        checks.require(
            self.options.position != "alibi"
            or self.head_size * self.heads == self.width,
            "alibi has a slope for each of width / head_dim heads, and none may miss",
            width=self.width,
            heads=self.heads,
            head_dim=self.head_dim,
        )
        checks.require(
            self.options.sparse is None
            or (
                self.options.position != "alibi"
                and self.kv_heads in (None, self.heads)
                and self.attention == "auto"
            ),
            "sparse attention has a key head for each head, no linear biases, and an "
            "implementation of its own",
            kv_heads=self.kv_heads,
            heads=self.heads,
            position=self.options.position,
            attention=self.attention,
        )

        checks.require(
            self.options.block == "plain"
            or (
                self.kv_heads in (None, self.heads)
                and self.attention in ("auto", "reference")
            ),
            "block=fused has a key head for each head, and attention of its own",
            kv_heads=self.kv_heads,
            heads=self.heads,
            attention=self.attention,
        )

    @property
    def head_size(self) -> int:
        """Features of a head."""
        return self.head_dim or self.width // self.heads

    @property
    def group(self) -> int:
        """How many blocks follow each other of which one has experts."""
        return self.options.experts.every if self.options.experts else 1

    @classmethod
    def takes(cls, objective: Objective) -> bool:
        """Says whether it is of numbers for each token."""
        return (objective.inputs, objective.outputs) == (
            Numbers(rank=1, tokens=True),
            Numbers(rank=2),
        )
