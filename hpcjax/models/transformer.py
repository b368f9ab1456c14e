"""The transformer block, causal or not, and the decoder-only language model."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from hpcjax import layers
from hpcjax.core import errors, shards
from hpcjax.core.dtypes import Policy
from hpcjax.core.model import Decoder, Model
from hpcjax.layers import Implementation
from hpcjax.models._from_nnx import from_nnx
from hpcjax.models.bert_config import BertConfig
from hpcjax.models.chunked import ChunkedLogits
from hpcjax.models.decoding import Cache, Decoding, Heads
from hpcjax.models.experts import ExpertsFeedForward
from hpcjax.models.modules import FLOAT32, ONES, ZEROS, Dense, Initializer, param
from hpcjax.models.scan import scan_blocks, scan_with_memory, stack
from hpcjax.models.split_logits import SplitLogits
from hpcjax.models.transformer_config import (
    CausalLmConfig,
    RopeScaling,
    TransformerOptions,
)

Mix = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
# OPT's position tables have two unused rows at the beginning.
OFFSET = 2


class Sizes:
    """Widths of a block, and the initializers that follow from them."""

    def __init__(
        self,
        config: CausalLmConfig | BertConfig,
        options: TransformerOptions,
        policy: Policy,
        *,
        causal: bool,
        kv_heads: int | None = None,
        head_dim: int | None = None,
        attention: Implementation = "auto",
    ):
        self.width, self.heads = config.width, config.heads
        self.kv_heads = kv_heads or config.heads
        self.head_dim = head_dim or config.width // config.heads
        self.mlp_width = config.mlp_width or 4 * config.width
        self.options, self.policy, self.causal = options, policy, causal
        self.attention: Implementation = attention
        scale = self.options.init_scale
        self.inner: Initializer = nnx.initializers.normal(scale)
        # The residual stream sums 2 · depth branches; so scaled they add up to variance
        # scale², whatever the depth (GPT-2, §2.3).
        residual = scale / math.sqrt(2 * config.depth)
        self.residual: Initializer = (
            nnx.initializers.normal(residual)
            if self.options.scale_residual
            else self.inner
        )

    @classmethod
    def of_causal_lm(cls, config: CausalLmConfig, policy: Policy) -> "Sizes":
        """Returns the sizes of a decoder-only model's block."""
        return cls(
            config,
            config.options,
            policy,
            causal=True,
            kv_heads=config.kv_heads,
            head_dim=config.head_dim,
            attention=config.attention,
        )

    def dense(self, inputs: int, outputs: int, *, residual: bool = False) -> Dense:
        """Declares one of the block's matrices."""
        return Dense(
            inputs,
            outputs,
            policy=self.policy,
            use_bias=self.options.use_bias,
            initializer=self.residual if residual else self.inner,
        )


class Norm(nnx.Module):
    """LayerNorm (`scale`, `bias`) or RMSNorm (`scale`), as the options say."""

    def __init__(self, width: int, options: TransformerOptions, policy: Policy):
        """Declares the parameters for `width` features."""
        self.scale = param((width,), ONES, policy.param)
        layer = options.norm == "layer"
        self.bias = param((width,), ZEROS, policy.param) if layer else None
        self.eps = options.norm_eps

    def __call__(self, x: jax.Array) -> jax.Array:
        """Normalises `[..., width]`."""
        if self.bias is None:
            return layers.rms_norm(x, self.scale.get_value(), eps=self.eps)
        scale, bias = self.scale.get_value(), self.bias.get_value()
        return layers.layer_norm(x, scale, bias, eps=self.eps)


class Embedding(nnx.Module):
    """A table of vectors; parameter `table` [rows, width]."""

    def __init__(self, rows: int, width: int, *, init_scale: float, policy: Policy):
        """Declares the table, drawn from N(0, init_scale²)."""
        self.table = param(
            (rows, width), nnx.initializers.normal(init_scale), policy.param
        )
        self.compute = policy.compute

    def __call__(self, indices: jax.Array) -> jax.Array:
        """Maps indices `[...]` to `[..., width]`."""
        return layers.embedding(self.table.get_value(), indices, compute=self.compute)


class Attention(nnx.Module):
    """Self-attention, causal or not: `query`, `key`, `value`, `output`."""

    def __init__(self, sizes: Sizes):
        """Declares the four projections."""
        inner, outer = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.query = sizes.dense(sizes.width, inner)
        self.key = sizes.dense(sizes.width, outer)
        self.value = sizes.dense(sizes.width, outer)
        self.output = sizes.dense(inner, sizes.width, residual=True)
        self.head_dim, self.causal = sizes.head_dim, sizes.causal
        self.implementation = sizes.attention
        self.rotates = sizes.options.position == "rope"
        self.heads, self.falls = sizes.heads, sizes.options.position == "alibi"
        self.theta = sizes.options.rope_theta
        self.scaling = sizes.options.rope_scaling

    @property
    def slopes(self) -> jax.Array | None:
        """How much each own head's scores fall with a key's distance, if they do."""
        if not self.falls:
            return None
        _, axes = shards.open_part(self.query.kernel.get_value(), -1)
        own = tuple((-1, axis) for axis in axes)
        return shards.take_part(layers.alibi_slopes(self.heads), own)

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        mask: jax.Array | None = None,
        mix: Mix | None = None,
    ) -> jax.Array:
        """Maps `[batch, time, width]` to the same shape; arguments as `mix_values`."""
        return self.output(self.mix_values(x, positions, mask, mix))

    def mix_values(
        self,
        x: jax.Array,
        positions: jax.Array,
        mask: jax.Array | None = None,
        mix: Mix | None = None,
    ) -> jax.Array:
        """Returns the inputs of the output projection, `[batch, time, inner]`.

        Args:
          x: inputs.
          positions: of the tokens in their sequence, `[batch, time]`.
          mask: see `layers.attention`.
          mix: `(query, key, value) -> mixed` in place of attention within `x`, such as
            attention to a cache.
        """
        x = share_inputs(x, self.query, self.key, self.value)
        split = (*x.shape[:2], -1, self.head_dim)
        query = self.query(x).reshape(split)
        key = self.key(x).reshape(split)
        value = self.value(x).reshape(split)
        if self.rotates:
            turns = rope_frequencies(self.head_dim, self.theta, self.scaling)
            rope = functools.partial(layers.rope, frequencies=turns)
            query, key = rope(query, positions), rope(key, positions)
        if mix is None:
            mix = functools.partial(
                layers.attention,
                causal=self.causal,
                mask=mask,
                slopes=self.slopes,
                implementation=self.implementation,
            )
        return mix(query, key, value).reshape(*x.shape[:2], -1)


class FeedForward(nnx.Module):
    """down(f(up(x))), or if gated down(silu(gate(x)) · up(x))."""

    def __init__(self, sizes: Sizes):
        """Declares `up`, `down` and, if gated, `gate`."""
        self.gated = sizes.options.mlp == "silu_gated"
        self.activation = "silu" if self.gated else sizes.options.mlp
        self.up = sizes.dense(sizes.width, sizes.mlp_width)
        self.down = sizes.dense(sizes.mlp_width, sizes.width, residual=True)
        if self.gated:
            self.gate = sizes.dense(sizes.width, sizes.mlp_width)

    def __call__(self, x: jax.Array) -> jax.Array:
        """Maps `[..., width]` to the same shape."""
        if not self.gated:
            return self.down(layers.activation(self.activation, self.up(x)))
        x = share_inputs(x, self.gate, self.up)
        return self.down(layers.activation(self.activation, self.gate(x)) * self.up(x))


def share_inputs(x: jax.Array, *several: Dense) -> jax.Array:
    """Returns x as several layers take it, see `layers.share_inputs`."""
    return layers.share_inputs(x, [layer.kernel.get_value() for layer in several])


def feed_forward(sizes: Sizes) -> FeedForward | ExpertsFeedForward:
    """Returns a block's feed-forward part, a mixture of experts if there are any."""
    if sizes.options.experts is None:
        return FeedForward(sizes)
    return ExpertsFeedForward(
        sizes.width,
        sizes.mlp_width,
        sizes.options,
        sizes.policy,
        sizes.inner,
        sizes.residual,
    )


class Block(nnx.Module):
    """Attention and feed-forward part, with residuals and pre- or post-norm."""

    def __init__(self, sizes: Sizes):
        """Declares the parts."""
        self.attention = Attention(sizes)
        self.attention_norm = Norm(sizes.width, sizes.options, sizes.policy)
        self.mlp = feed_forward(sizes)
        self.mlp_norm = Norm(sizes.width, sizes.options, sizes.policy)
        self.pre = sizes.options.norm_position == "pre"

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        mask: jax.Array | None = None,
        mix: Mix | None = None,
    ) -> jax.Array:
        """Maps `[batch, time, width]` to the same shape; arguments as `Attention`."""
        if self.pre:
            x = x + self.attention(self.attention_norm(x), positions, mask, mix)
            return x + self.mlp(self.mlp_norm(x))
        x = self.attention_norm(x + self.attention(x, positions, mask, mix))
        return self.mlp_norm(x + self.mlp(x))


def rope_frequencies(
    head_dim: int, theta: float, scaling: RopeScaling | None
) -> jax.Array:
    """Returns the angles θᵢ per position, [head_dim / 2], scaled as in LLaMA 3."""
    frequency = layers.rope_frequencies(head_dim, theta)
    if scaling is None:
        return frequency
    # context / wavelength: how often a feature turns within the original context. Those
    # that turn often (≥ high) are kept, those that turn seldom (≤ low) slowed down by
    # the whole factor, and between these two the frequency is interpolated linearly.
    turns = scaling.context * frequency / (2 * math.pi)
    share_kept = jnp.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
    return frequency * ((1 - share_kept) / scaling.factor + share_kept)


def positions_of(tokens: jax.Array) -> jax.Array:
    """Returns 0, 1, … for each row of `[batch, time, ...]`."""
    return jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape[:2])


def check_time(time: int, context: int) -> None:
    """Raises ValueError for a sequence longer than the table of positions."""
    if time > context:
        raise ValueError(
            f"time must be at most the context: got {time} tokens, context={context}"
        )


class CausalLm(nnx.Module):
    """The network of `causal_lm`."""

    def __init__(
        self, context: int, vocabulary: int, config: CausalLmConfig, policy: Policy
    ):
        """Declares tables, blocks and head."""
        options, width = config.options, config.width
        sizes = Sizes.of_causal_lm(config, policy)
        self.context, self.remat = context, config.remat
        self.compute, self.logits = policy.compute, policy.output
        table = functools.partial(
            Embedding, init_scale=options.init_scale, policy=policy
        )
        narrow = options.embed_width or width
        self.embed = table(vocabulary, narrow)
        project = functools.partial(
            Dense, policy=policy, use_bias=False, initializer=sizes.inner
        )
        self.project_in = None if narrow == width else project(narrow, width)
        self.project_out = None if narrow == width else project(width, narrow)
        self.embed_norm = Norm(width, options, policy) if options.embed_norm else None
        self.offset = OFFSET if options.position == "offset" else 0
        learned, tied = options.has_table, options.tied_head
        self.position = table(context + self.offset, width) if learned else None
        self.blocks = stack(Block(sizes), config.depth)
        self.final_norm = Norm(width, options, policy) if options.final_norm else None
        self.head = None if tied else project(narrow, vocabulary, output=self.logits)
        self.chunk, self.batch_axis = config.loss_chunk, config.batch_axis
        self.pieces = config.pieces

    def __call__(
        self, x: jax.Array | Decoding, *, train: bool, key: jax.Array | None
    ) -> Any:
        """Maps tokens to logits, or a `Decoding` to logits and the new cache."""
        del train, key
        if isinstance(x, Decoding):
            return self._decode(x)
        positions = positions_of(x)
        given = self._cut(self.embed_tokens(x, positions)), self._cut(positions)

        def run(block: Block, pieces: list[jax.Array]) -> list[jax.Array]:
            return [
                self._constrain_batch(block(self._constrain_batch(y), at))
                for y, at in zip(pieces, given[1], strict=True)
            ]

        ys = scan_blocks(self.blocks, given[0], run, remat=self.remat)
        y = self.finish(jnp.concatenate(ys) if len(ys) > 1 else ys[0])
        return (
            self.to_logits(y)
            if self.chunk is None
            else self._chunk_logits(y, self.chunk)
        )

    def _cut(self, rows: jax.Array) -> list[jax.Array]:
        """Returns the pieces of a batch."""
        if len(rows) % self.pieces:
            raise errors.ConfigError(
                f"pieces must divide the rows of a device: got {len(rows)} rows, "
                f"pieces={self.pieces}"
            )
        return jnp.split(rows, self.pieces) if self.pieces > 1 else [rows]

    def _constrain_batch(self, y: jax.Array) -> jax.Array:
        """Fixes the sharding of a block's input or output to the batch axis."""
        if self.batch_axis is None:
            return y
        return jax.lax.with_sharding_constraint(y, PartitionSpec(self.batch_axis))

    def _decode(self, x: Decoding) -> tuple[jax.Array, Cache]:
        """Returns logits and the new cache, with `x.attend` instead of attention."""
        cache, time = x.cache, x.tokens.shape[1]
        positions = cache.length[:, None] + jnp.arange(time)

        def call(block: Block, carry: Any, memory: Any) -> tuple[Any, Any]:
            hidden, shared = carry

            def mix(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
                # Called once by `block`, in the middle of which the cache is updated.
                nonlocal memory, shared
                heads = Heads(
                    query, key, value, positions, hidden, block.attention.slopes
                )
                mixed, memory, shared = x.attend(memory, shared, heads)
                return mixed

            y = block(hidden, positions, mix=mix)
            return (y, shared), memory

        carry = self.embed_tokens(x.tokens, positions), x.shared
        (y, _), runs = scan_with_memory(self.blocks, carry, call, cache.runs)
        if x.at is not None:
            y = jnp.take_along_axis(y, x.at[..., None], axis=1)
        cache = Cache(runs=runs, length=cache.length + time)
        return self.to_logits(self.finish(y)), cache

    def embed_tokens(self, tokens: jax.Array, positions: jax.Array) -> jax.Array:
        """Maps tokens `[batch, time]` to the inputs of the first block."""
        y = self.embed(tokens)
        y = y if self.project_in is None else self.project_in(y)
        y = y if self.embed_norm is None else self.embed_norm(y)
        if self.position is None:
            return y
        check_time(tokens.shape[1], self.context)
        return y + self.position(positions + self.offset)

    def finish(self, y: jax.Array) -> jax.Array:
        """Maps outputs of the last block to inputs of the head."""
        y = y if self.final_norm is None else self.final_norm(y)
        return y if self.project_out is None else self.project_out(y)

    @property
    def head_kernel(self) -> Any:
        """What the head multiplies by, `[width, vocabulary]`."""
        if self.head is not None:
            return self.head.kernel.get_value()
        return self.embed.table.get_value().T

    def to_logits(self, y: jax.Array) -> Any:
        """Maps inputs of the head to logits."""
        kernel = self.head_kernel
        if self.head is not None:
            logits = self.head(y)
        else:
            logits = layers.dense(y, kernel, compute=self.compute, output=self.logits)
        _, axes = shards.open_part(kernel, -1)
        return SplitLogits(values=logits, axes=axes) if axes else logits

    def _chunk_logits(self, y: jax.Array, chunk: int) -> ChunkedLogits:
        """Returns the logits not yet multiplied, to be computed in chunks."""
        kernel = self.head_kernel
        if isinstance(kernel, shards.Part):
            raise errors.ConfigError(
                f"model.loss_chunk={chunk} goes with a whole head, and not with "
                "parallel=tensor3d: set model.loss_chunk=none"
            )
        return ChunkedLogits(
            hidden=y,
            kernel=kernel,
            chunk=chunk,
            compute=self.compute,
            output=self.logits,
        )


def causal_lm(
    inputs: tuple[int, ...], outputs: int, *, policy: Policy = FLOAT32, **sizes: Any
) -> Model:
    """Returns a decoder-only language model, from tokens `[batch, time]` to logits.

    Blocks are stacked along axis 0 below `blocks/` and run by one scan. Matrices and
    tables are drawn from N(0, init_scale²); with `scale_residual` those that end a
    residual branch are drawn from N(0, init_scale² / (2 depth)). Biases are zero at the
    start. A tied head is not a layer that can be observed.

    Args:
      inputs: `(context,)`, the number of rows of the position table. With rotary
        positions and linear biases there is no table, and sequences may be longer.
      outputs: size of the vocabulary.
      policy: dtypes of parameters, products and logits; norms and softmax are float32.
      **sizes: the fields of `CausalLmConfig`.

    Returns:
      A model whose `apply` takes int tokens `[batch, time]` and returns logits `[batch,
      time, vocabulary]` in `policy.output`. Logits at time t depend on the tokens up to
      t only. With `loss_chunk` it returns `ChunkedLogits` instead, and the head cannot
      be observed. Given a `Decoding` it returns logits of the new tokens and the new
      `Cache`.

    Raises:
      ConfigError: sizes that do not divide or are below 1, or an unknown option.

    Examples:
      >>> from hpcjax import core
      >>> model = causal_lm((8,), 11, depth=1, width=4, heads=2)
      >>> params, state = model.init(jax.random.key(0))
      >>> tokens = jnp.zeros((2, 8), jnp.int32)
      >>> model.apply(params, state, tokens, train=False)[0].shape
      (2, 8, 11)
    """
    config = CausalLmConfig(**sizes)
    if len(inputs) != 1 or min(*inputs, outputs) < 1:
        raise errors.ConfigError(
            "inputs must be (context,) and outputs the size of the vocabulary, both at "
            f"least 1: got inputs={inputs}, outputs={outputs}"
        )
    experts = config.options.experts
    decoder = Decoder(
        depth=config.depth,
        heads=config.heads,
        kv_heads=config.kv_heads or config.heads,
        head_dim=config.head_size,
        vocabulary=outputs,
        context=inputs[0] if config.options.has_table else None,
        dtype=policy.compute,
        crowded=experts is not None and experts.capacity_factor is not None,
    )
    return from_nnx(
        lambda: CausalLm(inputs[0], outputs, config, policy), decoder=decoder
    )
