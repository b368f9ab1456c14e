"""A worker's model as one vector, as messages hold it, and with what all must begin."""

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hpcjax.core import trees
from hpcjax.hostcomm import Tag, Transport, fingerprint, require_same


def flat(tree: Any) -> jax.Array:
    """Returns all leaves in one vector of float32."""
    leaves = [leaf.astype(jnp.float32).reshape(-1) for leaf in jax.tree.leaves(tree)]
    return jnp.concatenate(leaves)


def like(vector: jax.Array, tree: Any) -> Any:
    """Returns what `flat` has made, in the shapes and dtypes of `tree`."""
    leaves, structure = jax.tree.flatten(tree)
    parts = jnp.split(vector, np.cumsum([leaf.size for leaf in leaves])[:-1])
    shaped = [
        part.reshape(leaf.shape).astype(leaf.dtype)
        for part, leaf in zip(parts, leaves, strict=True)
    ]
    return jax.tree.unflatten(structure, shaped)


def _structure(params: Any) -> str:
    """Returns paths, shapes and dtypes, as a text."""
    leaves = trees.flatten(params).items()
    return " ".join(f"{path}:{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves)


def require_same_start(
    transport: Transport, step: int, vector: Any, params: optax.Params, **settings: Any
) -> None:
    """Raises ConfigError unless all hosts begin with the same parameters and settings.

    Later in a run their parameters may differ, but not the step that they go on with.

    Args:
      transport: ours.
      step: the next one.
      vector: the parameters, flat, and what else is averaged.
      params: whose paths, shapes and dtypes must be the same too.
      settings: of what JSON can hold.
    """
    settings |= {"step": step, "tree of parameters": _structure(params)}
    if step == 0:
        settings |= fingerprint(np.asarray(vector), _structure(params))
    require_same(transport, settings, Tag(transport.new_kind("start")))
