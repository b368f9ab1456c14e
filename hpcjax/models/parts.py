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


class _Unrolled(CausalLm):
    """`CausalLm` with each block's parameters of their own, from `block_0` on."""

    def __init__(
        self, context: int, vocabulary: int, config: CausalLmConfig, policy: Policy
    ):
        super().__init__(context, vocabulary, config, policy)
        del self.blocks
        self.depth = config.depth
        for index in range(config.depth):
            block = Block(Sizes.of_causal_lm(config, policy))
            setattr(self, f"block_{index}", block)

    def __call__(
        self, x: jax.Array, *, train: bool, key: jax.Array | None
    ) -> jax.Array:
        del train, key
        positions = positions_of(x)
        y = self.embedded(x, positions)
        for index in range(self.depth):
            y = getattr(self, f"block_{index}")(y, positions)
        return self.words(self.finished(y))


def unrolled_causal_lm(
    config: CausalLmConfig, context: int, vocabulary: int, policy: Policy = FLOAT32
) -> Model:
    """Returns `models.causal_lm` without the scan: a block is a layer like others.

    So that a gradient may stop between two blocks. The draws differ from the scan's.

    Args:
      config: the model.
      context: rows of the position table.
      vocabulary: words it knows.
      policy: its dtypes.

    Raises:
      UnsupportedOp: rematerialized blocks, or logits in chunks.

    Examples:
      >>> model = unrolled_causal_lm(CausalLmConfig(width=4, heads=2), 8, 11)
      >>> params, _ = jax.eval_shape(model.init, jax.random.key(0))
      >>> sorted(params)
      ['block_0', 'block_1', 'embed', 'final_norm', 'position']
    """
    if config.remat != "none" or config.loss_chunk is not None:
        raise UnsupportedOp("an unrolled model has neither remat nor loss_chunk")
    return from_nnx(lambda: _Unrolled(context, vocabulary, config, policy))
