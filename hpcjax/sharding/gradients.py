"""Gradients of one device's part of the batch, inside `shard_map`."""

from collections.abc import Callable
from typing import Any

import jax

from hpcjax.core.varying import Axes, vary


def local_value_and_grad(
    function: Callable[..., Any], axis: Axes, *, has_aux: bool = False
) -> Callable[..., Any]:
    """Returns `jax.value_and_grad(function)` whose gradients stay on their device.

    Inside `shard_map` JAX returns gradients of replicated parameters already summed
    over the mesh. Transforms that communicate expect local gradients, so parameters are
    marked as varying over `axis` first.

    Args:
      function: differentiated with respect to its first argument.
      axis: the mesh axis, or axes, of the surrounding `shard_map`.
      has_aux: as in `jax.value_and_grad`.
    """
    differentiate = jax.value_and_grad(function, has_aux=has_aux)

    def differentiate_locally(params: Any, *args: Any) -> Any:
        return differentiate(vary(params, axis), *args)

    return differentiate_locally
