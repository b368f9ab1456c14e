"""Telling whether a transform may be given kept values in place of whole arrays."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from hpcjax.core import trees
from hpcjax.optim.sparse_state._pruned import map_pruned

NEEDS = "compressed state needs an elementwise transform"
# The shape that a pruned parameter, or each layer of a stack, has in the trial.
_MATRIX, _STEPS = (4, 3), 8
# Places of its elements, and of as many zeros, among each other.
_SPREAD = np.random.default_rng(1).permutation(2 * math.prod(_MATRIX))
_ZEROS = math.prod(_MATRIX) <= _SPREAD


def check_elementwise(tx: optax.GradientTransformation, params: Any) -> None:
    """Raises TypeError unless a transform needs neither shapes nor order of elements.

    It may use norms of arrays and of the whole tree, as LAMB and clipping do. Three
    things are verified. Its state must consist of scalars and of arrays like
    parameters; Adafactor's rows and columns, Shampoo's and K-FAC's factors are neither.
    And it is tried: steps on small matrices must give the same as steps on their
    elements in another order; and zeros beside them must change nothing, and stay
    zeros, for that is what a pruned element is. Means, and rates by the number of
    elements, are none such.

    Args:
      tx: the transform.
      params: compressed parameters, or their shapes.
    """
    dense = map_pruned(lambda node: _float32(node.positions.shape), params, dense=_like)
    kept = map_pruned(
        lambda node: _float32((*node.positions.lead, node.positions.kept)),
        params,
        dense=_like,
    )
    _check_state(tx, dense, kept)
    rng = np.random.default_rng(0)
    order = rng.permutation(math.prod(_MATRIX))

    def draw(node: Any) -> np.ndarray:
        rows = (1 + _STEPS, *[2] * len(node.positions.stack), math.prod(_MATRIX))
        values = rng.normal(size=rows).astype(np.float32)
        # Gradients are large, so that they are clipped where anything is.
        values[1:] *= 100
        return values

    drawn = map_pruned(draw, params, dense=lambda _: np.ones(1 + _STEPS, np.float32))
    pruned = map_pruned(lambda _: True, params, dense=lambda _: False)

    def run(form: Callable[[np.ndarray], np.ndarray]) -> dict[str, Any]:
        formed = jax.tree.map(lambda p, x: form(x) if p else x, pruned, drawn)
        return trees.flatten(_run(tx, formed))

    # The parameters' shapes are known while their values may be traced.
    with jax.ensure_compile_time_eval():
        whole = run(lambda x: x.reshape(*x.shape[:-1], *_MATRIX))
        shuffled = run(lambda x: x[..., order])
        beside = run(lambda x: np.concatenate([x, np.zeros_like(x)], -1)[..., _SPREAD])
    for path, is_pruned in trees.flatten(pruned).items():
        if not is_pruned:
            continue
        expected = whole[path].reshape(shuffled[path].shape)[..., order]
        if not np.allclose(expected, shuffled[path], rtol=1e-4, atol=1e-6):
            raise TypeError(
                f"{NEEDS}: of this one the updates of a matrix and of its elements in "
                f"another order differ, for {path}"
            )
        moved, kept = beside[path][..., _ZEROS], beside[path][..., ~_ZEROS]
        alone = whole[path].reshape(shuffled[path].shape)[..., _SPREAD[~_ZEROS]]
        if np.any(moved) or not np.allclose(kept, alone, rtol=1e-4, atol=1e-6):
            raise TypeError(
                f"{NEEDS}: this one moves elements that are pruned, or others by how "
                f"many of them there are, for {path}"
            )


def _check_state(tx: optax.GradientTransformation, dense: Any, kept: Any) -> None:
    whole, short = (
        trees.flatten(jax.eval_shape(tx.init, tree)) for tree in (dense, kept)
    )
    wrong = sorted(whole.keys() ^ short.keys())
    known = [{leaf.shape for leaf in jax.tree.leaves(tree)} for tree in (dense, kept)]
    for path in whole.keys() & short.keys():
        shapes = whole[path].shape, short[path].shape
        scalar = max(map(math.prod, shapes)) == 1
        if not (scalar or (shapes[0] in known[0] and shapes[1] in known[1])):
            wrong.append(f"{path} {list(shapes[0])}")
    if wrong:
        raise TypeError(
            f"{NEEDS}, with a state of scalars and of arrays like parameters: got "
            f"{wrong[:3]}"
        )


def _run(tx: optax.GradientTransformation, drawn: Any) -> Any:
    """Returns the updates of all steps, [steps, ...], of drawn gradients."""
    update = optax.with_extra_args_support(tx).update
    params, *grads = (
        jax.tree.map(lambda x, row=row: jnp.asarray(x[row]), drawn)
        for row in range(1 + _STEPS)
    )
    state, made = tx.init(params), []
    for gradient in grads:
        updates, state = update(gradient, state, params, value=1.0)
        made.append(jax.tree.map(np.asarray, updates))
    return jax.tree.map(lambda *steps: np.stack(steps), *made)


def _float32(shape: tuple[int, ...]) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, "float32")


def _like(leaf: Any) -> jax.ShapeDtypeStruct:
    return _float32(leaf.shape)
