"""The post-norm block with fused operations between its matrix products.

A pre-norm block is refused: there a norm follows the sum that the next branch and the
next residual both read, which is another operation than BDRLN.
"""

import functools

import jax
import jax.numpy as jnp

from hpcjax import kernels
from hpcjax.core.errors import UnsupportedOp
from hpcjax.core.keys import Key
from hpcjax.models.block import Attention, Block, FeedForward, Mix, Norm, check_whole
from hpcjax.models.dropout import seeds
from hpcjax.models.modules import Dense
from hpcjax.models.transformer_config import TransformerOptions


class FusedBlock(Block):
    """`Block` of the same parameters and masks, for post-norm, as in BERT.

    Biases are not added by the products but by what follows them: softmax of the
    scores; bias and activation; bias, residual and LayerNorm, each one operation of
    `kernels`. A tap observes products without their bias where that is so; gradients
    there are the same.
    """

    def __call__(
        self,
        x: jax.Array,
        positions: jax.Array,
        mask: jax.Array | None = None,
        mix: Mix | None = None,
        key: Key | None = None,
        drops: Key | None = None,
    ) -> jax.Array:
        """Maps `[batch, time, width]` to the same shape; arguments as `Block`."""
        del key
        check_whole(self.attention, drops)
        mlp = self.mlp
        if self.pre or not isinstance(mlp, FeedForward) or mlp.up.bias is None:
            raise UnsupportedOp("the fused block is post-norm, with biases, no experts")
        mix = mix or functools.partial(
            _attend, mask=mask, attention=self.attention, drops=drops
        )
        mixed = self.attention.mix_values(x, positions, mask, mix)
        close = functools.partial(_add_and_norm, rate=self.rate, drops=drops)
        output, down = self.attention.output, mlp.down
        x = close(mixed, output, x, self.attention_norm, place="attention")
        hidden = kernels.bias_activation_dropout(
            mlp.up(x, add_bias=False), mlp.up.bias[...], activation=mlp.activation
        )
        return close(hidden, down, x, self.mlp_norm, place="mlp")


def _attend(
    query: jax.Array,
    key: jax.Array,
    value: jax.Array,
    *,
    mask: jax.Array | None,
    attention: Attention,
    drops: Key | None,
) -> jax.Array:
    """Returns attention as `layers.attention`, `[batch, time, heads, head_dim]`."""
    scores = jnp.einsum(
        "bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32
    )
    visible = None if mask is None else mask[:, None]
    if attention.causal:
        past = jnp.tril(jnp.ones(scores.shape[-2:], bool))
        visible = past if visible is None else visible & past
    rate = 0.0 if drops is None else attention.options.attention_dropout
    weights = kernels.softmax_dropout(
        scores,
        seeds(drops, "weights", len(query)) if rate else None,
        rate=rate,
        scale=query.shape[-1] ** -0.5,
        visible=visible,
    )
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(value.dtype), value)


def _add_and_norm(
    x: jax.Array,
    dense: Dense,
    residual: jax.Array,
    norm: Norm,
    *,
    rate: float,
    drops: Key | None,
    place: str,
) -> jax.Array:
    """Returns the norm of a product with its bias and of what passes beside it."""
    if dense.bias is None or norm.bias is None:
        raise UnsupportedOp("the fused block needs biases and LayerNorm")
    rate = 0.0 if drops is None else rate
    return kernels.dropout_residual_norm(
        dense(x, add_bias=False),
        dense.bias[...],
        residual,
        norm.scale[...],
        norm.bias[...],
        seeds(drops, place, len(x)) if rate else None,
        rate=rate,
        eps=norm.eps,
    )


def block_class(options: TransformerOptions) -> type[Block]:
    """Returns the class of a model's blocks."""
    return FusedBlock if options.block == "fused" else Block
