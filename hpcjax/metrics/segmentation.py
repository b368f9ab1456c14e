"""Scores of masks, in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpcjax.core import checks


def dice(
    prediction: Float[Array, "batch *space classes"],
    target: Float[Array, "batch *space classes"],
    *,
    smooth: float = 0.0,
    axes: tuple[str, ...] = (),
) -> Float[Array, "batch classes"]:
    """Returns (2 Σ p t + s) / (Σ p + Σ t + s) over space, per example and class.

    p and t are one-hot masks, or p probabilities, which makes it differentiable. Where
    both are empty the score is 1.

    Args:
      prediction: p, `[batch, ..., classes]`, in [0, 1].
      target: t, likewise.
      smooth: s, non-negative.
      axes: mesh axes over which space is cut, along which sums are of all blocks.

    Returns:
      float32 `[batch, classes]`.

    Raises:
      ConfigError: masks of two shapes.
      ValueError: s is negative.

    References:
      Milletari, Navab, Ahmadi: V-Net, arXiv 1606.04797, 2016, §3, with p and not p² in
      the denominator.

    Examples:
      >>> mask = jnp.array([[1.0, 1.0, 0.0, 0.0]])[..., None]
      >>> dice(mask, jnp.roll(mask, 1)).tolist(), dice(0 * mask, 0 * mask).tolist()
      ([[0.5]], [[1.0]])
    """
    if smooth < 0:
        raise ValueError(f"smooth must be non-negative: got smooth={smooth}")
    checks.require_same_shape(prediction=prediction, target=target)
    p, t = prediction.astype(jnp.float32), target.astype(jnp.float32)
    space = tuple(range(1, p.ndim - 1))

    def add(values: jax.Array) -> jax.Array:
        found = jnp.sum(values, axis=space)
        return jax.lax.psum(found, axes) if axes else found

    common = 2 * add(p * t) + smooth
    total = add(p) + add(t) + smooth
    # The inner `where` keeps 0 / 0 out of the branch that is not taken: its NaN would
    # otherwise reach the gradient.
    return jnp.where(total == 0, 1, common / jnp.where(total == 0, 1, total))
