"""The post-norm block with fused operations between its matrix products."""

import functools

import jax
import jax.numpy as jnp

from hpcjax import kernels
from hpcjax.core.errors import UnsupportedOp
from hpcjax.models.block import Block, FeedForward, Mix, Norm
from hpcjax.models.modules import Dense


class FusedBlock(Block):
    """`Block` of the same parameters, for post-norm without dropout, as in BERT.

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
    ) -> jax.Array:
        """Maps `[batch, time, width]` to the same shape; arguments as `Attention`."""
        mlp = self.mlp
        if self.pre or not isinstance(mlp, FeedForward) or mlp.up.bias is None:
            raise UnsupportedOp("the fused block is post-norm, with biases, no experts")
        mix = mix or functools.partial(_attend, mask=mask)
        mixed = self.attention.mix_values(x, positions, mask, mix)
        x = _add_and_norm(mixed, self.attention.output, x, self.attention_norm)
        hidden = kernels.bias_activation_dropout(
            mlp.up(x, add_bias=False), mlp.up.bias[...], activation=mlp.activation
        )
        return _add_and_norm(hidden, mlp.down, x, self.mlp_norm)


def _attend(
    query: jax.Array, key: jax.Array, value: jax.Array, mask: jax.Array | None
) -> jax.Array:
    """Returns attention as `layers.attention`, `[batch, time, heads, head_dim]`."""
    scores = jnp.einsum(
        "bqhd,bkhd->bhqk", query, key, preferred_element_type=jnp.float32
    )
    visible = None if mask is None else mask[:, None]
    scale = query.shape[-1] ** -0.5
    weights = kernels.softmax_dropout(scores, scale=scale, visible=visible)
    return jnp.einsum("bhqk,bkhd->bqhd", weights.astype(value.dtype), value)


def _add_and_norm(
    x: jax.Array, dense: Dense, residual: jax.Array, norm: Norm
) -> jax.Array:
    """Returns the norm of a product with its bias and of what passes beside it."""
    if dense.bias is None or norm.bias is None:
        raise UnsupportedOp("the fused block needs biases and LayerNorm")
    return kernels.dropout_residual_norm(
        dense(x, add_bias=False),
        dense.bias[...],
        residual,
        norm.scale[...],
        norm.bias[...],
        eps=norm.eps,
    )
