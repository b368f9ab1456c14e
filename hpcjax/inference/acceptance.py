"""Acceptance rules of speculative decoding.

A draft model proposes γ tokens. A rule accepts the first few of them and adds one token
of the target model, in such a way that the emitted tokens are distributed as if the
target had drawn them.

References:
  Leviathan, Kalman and Matias, ICML 2023; Chen et al., arXiv 2302.01318.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpcjax.core.keys import derive

# A residual with a smaller sum consists of rounding errors: p and q are equal.
_LEAST_RESIDUAL = 1e-9


class Accepted(NamedTuple):
    """What an iteration emits: the first `count` draft tokens, then `token`.

    Attributes:
      count: number of accepted draft tokens, 0 to γ.
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
    """Accepts draft tokens such that emitted tokens have the target's distribution.

    Token x̃ᵢ, drawn from qᵢ, is accepted if u qᵢ(x̃ᵢ) < pᵢ(x̃ᵢ) with u uniform in
    [0, 1), so with probability min(1, p/q). At the first rejection, a token is drawn
    from the residual max(0, pᵢ − qᵢ), normalised. If all are accepted, a token is drawn
    from p at the position behind them.

    Args:
      p: probabilities of the target at the draft's positions and the one behind them,
        float32, with the same temperature and cuts as `q`.
      q: the probabilities from which the draft tokens were drawn.
      draft: x̃, γ tokens.
      key: must not have been used to draw the draft.

    Raises:
      ValueError: shapes that do not fit together.

    Examples:
      >>> p = jnp.array([[[0.0, 1.0], [1.0, 0.0]]])
      >>> accepted = accept(p, p[:, :1], jnp.array([[1]]), jax.random.key(0))
      >>> accepted.count.item(), accepted.token.item()
      (1, 0)
    """
    _check(p, q, draft)
    uniform = jax.random.uniform(derive(key, "accept"), draft.shape, p.dtype)
    p_draft, q_draft = _pick_tokens(p[:, :-1], draft), _pick_tokens(q, draft)
    # Without a division, as q may be tiny. Strictly less: u can be 0, and with ≤ would
    # then accept a token to which the target gives probability 0.
    count = _count_leading(uniform * q_draft < p_draft)
    # A token v is emitted here with probability q(v) min(1, p(v)/q(v)) = min(p, q)(v)
    # by acceptance and (1 − α) r(v) after a rejection, with α = Σ min(p, q). For the
    # sum to be p(v), the residual must be r = max(0, p − q) / (1 − α).
    # With q = 0 behind the draft, the residual there is p itself.
    q_and_zero = jnp.pad(q, ((0, 0), (0, 1), (0, 0)))
    target = _pick_position(p, count)
    residual = jnp.maximum(target - _pick_position(q_and_zero, count), 0)
    usable = jnp.sum(residual, axis=-1, keepdims=True) >= _LEAST_RESIDUAL
    # `categorical` normalises.
    weights = jnp.where(usable, residual, target)
    token = jax.random.categorical(derive(key, "residual"), jnp.log(weights))
    return Accepted(count, token.astype(draft.dtype))


def accept_greedy(
    p: Float[Array, "batch ahead_and_1 vocabulary"], draft: Int[Array, "batch ahead"]
) -> Accepted:
    """Accepts draft tokens while they are the target's most likely tokens.

    This is the limit of `accept` as the temperature goes to 0.

    Args:
      p: probabilities or logits of the target, as for `accept`; of equal ones, the
        first is the most likely.
      draft: γ tokens, usually the most likely ones of the draft model.

    Examples:
      >>> p = jnp.array([[[0.1, 0.9], [0.8, 0.2], [0.3, 0.7]]])
      >>> accepted = accept_greedy(p, jnp.array([[1, 1]]))
      >>> accepted.count.item(), accepted.token.item()
      (1, 0)
    """
    _check(p, p[:, :-1], draft)
    return _accept_equal(jnp.argmax(p, axis=-1).astype(draft.dtype), draft)


def accept_matching(
    p: Float[Array, "batch ahead_and_1 vocabulary"],
    draft: Int[Array, "batch ahead"],
    key: jax.Array,
) -> Accepted:
    """Accepts draft tokens while they equal fresh samples of the target.

    The emitted tokens are these samples, so that their distribution is the target's. A
    draft token is accepted with probability Σ p q, at most the Σ min(p, q) of `accept`.

    Args:
      p: probabilities of the target, as for `accept`.
      draft: γ tokens.
      key: must not have been used to draw the draft.
    """
    _check(p, p[:, :-1], draft)
    sampled = jax.random.categorical(derive(key, "match"), jnp.log(p))
    return _accept_equal(sampled.astype(draft.dtype), draft)


def acceptance_rate(
    p: Float[Array, "*batch vocabulary"], q: Float[Array, "*batch vocabulary"]
) -> Float[Array, "*batch"]:
    """Returns α = Σ min(p, q), the probability that `accept` accepts a token.

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


def _pick_tokens(probabilities: jax.Array, tokens: jax.Array) -> jax.Array:
    """Returns the probability of each token, `[batch, ahead]`."""
    return jnp.take_along_axis(probabilities, tokens[..., None], axis=-1)[..., 0]


def _pick_position(values: jax.Array, position: jax.Array) -> jax.Array:
    """Returns `values[b, position[b]]`."""
    index = position.reshape(-1, *[1] * (values.ndim - 1))
    return jnp.take_along_axis(values, index, axis=1)[:, 0]


def _count_leading(accepted: jax.Array) -> jax.Array:
    """Counts the accepted tokens of each row before the first rejection."""
    # The running product is 1 up to the first rejection and 0 from there on.
    return jnp.sum(jnp.cumprod(accepted.astype(jnp.int32), axis=1), axis=1)


def _accept_equal(wanted: jax.Array, draft: jax.Array) -> Accepted:
    count = _count_leading(wanted[:, :-1] == draft)
    return Accepted(count, _pick_position(wanted, count))
