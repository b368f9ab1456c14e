"""Telling whether a transform may be given kept values in place of whole arrays."""

from typing import Any

import jax
import optax

from hpcjax.core import trees
from hpcjax.core.deferred import is_deferred
from hpcjax.optim.admission import check_compressible
from hpcjax.optim.sparse_state._pruned import map_pruned


def check_elementwise(tx: optax.GradientTransformation, params: Any) -> None:
    """Raises ConfigError unless a transform needs neither shapes nor order of elements.

    It may use norms of arrays and of the whole tree, as LAMB and clipping do; see
    `optim.admission.check_compressible`.

    Args:
      tx: the transform.
      params: compressed parameters, or their shapes.
    """
    whole = map_pruned(lambda node: _float32(node.positions.shape), params, dense=_like)
    kept = map_pruned(
        lambda node: _float32((*node.positions.lead, node.positions.kept)),
        params,
        dense=_like,
    )
    stacked = {
        path: len(node.positions.stack)
        for path, node in trees.flatten(params, is_deferred).items()
        if is_deferred(node)
    }
    check_compressible(tx, whole, kept, stacked)


def _float32(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def _like(leaf: Any) -> jax.ShapeDtypeStruct:
    return _float32(leaf.shape)
