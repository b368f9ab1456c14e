"""A language model cut before and behind its blocks, to walk through it."""

from typing import Any, NamedTuple

import jax

from hpcjax.core.dtypes import Policy
from hpcjax.core.errors import UnsupportedOp
from hpcjax.core.model import Model
from hpcjax.models._from_nnx import from_nnx
from hpcjax.models.config import CausalLmConfig
from hpcjax.models.modules import FLOAT32
from hpcjax.models.transformer import Block, CausalLm, Sizes, positions_of

# Layers of a block that are given the same thing, in the order in which they run.
QKV = ("attention/query", "attention/key", "attention/value")
UP = ("mlp/up",)
GATED = ("mlp/gate", "mlp/up")


class Parts(NamedTuple):
    """A causal language model in three parts, each with the empty state `{}`.

    Attributes:
      embed: tokens `[batch, time]` to the first block's `[batch, time, width]`; takes
        the whole model's parameters.
      block: one block; takes one layer's slice of `params["blocks"]`.
      head: what the last block gives to logits; takes the whole model's parameters.
      groups: paths of the block's matrices, those with the same inputs together, in the
        order in which they run.
    """

    embed: Model
    block: Model
    head: Model
    groups: tuple[tuple[str, ...], ...]


def causal_lm_parts(
    config: CausalLmConfig, context: int, vocabulary: int, policy: Policy = FLOAT32
) -> Parts:
    """Returns the parts of `models.causal_lm`, for its parameters.

    Args:
      config: the model.
      context: rows of the position table.
      vocabulary: words it knows.
      policy: its dtypes.

    Raises:
      UnsupportedOp: a model with experts, whose matrices have inputs of their own.

    Examples:
      >>> import jax.numpy as jnp
      >>> config = CausalLmConfig(depth=2, width=4, heads=2)
      >>> parts, model = causal_lm_parts(config, 8, 11), config.make((8,), 11)
      >>> params, _ = model.init(jax.random.key(0))
      >>> y, _ = parts.embed.apply(params, {}, jnp.zeros((1, 8), "int32"), train=False)
      >>> for layer in range(2):
      ...   one = jax.tree.map(lambda leaf: leaf[layer], params["blocks"])
      ...   y, _ = parts.block.apply(one, {}, y, train=False)
      >>> parts.head.apply(params, {}, y, train=False)[0].shape
      (1, 8, 11)
    """
    if config.options.experts is not None:
        raise UnsupportedOp("a model with experts cannot be cut into parts")

    def whole() -> CausalLm:
        return CausalLm(context, vocabulary, config, policy)

    def embed(model: CausalLm, tokens: jax.Array, **_: Any) -> jax.Array:
        return model.embedded(tokens, positions_of(tokens))

    def block(layer: Block, y: jax.Array, **_: Any) -> jax.Array:
        return layer(y, positions_of(y))

    def head(model: CausalLm, y: jax.Array, **_: Any) -> jax.Array:
        return model.words(model.finished(y))

    mlp = GATED if config.options.mlp == "silu_gated" else UP
    return Parts(
        from_nnx(whole, call=embed),
        from_nnx(lambda: Block(Sizes.of_causal_lm(config, policy)), call=block),
        from_nnx(whole, call=head),
        (QKV, ("attention/output",), mlp, ("mlp/down",)),
    )
