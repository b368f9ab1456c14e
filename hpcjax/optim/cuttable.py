"""Telling whether a transform may work on parts of parameters."""

import functools
import math
import re
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

from hpcjax.core import compat, shards, trees
from hpcjax.core.errors import ConfigError
from hpcjax.core.shards import Specs

NEEDS = (
    "parameters that are spread over devices need an optimizer that works on elements "
    "and, by `cut`, on norms, such as sgd, adamw or lamb"
)
_AXIS, _STEPS = "part", 2


def check_cuttable(
    tx: optax.GradientTransformation, shapes: Any, stepped: Specs
) -> None:
    """Raises ConfigError unless a transform gives parts what it would give the whole.

    Two things are verified. Its state must consist of scalars and of arrays like
    parameters; Jorge's and Shampoo's factors are neither. And it is tried: two steps on
    two halves of small parameters must give the halves of two steps on the whole. The
    global norm of `optax.clip_by_global_norm`, which sums what a device has, does not.

    Args:
      tx: the transform; its rules are for the paths of `shapes`.
      shapes: of the parameters.
      stepped: how they are to be cut.
    """
    _check_state(tx, shapes)
    shapes = _drop_repeated(shapes, stepped)
    rng = np.random.default_rng(0)
    small = {
        path: rng.normal(size=(1 + _STEPS, *_small(stepped, path, leaf)))
        for path, leaf in trees.flatten(shapes).items()
    }
    # The first gradient is large, for whoever clips to do so.
    drawn = [
        trees.unflatten(
            shapes,
            {path: (scale * x[row]).astype("float32") for path, x in small.items()},
        )
        for row, scale in enumerate((1.0, 1e6, 1.0))
    ]
    dims = {path: _dimension(stepped, path, x.ndim - 1) for path, x in small.items()}
    # One program, compiled quickly: to run it takes no time.
    options = compat.quick_compilation(jax.default_backend())
    steps = functools.partial(_try, tx, dims={p: d for p, d in dims.items() if d})
    program = jax.jit(steps).lower(drawn).compile(compiler_options=options)
    whole, halves = jax.device_get(program(drawn))
    for path, expected in trees.flatten(whole).items():
        given = trees.flatten(halves)[path]
        scale = np.abs(expected).max(initial=0.0)
        if not np.allclose(given, expected, rtol=1e-4, atol=1e-5 * scale):
            raise ConfigError(
                f"{NEEDS}: the updates by this one of a parameter and of its halves "
                f"differ, for {path}"
            )


def _check_state(tx: optax.GradientTransformation, shapes: Any) -> None:
    def fits(leaf: Any, like: Any) -> bool:
        return getattr(leaf, "shape", None) == like.shape

    def is_scalar(leaf: Any) -> bool:
        # A key would draw for each part what another one draws for the whole.
        drawn = jnp.issubdtype(getattr(leaf, "dtype", jnp.float32), jax.dtypes.prng_key)
        return math.prod(getattr(leaf, "shape", (0,))) == 1 and not drawn

    state = jax.eval_shape(tx.init, shapes)
    try:
        owners = optax.tree.map_params(
            tx.init, fits, state, shapes, transform_non_params=is_scalar
        )
    except (IndexError, TypeError, ValueError) as error:
        raise ConfigError(f"{NEEDS}: it is not told what of its state is so") from error
    wrong = [path for path, good in trees.flatten(owners).items() if not good]
    if wrong:
        raise ConfigError(
            f"{NEEDS}: the state of this one holds what is neither a number nor like a "
            f"parameter, {wrong[:3]}"
        )


def _drop_repeated(shapes: Any, stepped: Specs) -> Any:
    """Masks parameters that differ from an earlier one by numbers in the path alone.

    So a deep network takes no longer. As in a part of `optax.partition` the rules of
    the transform are valid for those that are left.
    """
    seen, kept = set(), {}
    for path, leaf in trees.flatten(shapes).items():
        dim = _dimension(stepped, path, leaf.ndim)
        kind = re.sub(r"\d+", "", path), leaf.ndim, dim
        kept[path] = optax.MaskedNode() if kind in seen else leaf
        seen.add(kind)
    return trees.unflatten(shapes, kept)


def _dimension(stepped: Specs, path: str, ndim: int) -> int:
    """Returns the first dimension that is cut, counted from the last; 0 for none."""
    return next((dim for dim, _ in shards.list_cuts(stepped, path, ndim)), 0)


def _small(stepped: Specs, path: str, leaf: Any) -> tuple[int, ...]:
    """Returns a small shape of as many dimensions; the one that is cut is 4."""
    dim = _dimension(stepped, path, leaf.ndim)
    return tuple(4 if at - leaf.ndim == dim else 2 for at in range(leaf.ndim))


def _try(
    tx: optax.GradientTransformation, drawn: list[Any], dims: dict[str, int]
) -> tuple[Any, Any]:
    """Returns the updates of two steps, of the whole and of two halves joined."""
    cut = dict.fromkeys(dims, (_AXIS,))
    update = optax.with_extra_args_support(tx).update
    params, *grads = drawn

    def steps(state: Any, params: Any, grads: Any, **told: Any) -> list[Any]:
        found = []
        for number, gradient in enumerate(grads):
            updates, state = update(
                gradient,
                state,
                params,
                value=1.0,
                step=number,
                loss_terms=1.0,
                **told,
            )
            found.append(updates)
        return found

    state = tx.init(params)
    specs = {
        path: PartitionSpec(*[None] * (leaf.ndim + dims[path]), _AXIS)
        for path, leaf in trees.flatten(params).items()
        if path in dims
    }
    tree = shards.spec_tree(specs, params)
    given = (state, params, grads)
    places = (shards.state_specs(tx, params, state, specs), tree, [tree] * len(grads))
    halves = jax.tree.map(_halve, given, places)
    run = jax.vmap(lambda s, p, g: steps(s, p, g, cut=cut), axis_name=_AXIS)
    return steps(*given), jax.tree.map(_join, run(*halves), places[2])


def _halve(whole: Any, spec: PartitionSpec) -> Any:
    """Returns both halves of what is cut, or two copies: `[2, ...]`."""
    if _AXIS not in spec:
        return jnp.stack([whole, whole])
    return jnp.stack(jnp.split(whole, 2, spec.index(_AXIS)))


def _join(halves: Any, spec: PartitionSpec) -> Any:
    """Returns the whole of two halves; of what is not cut both copies."""
    return jnp.concatenate(halves, spec.index(_AXIS)) if _AXIS in spec else halves
