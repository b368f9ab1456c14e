"""Logits that are never whole in memory."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpcjax import layers
from hpcjax.core.structs import pytree, static


@pytree
class ChunkedLogits:
    """The product hidden · kernel, formed for a few places of time at once.

    Logits `[batch, time, vocabulary]` in float32 are the largest array of a language
    model's training step. Here a chunk of them is formed, used and dropped, and formed
    again in the backward pass.

    Attributes:
      hidden: what the head is given, `[batch, time, width]`.
      kernel: the head's, `[width, vocabulary]`.
      chunk: places of time at once.
      compute: dtype of the product's operands.
      output: dtype of the logits.
    """

    hidden: Float[Array, "batch time width"]
    kernel: Float[Array, "width vocabulary"]
    chunk: int = static()
    compute: str = static(default="float32")
    output: str = static(default="float32")

    def each(self, function: Callable[..., Any], *rows: Array) -> Any:
        """Applies `(logits, *rows) -> tree of [batch, time]`, chunk by chunk.

        Args:
          function: acts on each place alone.
          rows: arrays `[batch, time, ...]`, cut as the logits are.

        Returns:
          What it gives, for all places.
        """
        time = self.hidden.shape[1]
        count = -(-time // self.chunk)

        def cut(rows: jax.Array) -> jax.Array:
            more = [(0, 0)] * rows.ndim
            more[1] = (0, count * self.chunk - time)
            shape = (len(rows), count, self.chunk, *rows.shape[2:])
            return jnp.moveaxis(jnp.pad(rows, more).reshape(shape), 1, 0)

        def whole(rows: jax.Array) -> jax.Array:
            joined = jnp.moveaxis(rows, 0, 1)
            return joined.reshape(len(joined), -1, *rows.shape[3:])[:, :time]

        @jax.checkpoint
        def one(parts: tuple[jax.Array, ...]) -> Any:
            hidden, *given = parts
            logits = layers.dense(
                hidden, self.kernel, compute=self.compute, output=self.output
            )
            return function(logits, *given)

        parts = tuple(cut(array) for array in (self.hidden, *rows))
        return jax.tree.map(whole, jax.lax.map(one, parts))
