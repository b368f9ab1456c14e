"""Rotary position embedding, the rotate-half form."""

import jax.numpy as jnp
from jaxtyping import Array, Float, Int


def rope(
    x: Float[Array, "batch time heads head_dim"],
    positions: Int[Array, "batch time"],
    *,
    theta: float = 1e4,
    frequencies: Float[Array, " half"] | None = None,
) -> Float[Array, "batch time heads head_dim"]:
    """Rotates the pairs (x_i, x_{i+d/2}) by the angle position · theta^(−2i/d).

    The scalar product of two rotated vectors depends on their positions only through
    the difference of these. Angles are float32; the result has the dtype of x.

    Args:
      x: queries or keys, `[batch, time, heads, head_dim]`, head_dim = d even.
      positions: `[batch, time]`.
      theta: base of the geometric sequence of wavelengths.
      frequencies: angle per position of each pair, `[head_dim / 2]`, in place of
        theta^(−2i/d), for instance rescaled to longer contexts.

    Raises:
      ValueError: head_dim is odd.

    References:
      Su et al.: RoFormer, 2021, §3.4.2, which pairs neighbours (x_{2i}, x_{2i+1}).

    Examples:
      >>> x = jnp.ones((1, 1, 1, 2))
      >>> rope(x, jnp.zeros((1, 1), jnp.int32)).tolist()
      [[[[1.0, 1.0]]]]
    """
    head_dim = x.shape[-1]
    if head_dim % 2:
        raise ValueError(f"head_dim must be even for rope: got head_dim={head_dim}")
    if frequencies is None:
        frequencies = rope_frequencies(head_dim, theta)
    angle = positions.astype(jnp.float32)[:, :, None, None] * frequencies
    cosine, sine = jnp.cos(angle), jnp.sin(angle)
    # [cos −sin; sin cos] applied to every pair at once, since pairs lie d/2 apart.
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = (first * cosine - second * sine, second * cosine + first * sine)
    return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


def rope_frequencies(head_dim: int, theta: float = 1e4) -> Float[Array, " half"]:
    """Returns theta^(−2i/d) for i = 0 … d/2 − 1, float32.

    Examples:
      >>> rope_frequencies(4, 100.0).round(3).tolist()
      [1.0, 0.10000000149011612]
    """
    half = head_dim // 2
    return theta ** (-jnp.arange(half, dtype=jnp.float32) / half)
