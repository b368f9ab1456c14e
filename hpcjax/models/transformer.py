"""The decoder-only language model."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jax.sharding import PartitionSpec

from hpcjax import layers
from hpcjax.core import errors, shards
from hpcjax.core.dtypes import Policy
from hpcjax.core.keys import BatchKey, Key, derive
from hpcjax.core.model import Cut, Decoder, Model
from hpcjax.models._from_nnx import from_nnx
from hpcjax.models.block import Block, BlockGroup, Embedding, Norm, Sizes
from hpcjax.models.chunked import ChunkedLogits
from hpcjax.models.decoding import Cache, Decoding, Heads
from hpcjax.models.dropout import training_key
from hpcjax.models.fused import block_class
from hpcjax.models.modules import FLOAT32, Dense
from hpcjax.models.scan import recompute, scan_blocks, scan_with_memory, stack
from hpcjax.models.split_logits import SplitLogits
from hpcjax.models.transformer_config import CausalLmConfig

# OPT's position tables have two unused rows at the beginning.
OFFSET = 2


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
        group = config.group
        one = block_class(options)
        block = one(sizes) if group == 1 else BlockGroup(sizes, group)
        self.blocks, self.group = stack(block, config.depth // group), group
        self.final_norm = Norm(width, options, policy) if options.final_norm else None
        self.head = None if tied else project(narrow, vocabulary, output=self.logits)
        self.chunk, self.batch_axis = config.loss_chunk, config.batch_axis
        self.pieces, self.sparse = config.pieces, options.sparse
        self.options = options
        experts = options.experts
        self.random = experts is not None and experts.priority == "random"

    def __call__(self, x: jax.Array | Decoding, *, train: bool, key: Key | None) -> Any:
        """Maps tokens to logits, or a `Decoding` to logits and the new cache."""
        if isinstance(x, Decoding):
            return self._decode(x)
        positions = positions_of(x)
        given = self._cut(self.embed_tokens(x, positions)), self._cut(positions)

        draws = self._draws(train, key)
        drops = training_key(self.options, key, len(x), train=train)

        def run(block: Block | BlockGroup, carry: Any) -> Any:
            pieces, number = carry
            drawn = {"key": draws(number)}
            dropped = self._cut_key(drops, number)
            return [
                self._constrain_batch(
                    block(self._constrain_batch(y), at, **drawn, drops=own)
                )
                for y, at, own in zip(pieces, given[1], dropped, strict=True)
            ], number + 1

        start = given[0], jnp.int32(0)
        ys, _ = scan_blocks(self.blocks, start, run, remat=self.remat)
        y = self.finish(jnp.concatenate(ys) if len(ys) > 1 else ys[0])
        return (
            self.to_logits(y)
            if self.chunk is None
            else self._chunk_logits(y, self.chunk)
        )

    def _draws(self, train: bool, key: Key | None) -> Any:
        """Returns `number of a block -> key` of what its experts draw, if they do."""
        if not (self.random and train):
            return lambda _: None
        if key is None:
            raise errors.ConfigError(
                "experts.priority=random draws in training: give the model a key"
            )
        return functools.partial(derive, key, "experts")

    def _cut_key(
        self, drops: BatchKey | None, number: jax.Array
    ) -> list[BatchKey | None]:
        """Returns a block's key of dropout for each piece of a batch."""
        if drops is None:
            return [None] * self.pieces
        own = derive(drops, "dropout", number)
        return [dataclasses.replace(own, rows=part) for part in self._cut(own.rows)]

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
        if self.sparse is not None:
            raise errors.ConfigError(
                "decoding attends to a cache of all keys, and not to a pattern: got "
                f"model.options.sparse={self.sparse}"
            )
        if self.group > 1:
            raise errors.ConfigError(
                "decoding keeps keys and values of each block of a stack, and not of "
                f"groups: got model.options.experts.every={self.group}"
            )
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
                "parallel=tensor3d or ted, which cut it: set model.loss_chunk=none"
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
    config = CausalLmConfig.of(sizes, causal_lm)
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
        again=_compute_again(config),
    )
    return from_nnx(
        lambda: CausalLm(inputs[0], outputs, config, policy),
        decoder=decoder,
        cut=functools.partial(_cut, inputs[0], outputs, config, policy),
    )


def _compute_again(config: CausalLmConfig) -> tuple[str, ...]:
    """Returns `Decoder.again`: what is added last to a block is not needed."""
    if config.remat == "none":
        return ()
    last = "mlp/down" if config.options.norm_position == "pre" else "mlp_norm/bias"
    kept = config.remat == "collectives"
    return (f"^blocks/(?!{last})" + ".*norm/bias$" * kept,)


def cut_causal_lm(
    context: int, vocabulary: int, config: CausalLmConfig, policy: Policy
) -> tuple[Model, Model, Model]:
    """Returns what is before the blocks of `causal_lm`, one block, and what is after.

    The first and the last take the whole model's parameters, or all but its blocks.
    """

    def ends() -> CausalLm:
        model = CausalLm(context, vocabulary, config, policy)
        del model.blocks
        return model

    def embed(model: CausalLm, tokens: jax.Array, **_: Any) -> jax.Array:
        return model.embed_tokens(tokens, positions_of(tokens))

    def block(layer: Block, y: jax.Array, *, train: bool, **_: Any) -> jax.Array:
        training_key(config.options, None, len(y), train=train)  # refuses dropout
        return layer(y, positions_of(y))

    def head(model: CausalLm, y: jax.Array, **_: Any) -> jax.Array:
        return model.to_logits(model.finish(y))

    one = block_class(config.options)
    return (
        _without_blocks(from_nnx(ends, call=embed)),
        from_nnx(lambda: one(Sizes.of_causal_lm(config, policy)), call=block),
        _without_blocks(from_nnx(ends, call=head)),
    )


def _without_blocks(model: Model) -> Model:
    """Returns a model that is not given the blocks among the parameters."""

    def apply(params: Any, *args: Any, **options: Any) -> tuple[Any, Any]:
        rest = {name: value for name, value in params.items() if name != "blocks"}
        return model.apply(rest, *args, **options)

    return model._replace(apply=apply)


def _cut(context: int, vocabulary: int, config: CausalLmConfig, policy: Policy) -> Cut:
    """Returns the parts of `causal_lm` as functions, see `core.Model`."""
    whole = {
        "model.options.experts": (config.options.experts, None),
        "model.pieces": (config.pieces, 1),
        "model.loss_chunk": (config.loss_chunk, None),
        "model.options.dropout": (config.options.dropout, 0.0),
        "model.options.attention_dropout": (config.options.attention_dropout, 0.0),
    }
    for name, (given, wanted) in whole.items():
        if given != wanted:
            raise errors.ConfigError(
                f"a model that is cut between its blocks has {name}="
                f"{str(wanted).lower()}: got {given}"
            )
    first, block, last = (
        lambda params, x, part=part: part.apply(params, {}, x, train=True)[0]
        for part in cut_causal_lm(context, vocabulary, config, policy)
    )
    return Cut(first, recompute(block, config.remat), last)
