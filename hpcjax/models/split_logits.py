"""Logits of which each device has a part of the classes."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpcjax.core.structs import pytree, static


@pytree
class SplitLogits:
    """This device's part of logits, inside `shard_map`.

    Attributes:
      values: `[..., classes of this device]`, those of the first device first.
      axes: mesh axes that the classes are split over.
    """

    values: Float[Array, "*batch classes"]
    axes: tuple[str, ...] = static()

    def scores(
        self, labels: Int[Array, "*batch"]
    ) -> tuple[Float[Array, "*batch"], Float[Array, "*batch"]]:
        """Returns cross-entropies, and 1.0 where the largest logit is not the label's.

        −v_label + m + log Σ exp(v − m), where m, the sum and v_label are those of all
        devices. Of equal largest logits the first counts. Float32.

        Args:
          labels: numbers of classes; another number gives NaN, twice.
        """
        values = self.values.astype(jnp.float32)
        count = values.shape[-1]
        first = jax.lax.axis_index(self.axes) * count
        own = jnp.max(jax.lax.stop_gradient(values), -1)
        largest = jax.lax.pmax(own, self.axes)
        powers = jnp.sum(jnp.exp(values - largest[..., None]), -1)
        total = jnp.log(jax.lax.psum(powers, self.axes))
        place = labels - first
        here = (place >= 0) & (place < count)
        found = jnp.take_along_axis(
            values, jnp.clip(place, 0, count - 1)[..., None], axis=-1
        )[..., 0]
        label = jax.lax.psum(jnp.where(here, found, 0), self.axes)
        every = count * jax.lax.axis_size(self.axes)
        best = jnp.where(own == largest, jnp.argmax(values, -1) + first, every)
        wrong = jax.lax.pmin(best, self.axes) != labels
        known = (labels >= 0) & (labels < every)
        losses = jnp.where(known, total + largest - label, jnp.nan)
        return losses, jnp.where(jnp.isnan(losses), losses, wrong)
