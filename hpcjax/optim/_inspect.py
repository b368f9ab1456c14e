"""Collecting the scalars in an optimizer's state that are worth logging."""

from collections.abc import Iterator
from typing import Any

import jax


def _children(node: Any) -> list[Any]:
    """Returns the direct pytree children of `node`, or `[node]` if it is a leaf."""
    # Everything below `node` counts as a leaf, so flattening stops one level down.
    return jax.tree.leaves(node, is_leaf=lambda child: child is not node)


def _scalars(node: Any) -> Iterator[tuple[str, Any]]:
    """Yields the entries of every `hyperparams` and `metrics` dict, depth first."""
    if hasattr(node, "_fields"):
        for field in ("hyperparams", "metrics"):
            if isinstance(getattr(node, field, None), dict):
                yield from getattr(node, field).items()
    for child in _children(node):
        if child is not node:
            yield from _scalars(child)


def inspect(state: Any) -> dict[str, Any]:
    """Returns every logged scalar of an optimizer's state, by name.

    These are the values that `optax.inject_hyperparams` holds, such as
    `"learning_rate"`, and the `metrics` that transforms of this room keep, such as
    `"jorge_nu"`. A name that occurs again gets a suffix: `"learning_rate_2"`.

    Args:
      state: the state of any chain, masked or partitioned; may be traced.

    Examples:
      >>> import optax
      >>> tx = optax.chain(optax.inject_hyperparams(optax.sgd)(learning_rate=0.5))
      >>> {k: float(v) for k, v in inspect(tx.init({"w": jax.numpy.ones(2)})).items()}
      {'learning_rate': 0.5}
    """
    scalars: dict[str, Any] = {}
    times: dict[str, int] = {}
    for name, value in _scalars(state):
        times[name] = times.get(name, 0) + 1
        scalars[name if times[name] == 1 else f"{name}_{times[name]}"] = value
    return scalars
