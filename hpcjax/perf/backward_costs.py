"""Floating-point operations of each layer's backward pass, as XLA counts them."""

import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax

from hpcjax import optim


def backward_flops(
    function: Callable[..., Any],
    layers: Sequence[optim.Layer],
    params: Any,
    *arguments: Any,
) -> tuple[float, ...]:
    """Returns the floating-point operations of each layer's backward pass.

    A layer's cost is the difference between a backward pass that ends with this layer
    and one that ends just above it. The programs are lowered but not compiled, and XLA
    counts the body of a loop once.

    Args:
      function: `(params, *arguments) -> loss`.
      layers: the layers of `params`, in forward order, from `optim.layers_of`.
      params: parameters, or their shapes.
      *arguments: the function's other arguments, or their shapes.

    Returns:
      A number for each layer, in the order of `layers`.

    Examples:
      >>> import jax.numpy as jnp
      >>> def loss(p, x):
      ...     return ((x @ p["a"]) @ p["b"]).sum()
      >>> params = {"a": jnp.ones((8, 8)), "b": jnp.ones((8, 8))}
      >>> layers = optim.layers_of(loss, params, jnp.ones((8, 8)))
      >>> first, last = backward_flops(loss, layers, params, jnp.ones((8, 8)))
      >>> first > 1.9 * last  # two products against one
      True
    """
    blocks = optim.cut_layers(layers, range(1, len(layers)))
    # The forward pass alone, then with the backward pass of the last 1, 2, … layers.
    programs: list[Any] = [function]
    for role in range(1, len(layers) + 1):
        programs.append(optim.partial_value_and_grad(function, blocks, role))
    flops = [_count_flops(program, params, *arguments) for program in programs]
    # The first difference belongs to the last layer. The counts are those of different
    # programs, so that a difference can come out slightly negative.
    last_first = [longer - shorter for shorter, longer in itertools.pairwise(flops)]
    return tuple(max(0.0, cost) for cost in reversed(last_first))


def _count_flops(function: Callable[..., Any], *arguments: Any) -> float:
    analysis: Any = jax.jit(function).lower(*arguments).cost_analysis()
    return float((analysis or {}).get("flops", 0.0))
