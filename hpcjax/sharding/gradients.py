"""Gradients of one device's part of the batch, inside `shard_map`."""

from collections.abc import Callable
from typing import Any

import jax


def varying_axes(leaf: Any) -> frozenset[str]:
    """Returns the manual mesh axes along which `leaf` may differ."""
    return frozenset(jax.typeof(leaf).manual_axis_type.varying)


def vary(tree: Any, axis: str) -> Any:
    """Marks every leaf as differing along `axis`; values are unchanged."""

    def mark(leaf: Any) -> Any:
        if axis in varying_axes(leaf):
            return leaf
        return jax.lax.pcast(leaf, axis, to="varying")

    return jax.tree.map(mark, tree)


def local_value_and_grad(
    function: Callable[..., Any], axis: str, *, has_aux: bool = False
) -> Callable[..., Any]:
    """Returns `jax.value_and_grad(function)` whose gradients stay on their device.

    With replicated parameters JAX would return gradients already summed over `axis`;
    transforms that communicate expect the local ones.

    Args:
      function: differentiated in its first argument.
      axis: the mesh axis of the surrounding `shard_map`.
      has_aux: as in `jax.value_and_grad`.
    """
    differentiate = jax.value_and_grad(function, has_aux=has_aux)

    def local(params: Any, *args: Any) -> Any:
        return differentiate(vary(params, axis), *args)

    return local
