"""Logits of a language model, computed in chunks to save memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpcjax import layers
from hpcjax.core.structs import pytree, static


@pytree
class ChunkedLogits:
    """The logits hidden · kernel, not yet multiplied.

    Logits `[batch, time, vocabulary]` in float32 are the largest array of a language
    model's training step. Here they are computed for a chunk of the time axis at a
    time, used and discarded, and computed again in the backward pass.

    Attributes:
      hidden: inputs of the head, `[batch, time, width]`.
      kernel: of the head, `[width, vocabulary]`.
      chunk: length of a chunk of the time axis.
      compute: dtype of the product's operands.
      output: dtype of the logits.
    """

    hidden: Float[Array, "batch time width"]
    kernel: Float[Array, "width vocabulary"]
    chunk: int = static()
    compute: str = static(default="float32")
    output: str = static(default="float32")

    def each(self, function: Callable[..., Any], *rows: Array) -> Any:
        """Applies a function of logits to each position, chunk by chunk.

        Args:
          function: `(logits, *rows) -> tree of [batch, time, ...]`; the result at a
            position must depend on that position only.
          rows: arrays `[batch, time, ...]`, which are cut like the logits.

        Returns:
          The function's results at all positions.
        """
        time = self.hidden.shape[1]
        count = -(-time // self.chunk)

        def cut(rows: jax.Array) -> jax.Array:
            # [batch, time, ...] → [chunks, batch, chunk, ...], time padded with zeros,
            # whose results `join` cuts off again.
            more = [(0, 0)] * rows.ndim
            more[1] = (0, count * self.chunk - time)
            shape = (len(rows), count, self.chunk, *rows.shape[2:])
            return jnp.moveaxis(jnp.pad(rows, more).reshape(shape), 1, 0)

        def join(rows: jax.Array) -> jax.Array:
            chunks = jnp.moveaxis(rows, 0, 1)
            return chunks.reshape(len(chunks), -1, *rows.shape[3:])[:, :time]

        @jax.checkpoint
        def one(parts: tuple[jax.Array, ...]) -> Any:
            hidden, *own_rows = parts
            logits = layers.dense(
                hidden, self.kernel, compute=self.compute, output=self.output
            )
            return function(logits, *own_rows)

        parts = tuple(cut(array) for array in (self.hidden, *rows))
        return jax.tree.map(join, jax.lax.map(one, parts))
