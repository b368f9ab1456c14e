"""Transforms that compute in float32 or better, whatever the parameters' dtype is."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from hpcjax.core import trees
from hpcjax.core.method import take_extra_args


def statistics_dtype(dtype: Any) -> Any:
    """Returns float32 for 16-bit and smaller dtypes, otherwise the dtype itself.

    Examples:
      >>> statistics_dtype(jnp.bfloat16)
      dtype('float32')
    """
    dtype = jnp.dtype(dtype)
    return dtype if dtype.itemsize >= 4 else jnp.dtype("float32")


def check_real(params: Any) -> None:
    """Raises TypeError naming the parameters that are not real floating arrays.

    Raises ValueError if two parameters have one path, as in `{"a/b": x, "a": {"b":
    y}}`.
    """
    if len(trees.flatten(params)) != len(jax.tree.leaves(params)):
        raise ValueError(
            f"paths of parameters must differ: got {list(trees.flatten(params))}"
        )
    wrong = [
        f"{path} ({leaf.dtype})"
        for path, leaf in trees.flatten(params).items()
        if not jnp.issubdtype(leaf.dtype, jnp.floating)
    ]
    if wrong:
        raise TypeError(f"parameters must be real floating point: got {wrong}")


def raise_precision(tree: Any) -> Any:
    """Casts arrays, or `ShapeDtypeStruct`s, below float32 to float32.

    Examples:
      >>> raise_precision({"w": jnp.ones(2, jnp.bfloat16)})["w"].dtype
      dtype('float32')
    """

    def cast(leaf: Any) -> Any:
        dtype = statistics_dtype(leaf.dtype)
        if leaf.dtype == dtype:
            return leaf
        if isinstance(leaf, jax.ShapeDtypeStruct):
            return jax.ShapeDtypeStruct(leaf.shape, dtype)
        return leaf.astype(dtype)

    return jax.tree.map(cast, tree)


def in_full_precision(
    inner: optax.GradientTransformation,
) -> optax.GradientTransformationExtraArgs:
    """Runs `inner` in float32 or better and returns updates in the gradients' dtype.

    Its state, such as momenta, is then kept in float32 for bfloat16 parameters, and
    the updates are rounded once, at the end.

    Args:
      inner: the transform to run; the returned transform has its state, unwrapped.

    Returns:
      The same transform for parameters of any real floating dtype.

    Raises:
      TypeError: at init, for complex or integer parameters.

    Examples:
      >>> tx = in_full_precision(optax.trace(0.9))
      >>> tx.init({"w": jnp.ones(2, jnp.bfloat16)}).trace["w"].dtype
      dtype('float32')
    """
    inner = take_extra_args(inner=inner)

    def init(params):
        check_real(params)
        return inner.init(raise_precision(params))

    def update(updates, state, params=None, **extra_args):
        new, state = inner.update(
            raise_precision(updates), state, raise_precision(params), **extra_args
        )
        return jax.tree.map(lambda n, u: n.astype(u.dtype), new, updates), state

    return optax.GradientTransformationExtraArgs(init, update)
