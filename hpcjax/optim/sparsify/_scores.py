"""Scores of weights: those of the largest scores are kept, or grown.

A score is a function `(params, grads, state, key) -> scores`, of trees of one
structure; `state` is the inner optimizer's. An `Accumulated` score has a memory of its
own. Scores of losses and of layers' inputs are in `_at_init` and `_second_order`.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float

from hpcjax.core import checks, keys, trees
from hpcjax.core.errors import ConfigError
from hpcjax.optim.full_precision import raise_precision

Score = Callable[[Any, Any, Any, jax.Array], Any]
MOMENTA = ("trace", "mu", "momentum")


class Accumulated(NamedTuple):
    """A score that is summed up over steps, from zero.

    Attributes:
      add: `(memory, weights, gradients) -> memory`, for one parameter.
    """

    add: Callable[[jax.Array, jax.Array, jax.Array], jax.Array]


def random_score(params: Any, grads: Any, state: Any, key: jax.Array) -> Any:
    """Returns uniform draws, the same whatever other parameters there are."""
    del grads, state
    draws = {
        path: jax.random.uniform(keys.derive(key, path), leaf.shape)
        for path, leaf in trees.flatten(params).items()
    }
    return trees.unflatten(params, draws)


def magnitude_score(params: Any, grads: Any, state: Any, key: jax.Array) -> Any:
    """Returns |w|."""
    del grads, state, key
    return jax.tree.map(jnp.abs, params)


def gradient_score(params: Any, grads: Any, state: Any, key: jax.Array) -> Any:
    """Returns |g|, by which RigL grows."""
    del params, state, key
    return jax.tree.map(jnp.abs, grads)


def taylor_score(params: Any, grads: Any, state: Any, key: jax.Array) -> Any:
    """Returns |g·w|: to first order, the change of the loss by removing w.

    With the gradient of one batch at initialisation this is SNIP's score, up to its
    normalisation.

    References:
      Molchanov et al., ICLR 2017; Lee et al., SNIP, ICLR 2019.
    """
    del state, key
    return jax.tree.map(lambda w, g: jnp.abs(w * g), params, grads)


def momentum_score(params: Any, grads: Any, state: Any, key: jax.Array) -> Any:
    """Returns the magnitude of the inner optimizer's momentum, by which SNFS grows.

    Raises:
      ConfigError: the optimizer has none of the fields of `MOMENTA`.

    References:
      Dettmers and Zettlemoyer, Sparse Networks from Scratch, arXiv 1907.04840, 2019.
    """
    del params, grads, key
    for name in MOMENTA:
        found = [
            value for _, value in optax.tree_utils.tree_get_all_with_path(state, name)
        ]
        if found:
            return jax.tree.map(jnp.abs, found[0])
    raise ConfigError(
        "the score 'momentum' needs an optimizer whose state has one of "
        f"{', '.join(MOMENTA)}"
    )


def lamp(scores: Float[Array, "*shape"]) -> Float[Array, "*shape"]:
    """Returns u² / Σ_{v ≥ u} v² of the magnitudes u of a layer.

    Examples:
      >>> lamp(jnp.array([2.0, 4.0, 4.0, 8.0])).tolist()
      [0.03999999910593033, 0.1666666716337204, 0.1666666716337204, 1.0]
    """
    squares = jnp.square(raise_precision(scores)).ravel()
    ascending = jnp.sort(squares)
    sums = jnp.cumsum(ascending[::-1])[::-1]
    first = jnp.searchsorted(ascending, squares)
    total = sums[first] if squares.size else squares
    return jnp.where(squares > 0, squares / total, 0).reshape(scores.shape)


SCORES: dict[str, Score | Accumulated] = {
    "gradient": gradient_score,
    "magnitude": magnitude_score,
    "momentum": momentum_score,
    # S ← S − g·w: what moves away from zero is kept (Sanh et al., NeurIPS 2020).
    "movement": Accumulated(lambda memory, w, g: memory - g * w),
    "random": random_score,
    "taylor": taylor_score,
    # Σ (g·w)² over steps (Molchanov et al., CVPR 2019).
    "taylor_squared": Accumulated(lambda memory, w, g: memory + jnp.square(g * w)),
}


def find_score(score: str | Score | Accumulated) -> Score | Accumulated:
    """Returns a score by its name; one that is given as a function as it is.

    Raises:
      ConfigError: no score has the name; says which there are.
    """
    if not isinstance(score, str):
        return score
    checks.require_choice("score", score, tuple(SCORES))
    return SCORES[score]


def start_memory(score: Score | Accumulated, params: Any) -> Any:
    """Returns the memory of a score, zeros in float32 or better; () if it has none."""
    if not isinstance(score, Accumulated):
        return ()
    return jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), raise_precision(params))


def remember(score: Score | Accumulated, memory: Any, params: Any, grads: Any) -> Any:
    """Returns the memory after a step."""
    if not isinstance(score, Accumulated):
        return memory
    wide = map(raise_precision, (params, grads))
    return jax.tree.map(score.add, memory, *wide)
