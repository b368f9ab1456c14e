"""What each layer's backward pass costs, by XLA's count of operations."""

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

    A layer's are those that a backward pass down to it has more than one that stops
    above it. Programs are lowered for that, not compiled; the body of a loop counts
    once.

    Args:
      function: `(params, *arguments) -> loss`.
      layers: of the parameters, from `optim.layers_of`.
      params: parameters, or their shapes.
      *arguments: the function's others, or their shapes.

    Examples:
      >>> import jax.numpy as jnp
      >>> def loss(p, x):
      ...     return ((x @ p["a"]) @ p["b"]).sum()
      >>> params = {"a": jnp.ones((8, 8)), "b": jnp.ones((8, 8))}
      >>> found = optim.layers_of(loss, params, jnp.ones((8, 8)))
      >>> low, high = backward_flops(loss, found, params, jnp.ones((8, 8)))
      >>> low > 1.9 * high  # two products, and one
      True
    """
    blocks = optim.cut_layers(layers, range(1, len(layers)))
    programs: list[Any] = [function]
    for role in range(1, len(layers) + 1):
        programs.append(optim.partial_value_and_grad(function, blocks, role))
    flops = [_flops(program, params, *arguments) for program in programs]
    below = [after - before for before, after in itertools.pairwise(flops)]
    return tuple(max(0.0, cost) for cost in reversed(below))


def _flops(function: Callable[..., Any], *arguments: Any) -> float:
    analysis: Any = jax.jit(function).lower(*arguments).cost_analysis()
    return float((analysis or {}).get("flops", 0.0))
