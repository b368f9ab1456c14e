"""The transformer block: attention and feed-forward part, with norms and residuals."""

import functools
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import nnx

from hpcjax import layers
from hpcjax.core import errors, shards
from hpcjax.core.dtypes import Policy
from hpcjax.core.keys import Key, derive
from hpcjax.layers import Implementation
from hpcjax.models.bert_config import BertConfig
from hpcjax.models.dropout import drop
from hpcjax.models.experts import ExpertsFeedForward
from hpcjax.models.modules import ONES, ZEROS, Dense, Initializer, param
from hpcjax.models.transformer_config import (
    CausalLmConfig,
    SparseAttentionConfig,
    TransformerOptions,
)

Mix = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]
_BITS = {
    "16-8": layers.AttentionBits(16, 8),
    "8-8": layers.AttentionBits(8, 8),
    "8-4": layers.AttentionBits(8, 4),
    "4-4": layers.AttentionBits(4, 4),
}


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
        self.options, self.sparse = sizes.options, sizes.options.sparse

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
        drops: Key | None = None,
    ) -> jax.Array:
        """Maps `[batch, time, width]` to the same shape; arguments as `mix_values`."""
        return self.output(self.mix_values(x, positions, mask, mix, drops))

    def mix_values(
        self,
        x: jax.Array,
        positions: jax.Array,
        mask: jax.Array | None = None,
        mix: Mix | None = None,
        drops: Key | None = None,
    ) -> jax.Array:
        """Returns the inputs of the output projection, `[batch, time, inner]`.

        Args:
          x: inputs.
          positions: of the tokens in their sequence, `[batch, time]`.
          mask: see `layers.attention`.
          mix: `(query, key, value) -> mixed` in place of attention within `x`, such as
            attention to a cache.
          drops: key of the weights that are dropped; None for none.
        """
        x = share_inputs(x, self.query, self.key, self.value)
        split = (*x.shape[:2], -1, self.head_dim)
        query = self.query(x).reshape(split)
        key = self.key(x).reshape(split)
        value = self.value(x).reshape(split)
        if self.rotates:
            turns = rope_frequencies(self.head_dim, self.options)
            rope = functools.partial(layers.rope, frequencies=turns)
            query, key = rope(query, positions), rope(key, positions)
        mix = self._choose_mix(x.shape[1], mask, drops) if mix is None else mix
        return mix(query, key, value).reshape(*x.shape[:2], -1)

    def _choose_mix(self, time: int, mask: jax.Array | None, drops: Key | None) -> Mix:
        """Returns attention within the inputs, as the options say."""
        if self.sparse is not None:
            if mask is not None:
                raise errors.ConfigError("sparse attention takes no mask of keys")
            return attend_sparsely(self.sparse, time, causal=self.causal)
        rate, dropped = self.options.attention_dropout, None
        if rate and drops is not None:
            dropped = functools.partial(drop, rate=rate, key=drops, place="weights")
        return functools.partial(
            layers.attention,
            causal=self.causal,
            mask=mask,
            slopes=self.slopes,
            drop=dropped,
            implementation=self.implementation,
        )


def attend_sparsely(options: SparseAttentionConfig, time: int, *, causal: bool) -> Mix:
    """Returns attention of `time` queries to the pattern that the options draw."""
    pattern = layers.random_pattern(
        time,
        zeros=options.zeros,
        vector=options.vector,
        seed=options.seed,
        causal=causal,
    )
    return functools.partial(
        layers.sparse_attention,
        pattern=pattern,
        causal=causal,
        bits=_BITS.get(options.bits),
        scales=options.scales,
    )


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

    def __call__(self, x: jax.Array, key: Key | None = None) -> jax.Array:
        """Maps `[..., width]` to the same shape; draws nothing."""
        del key
        if not self.gated:
            return self.down(layers.activation(self.activation, self.up(x)))
        x = share_inputs(x, self.gate, self.up)
        return self.down(layers.activation(self.activation, self.gate(x)) * self.up(x))


def share_inputs(x: jax.Array, *several: Dense) -> jax.Array:
    """Returns x as several layers take it, see `layers.share_inputs`."""
    return layers.share_inputs(x, [layer.kernel.get_value() for layer in several])


def feed_forward(sizes: Sizes, *, dense: bool) -> FeedForward | ExpertsFeedForward:
    """Returns a block's feed-forward part, a mixture of experts if there are any."""
    if dense or sizes.options.experts is None:
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

    def __init__(self, sizes: Sizes, *, dense: bool = False):
        """Declares the parts; a dense block has no experts, whatever the options."""
        self.attention = Attention(sizes)
        self.attention_norm = Norm(sizes.width, sizes.options, sizes.policy)
        self.mlp = feed_forward(sizes, dense=dense)
        self.mlp_norm = Norm(sizes.width, sizes.options, sizes.policy)
        self.pre = sizes.options.norm_position == "pre"
        self.rate = sizes.options.dropout

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        mask: jax.Array | None = None,
        mix: Mix | None = None,
        key: Key | None = None,
        drops: Key | None = None,
    ) -> jax.Array:
        """Maps `[batch, time, width]` to the same shape.

        Arguments are as for `Attention`; `key` is of what experts draw, `drops` of what
        is dropped.

        Raises:
          ConfigError: something is dropped, and devices that share an example have
            parts of it, of which each would draw the mask of another one.
        """
        check_whole(self.attention, drops)

        def attend(x: jax.Array) -> jax.Array:
            y = self.attention(x, positions, mask, mix, drops)
            return drop(y, self.rate, drops, "attention")

        def feed(x: jax.Array) -> jax.Array:
            return drop(self.mlp(x, key), self.rate, drops, "mlp")

        if self.pre:
            x = x + attend(self.attention_norm(x))
            return x + feed(self.mlp_norm(x))
        x = self.attention_norm(x + attend(x))
        return self.mlp_norm(x + feed(x))


def check_whole(attention: Attention, drops: Key | None) -> None:
    """Refuses dropout in a block of which a device has a part, see `Block`."""
    kernel = attention.query.kernel.get_value()
    if drops is not None and isinstance(kernel, shards.Part):
        raise errors.ConfigError(
            "parallel=tensor3d, and ted and pipeline that cut matrices, share an "
            "example out and take no dropout: set model.options.dropout=0 and "
            "model.options.attention_dropout=0"
        )


class BlockGroup(nnx.Module):
    """Blocks one after the other, of which the last one alone has experts.

    A stack has equal members: of such groups, `block_0`, `block_1` and so on.
    """

    def __init__(self, sizes: Sizes, count: int):
        """Declares so many blocks."""
        self.names = tuple(f"block_{number}" for number in range(count))
        for name in self.names:
            setattr(self, name, Block(sizes, dense=name != self.names[-1]))

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        key: Key | None = None,
        drops: Key | None = None,
    ) -> jax.Array:
        """Maps `[batch, time, width]` to the same shape, see `Block`."""
        for name in self.names:
            own = None if drops is None else derive(drops, name)
            x = getattr(self, name)(x, positions, key=key, drops=own)
        return x


def rope_frequencies(head_dim: int, options: TransformerOptions) -> jax.Array:
    """Returns the angles θᵢ per position, [head_dim / 2], scaled as in LLaMA 3."""
    frequency = layers.rope_frequencies(head_dim, options.rope_theta)
    if options.rope_divisors:
        frequency = frequency / jnp.array(options.rope_divisors, frequency.dtype)
    if (scaling := options.rope_scaling) is None:
        return frequency
    # context / wavelength: how often a feature turns within the original context. Those
    # that turn often (≥ high) are kept, those that turn seldom (≤ low) slowed down by
    # the whole factor, and between these two the frequency is interpolated linearly.
    turns = scaling.context * frequency / (2 * math.pi)
    share_kept = jnp.clip((turns - scaling.low) / (scaling.high - scaling.low), 0, 1)
    return frequency * ((1 - share_kept) / scaling.factor + share_kept)
