"""Which of a draft's tokens a target model takes, and the one it adds.

References:
  Leviathan, Kalman and Matias, ICML 2023; Chen et al., arXiv 2302.01318.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpcjax.core.keys import derive

# Below this the residual is rounding: p and q are equal.
_LEAST = 1e-9


class Accepted(NamedTuple):
    """What an iteration emits: the first `count` tokens of the draft, and `token`.

    Attributes:
      count: accepted tokens of the draft, 0 to γ.
      token: the target's own token behind them.
    """

    count: Int[Array, " batch"]
    token: Int[Array, " batch"]


def accept(
    p: Float[Array, "batch ahead_and_1 vocabulary"],
    q: Float[Array, "rows ahead words"],
    draft: Int[Array, "batch ahead"],
    key: jax.Array,
) -> Accepted:
    """Accepts draft tokens so that what is emitted is distributed as the target's.

    Token x̃ᵢ, drawn from qᵢ, is accepted while u qᵢ(x̃ᵢ) < pᵢ(x̃ᵢ) with u uniform in
    [0, 1): with probability min(1, p/q), and never where p is zero. At the first
    rejection a token is drawn from max(0, pᵢ − qᵢ), normalised; behind the last one
    from p.

    Args:
      p: the target's probabilities at the draft's places and the one behind them,
        float32, after the same temperature and cuts as `q`.
      q: the draft's, exactly those that its tokens were drawn from.
      draft: x̃, γ tokens.
      key: must not have been used to draw the draft.

    Raises:
      ValueError: shapes that do not fit.

    Examples:
      >>> p = jnp.array([[[0.0, 1.0], [1.0, 0.0]]])
      >>> accepted = accept(p, p[:, :1], jnp.array([[1]]), jax.random.key(0))
      >>> accepted.count.item(), accepted.token.item()
      (1, 0)
    """
    _check(p, q, draft)
    uniform = jax.random.uniform(derive(key, "accept"), draft.shape, p.dtype)
    asked, given = _at(p[:, :-1], draft), _at(q, draft)
    count = _leading(uniform * given < asked)
    # Nothing was drafted behind the last place: what is left there is p itself.
    behind = jnp.pad(q, ((0, 0), (0, 1), (0, 0)))
    target = _place(p, count)
    residual = jnp.maximum(target - _place(behind, count), 0)
    usable = jnp.sum(residual, axis=-1, keepdims=True) >= _LEAST
    left = jnp.where(usable, residual, target)
    token = jax.random.categorical(derive(key, "residual"), jnp.log(left))
    return Accepted(count, token.astype(draft.dtype))


def accept_greedy(
    p: Float[Array, "batch ahead_and_1 vocabulary"], draft: Int[Array, "batch ahead"]
) -> Accepted:
    """Accepts draft tokens while they are the target's most likely ones.

    The limit of `accept` for a falling temperature, without a division by it.

    Args:
      p: the target's probabilities or logits; of equal ones the first counts.
      draft: γ tokens, such as the draft's most likely ones.

    Examples:
      >>> p = jnp.array([[[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]]])
      >>> accepted = accept_greedy(p, jnp.array([[1, 1]]))
      >>> accepted.count.item(), accepted.token.item()
      (1, 0)
    """
    _check(p, p[:, :-1], draft)
    return _while_equal(jnp.argmax(p, axis=-1).astype(draft.dtype), draft)


def accept_matching(
    p: Float[Array, "batch ahead_and_1 vocabulary"],
    draft: Int[Array, "batch ahead"],
    key: jax.Array,
) -> Accepted:
    """Accepts draft tokens while they equal fresh samples of the target.

    What is emitted is the target's, too, but a token is accepted with probability
    Σ p q only, which is less than `accept`'s.

    Args:
      p: the target's probabilities, as for `accept`.
      draft: γ tokens.
      key: must not have been used to draw the draft.
    """
    _check(p, p[:, :-1], draft)
    sampled = jax.random.categorical(derive(key, "match"), jnp.log(p))
    return _while_equal(sampled.astype(draft.dtype), draft)


def acceptance_rate(
    p: Float[Array, "*batch vocabulary"], q: Float[Array, "*batch vocabulary"]
) -> Float[Array, "*batch"]:
    """Returns α = Σ min(p, q), the probability that a token drawn from q is taken.

    Examples:
      >>> acceptance_rate(jnp.array([0.5, 0.5]), jnp.array([1.0, 0.0])).item()
      0.5
    """
    return jnp.sum(jnp.minimum(p, q), axis=-1)


def _check(p: jax.Array, q: jax.Array, draft: jax.Array) -> None:
    batch, ahead = draft.shape
    if ahead < 1 or p.shape[:2] != (batch, ahead + 1) or q.shape[:2] != (batch, ahead):
        raise ValueError(
            "a draft [batch, ahead] of at least one token needs p [batch, ahead + 1, "
            f"vocabulary] and q [batch, ahead, vocabulary]: got {draft.shape}, "
            f"{p.shape} and {q.shape}"
        )
    if p.shape[-1] != q.shape[-1]:
        raise ValueError(
            "target and draft must have one vocabulary: got "
            f"{p.shape[-1]} and {q.shape[-1]} tokens"
        )


def _at(probabilities: jax.Array, tokens: jax.Array) -> jax.Array:
    return jnp.take_along_axis(probabilities, tokens[..., None], axis=-1)[..., 0]


def _place(values: jax.Array, place: jax.Array) -> jax.Array:
    """Returns `values[b, place[b]]`."""
    index = place.reshape(-1, *[1] * (values.ndim - 1))
    return jnp.take_along_axis(values, index, axis=1)[:, 0]


def _leading(accepted: jax.Array) -> jax.Array:
    """Returns how many are accepted before the first that is not."""
    return jnp.sum(jnp.cumprod(accepted.astype(jnp.int32), axis=1), axis=1)


def _while_equal(wanted: jax.Array, draft: jax.Array) -> Accepted:
    count = _leading(wanted[:, :-1] == draft)
    return Accepted(count, _place(wanted, count))
