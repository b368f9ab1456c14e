"""Activation functions by name."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpcjax.core import errors


def _gelu_erf(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=False)


def _gelu_tanh(x: jax.Array) -> jax.Array:
    return jax.nn.gelu(x, approximate=True)


ACTIVATIONS: dict[str, Callable[[jax.Array], jax.Array]] = {
    "elu": jax.nn.elu,
    "gelu_erf": _gelu_erf,
    "gelu_tanh": _gelu_tanh,
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "tanh": jnp.tanh,
}


def activation(kind: str, x: Float[Array, "..."]) -> Float[Array, "..."]:
    """Applies an activation function elementwise.

    "relu" is max(x, 0), "elu" x or exp(x) − 1 where x < 0, "tanh" tanh(x), "silu"
    x σ(x), "gelu_erf" x Φ(x) with the normal distribution function Φ, and "gelu_tanh"
    its approximation x/2 (1 + tanh(√(2/π) (x + 0.044715 x³))).

    Args:
      kind: one of the names above.
      x: any shape; the result has the same shape and dtype.

    Raises:
      ValueError: an unknown name.

    Examples:
      >>> activation("relu", jnp.array([-1.0, 2.0])).tolist()
      [0.0, 2.0]
    """
    if kind not in ACTIVATIONS:
        hint = errors.nearest(kind, ACTIVATIONS)
        raise ValueError(f"unknown activation: got kind={kind!r}{hint}")
    return ACTIVATIONS[kind](x)
