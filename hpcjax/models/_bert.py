"""BERT: the encoder, with or without the two heads of its pre-training."""

import dataclasses
import functools
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx

from hpcjax import layers
from hpcjax.core import errors
from hpcjax.core.dtypes import Policy
from hpcjax.core.keys import Key, derive
from hpcjax.core.model import Model
from hpcjax.models._from_nnx import from_nnx
from hpcjax.models.bert_config import BertConfig
from hpcjax.models.block import Embedding, Norm, Sizes
from hpcjax.models.dropout import training_key
from hpcjax.models.fused import block_class
from hpcjax.models.modules import FLOAT32, ZEROS, Dense, param
from hpcjax.models.scan import Remat, scan_blocks, stack
from hpcjax.models.transformer import check_time
from hpcjax.models.transformer_config import BERT

Head = Literal["pretraining", "masked_lm", "pooler", "none"]
CHANNELS = 3
TYPES = 2


class BertOutputs(NamedTuple):
    """Logits of both heads.

    Attributes:
      tokens: `[batch, time, vocabulary]`, for the word at each position.
      order: `[batch, 2]`, whether the second sentence follows the first (0) or not (1).
    """

    tokens: jax.Array
    order: jax.Array


class BertFeatures(NamedTuple):
    """Outputs of the encoder without heads.

    Attributes:
      hidden: `[batch, time, width]`, the output of the last block.
      pooled: `[batch, width]`, tanh(dense(hidden at the first position)); None without
        a pooler.
    """

    hidden: jax.Array
    pooled: jax.Array | None


class _Bert(nnx.Module):
    """The network of `bert`."""

    def __init__(
        self, context: int, vocabulary: int, config: BertConfig, policy: Policy
    ):
        width = config.width
        self.options = dataclasses.replace(
            BERT,
            dropout=config.dropout,
            attention_dropout=config.attention_dropout,
            block=config.block,
        )
        sizes = Sizes(config, self.options, policy, causal=False)
        table = functools.partial(
            Embedding, width=width, init_scale=BERT.init_scale, policy=policy
        )
        norm = functools.partial(Norm, width, BERT, policy)
        self.context, self.remat = context, config.remat
        self.compute, self.logits = policy.compute, policy.output
        self.embed, self.position, self.types = (
            table(rows) for rows in (vocabulary, context, TYPES)
        )
        self.embed_norm = norm()
        self.blocks = stack(block_class(self.options)(sizes), config.depth)
        both, words = config.head == "pretraining", config.head == "masked_lm"
        pooled = both or config.head == "pooler"
        self.pooler = sizes.dense(width, width) if pooled else None
        two = functools.partial(Dense, width, 2, initializer=sizes.inner)
        self.order = two(policy=policy, output=policy.output) if both else None
        self.transform = sizes.dense(width, width) if both or words else None
        if self.transform is not None:
            self.transform_norm = norm()
            self.decoder_bias = param((vocabulary,), ZEROS, policy.param)

    def __call__(
        self, x: jax.Array, *, train: bool, key: Key | None
    ) -> BertOutputs | BertFeatures | jax.Array:
        tokens, types, mask = _split_channels(x)
        drops = training_key(self.options, key, len(x), train=train)
        check_time(tokens.shape[1], self.context)
        places = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        y = self.embed(tokens) + self.position(places) + self.types(types)
        y = self.embed_norm(y)
        scan = functools.partial(scan_blocks, self.blocks, remat=self.remat)
        if drops is None:
            y = scan(y, lambda block, y: block(y, places, mask))
        else:

            def run(block: Any, carry: Any) -> Any:
                y, number = carry
                own = derive(drops, "dropout", number)
                return block(y, places, mask, drops=own), number + 1

            y, _ = scan((y, jnp.int32(0)), run)
        pooled = None if self.pooler is None else jnp.tanh(self.pooler(y[:, 0]))
        if self.transform is None:
            return BertFeatures(y, pooled)
        y = layers.activation(BERT.mlp, self.transform(y))
        # The head is tied: its matrix is the transposed embedding table, without a
        # slot.
        words = layers.dense(
            self.transform_norm(y),
            self.embed.table[...].T,
            self.decoder_bias[...],
            compute=self.compute,
            output=self.logits,
        )
        if self.order is None or pooled is None:
            return words
        return BertOutputs(words, self.order(pooled))


def _split_channels(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array | None]:
    """Returns tokens, token types, and the attention mask, None if all are visible."""
    if x.ndim == 2:
        return x, jnp.zeros_like(x), None
    # The mask of attention, `[batch, query, key]`: no query sees a padding key.
    tokens, types, real = (x[..., channel] for channel in range(CHANNELS))
    shape = (*tokens.shape, tokens.shape[1])
    return tokens, types, jnp.broadcast_to(real[:, None] != 0, shape)


def bert(  # noqa: PLR0913 - an argument for each option
    inputs: tuple[int, ...],
    outputs: int,
    *,
    depth: int = 2,
    width: int = 128,
    heads: int = 2,
    mlp_width: int | None = None,
    head: Head = "pretraining",
    remat: Remat = "none",
    block: Literal["plain", "fused"] = "plain",
    dropout: float = 0.0,
    attention_dropout: float = 0.0,
    policy: Policy = FLOAT32,
) -> Model:
    """Returns BERT, with its pre-training heads or without.

    The sum of word, position and type embeddings is normalised and passes through
    post-norm blocks with bidirectional attention. The masked-word head maps every
    position to logits by dense, gelu, LayerNorm, and the transposed embedding table
    with a bias. The sentence-order head maps the first position by dense, tanh and
    dense to two logits. Blocks are stacked along axis 0 below `blocks/` and run by one
    scan. Matrices and tables are drawn from N(0, 0.02²), biases are zero at the start.
    The tied table is not a layer that can be observed.

    Args:
      inputs: `(context,)` or `(context, 3)`; the context is the number of rows of the
        position table.
      outputs: size of the vocabulary.
      depth: number of blocks.
      width: features of a token.
      heads: query, key and value heads; width / heads features each.
      mlp_width: features inside the feed-forward part; None means 4 · width.
      head: "pretraining" for both heads, "masked_lm" for that of the words alone;
        "pooler" for no head but the dense layer and tanh of the first position; "none"
        for the encoder alone.
      remat: "none", "full", "dots" or "offload", see `models.scan_blocks`.
      block: "plain", or "fused" with one operation for all that stands between two
        products; both have the same parameters and masks.
      dropout: share of the numbers that attention and feed-forward parts put out which
        a training pass drops; it then needs a key.
      attention_dropout: likewise, of the attention's weights.
      policy: dtypes of parameters, products and logits; norms and softmax are float32.

    Returns:
      A model whose `apply` takes ints `[batch, time, 3]`: token, type (0 or 1), and 1
      for a real position or 0 for padding, which is never attended to. It also takes
      tokens `[batch, time]` alone, all real and of type 0. It returns `BertOutputs` in
      `policy.output`, for "masked_lm" their `tokens` only, and without heads
      `BertFeatures` in `policy.compute`.

    Raises:
      ConfigError: sizes that do not divide or are below 1, or an unknown option.

    References:
      Devlin et al., BERT, arXiv 1810.04805, 2019, §3 and appendix A.

    Examples:
      >>> model = bert((8, 3), 11, depth=1, width=4)
      >>> params, state = model.init(jax.random.key(0))
      >>> x = jnp.zeros((2, 8, 3), jnp.int32)
      >>> logits, _ = model.apply(params, state, x, train=False)
      >>> logits.tokens.shape, logits.order.shape
      ((2, 8, 11), (2, 2))
    """
    config = BertConfig(
        depth=depth,
        width=width,
        heads=heads,
        mlp_width=mlp_width,
        head=head,
        remat=remat,
        block=block,
        dropout=dropout,
        attention_dropout=attention_dropout,
    )
    if inputs[1:] not in ((), (CHANNELS,)) or min(*inputs, outputs) < 1:
        raise errors.ConfigError(
            "inputs must be (context,) or (context, 3) and outputs the size of the "
            f"vocabulary, both at least 1: got inputs={inputs}, outputs={outputs}"
        )
    return from_nnx(lambda: _Bert(inputs[0], outputs, config, policy))
