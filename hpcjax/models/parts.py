"""A language model in parts, for methods that go through it block by block."""

from typing import NamedTuple

import jax

from hpcjax.core.dtypes import Policy
from hpcjax.core.errors import UnsupportedOp
from hpcjax.core.keys import Key, derive
from hpcjax.core.model import Model
from hpcjax.models._from_nnx import from_nnx
from hpcjax.models.block import Sizes
from hpcjax.models.dropout import training_key
from hpcjax.models.fused import block_class
from hpcjax.models.modules import FLOAT32
from hpcjax.models.transformer import CausalLm, cut_causal_lm, positions_of
from hpcjax.models.transformer_config import CausalLmConfig

# The matrices of a block that have the same inputs.
QKV = ("attention/query", "attention/key", "attention/value")
UP = ("mlp/up",)
GATED = ("mlp/gate", "mlp/up")


class Parts(NamedTuple):
    """A causal language model in three parts, each with the empty state `{}`.

    Attributes:
      embed: maps tokens `[batch, time]` to the inputs `[batch, time, width]` of the
        first block, with the whole model's parameters.
      block: one block, with one layer's slice of `params["blocks"]`.
      head: maps the last block's outputs to logits, with the whole model's parameters.
      groups: paths of the matrices of a block, grouped by their inputs, in the order in
        which they run.
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
      vocabulary: number of words.
      policy: dtypes of parameters and products.

    Raises:
      UnsupportedOp: a model with experts, each of which has inputs of its own.

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

    mlp = GATED if config.options.mlp == "silu_gated" else UP
    return Parts(
        *cut_causal_lm(context, vocabulary, config, policy),
        groups=(QKV, ("attention/output",), mlp, ("mlp/down",)),
    )


class _Unrolled(CausalLm):
    """`CausalLm` with parameters `block_0`, `block_1`, … instead of a stack."""

    def __init__(
        self, context: int, vocabulary: int, config: CausalLmConfig, policy: Policy
    ):
        super().__init__(context, vocabulary, config, policy)
        del self.blocks
        self.depth = config.depth
        for index in range(config.depth):
            block = block_class(config.options)(Sizes.of_causal_lm(config, policy))
            setattr(self, f"block_{index}", block)

    def __call__(self, x: jax.Array, *, train: bool, key: Key | None) -> jax.Array:
        positions = positions_of(x)
        drops = training_key(self.options, key, len(x), train=train)
        y = self.embed_tokens(x, positions)
        for index in range(self.depth):
            own = None if drops is None else derive(drops, "dropout", index)
            y = getattr(self, f"block_{index}")(y, positions, drops=own)
        return self.to_logits(self.finish(y))


def unrolled_causal_lm(
    config: CausalLmConfig, context: int, vocabulary: int, policy: Policy = FLOAT32
) -> Model:
    """Returns `models.causal_lm` with its blocks unrolled instead of scanned.

    A gradient can then stop between two blocks, which are separate layers. Parameters
    are drawn differently from the scanned model's, as their paths differ.

    Args:
      config: the model.
      context: rows of the position table.
      vocabulary: number of words.
      policy: dtypes of parameters and products.

    Raises:
      UnsupportedOp: `remat` or `loss_chunk` is set, or experts are not in each block or
        draw.

    Examples:
      >>> model = unrolled_causal_lm(CausalLmConfig(width=4, heads=2), 8, 11)
      >>> params, _ = jax.eval_shape(model.init, jax.random.key(0))
      >>> sorted(params)
      ['block_0', 'block_1', 'embed', 'final_norm', 'position']
    """
    if config.remat != "none" or config.loss_chunk is not None:
        raise UnsupportedOp("an unrolled model has neither remat nor loss_chunk")
    experts = config.options.experts
    if experts is not None and (experts.every > 1 or experts.priority == "random"):
        raise UnsupportedOp(
            "an unrolled model has experts in each block, and draws nothing: got "
            f"every={experts.every}, priority={experts.priority!r}"
        )
    return from_nnx(lambda: _Unrolled(context, vocabulary, config, policy))
