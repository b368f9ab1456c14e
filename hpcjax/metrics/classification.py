"""Scores of logits against integer labels, in float32."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from hpcjax.core import checks
from hpcjax.metrics.means import weighted_mean


def token_cross_entropy(
    logits: Float[Array, "*batch labels"],
    labels: Int[Array, "*batch"],
    *,
    label_smoothing: float = 0.0,
) -> Float[Array, "*batch"]:
    """Returns −Σ_c q_c log softmax(logits)_c for each item, in nats.

    q is (1 − s) on the label plus s / C on each of the C classes, s = label_smoothing.

    Args:
      logits: unnormalised log-probabilities, `[..., labels]`.
      labels: class of each item, `[...]`; another number than a class's gives NaN.
      label_smoothing: s, in [0, 1).

    Returns:
      float32 `[...]`.

    Raises:
      ConfigError: logits and labels are of other items.
      ValueError: s is outside [0, 1).

    Examples:
      >>> token_cross_entropy(jnp.zeros((1, 4)), jnp.array([2])).round(3).tolist()
      [1.3860000371932983]
    """
    if not 0 <= label_smoothing < 1:
        raise ValueError(
            f"label_smoothing must be in [0, 1): got label_smoothing={label_smoothing}"
        )
    _check_items(logits, labels)
    wide = logits.astype(jnp.float32)
    # log softmax(z)_c = z_c − log Σ exp z, and Σ_c q_c = 1: the loss is
    # log Σ exp z − Σ_c q_c z_c, without the [..., labels] array of log-probabilities.
    log_normaliser = jax.nn.logsumexp(wide, axis=-1)
    chosen = jnp.take_along_axis(wide, labels[..., None], axis=-1)[..., 0]
    # Indices below zero would be those of the last classes.
    target = (1 - label_smoothing) * jnp.where(labels < 0, jnp.nan, chosen)
    if label_smoothing:
        target = target + label_smoothing * jnp.mean(wide, axis=-1)
    return log_normaliser - target


def _check_items(logits: jax.Array, labels: jax.Array) -> None:
    """Raises ConfigError unless each item has a label: none is broadcast."""
    rule = "labels must have the shape of logits without the last axis"
    good = logits.shape[:-1] == labels.shape
    checks.require(good, rule, logits=logits.shape, labels=labels.shape)


def cross_entropy(
    logits: Float[Array, "*batch labels"],
    labels: Int[Array, "*batch"],
    weights: Float[Array, "*batch"] | None = None,
    *,
    label_smoothing: float = 0.0,
) -> Float[Array, ""]:
    """Returns the weighted mean of `token_cross_entropy` over all items, in nats.

    Args:
      logits: `[..., labels]`.
      labels: `[...]`.
      weights: `[...]`, zero for items that do not count; None means all ones.
      label_smoothing: share of the target spread evenly over the classes.

    Raises:
      ValueError: label_smoothing is outside [0, 1).

    Examples:
      >>> round(float(cross_entropy(jnp.zeros((2, 10)), jnp.array([3, 7]))), 4)
      2.3026
    """
    losses = token_cross_entropy(logits, labels, label_smoothing=label_smoothing)
    return weighted_mean(losses, weights)


def accuracy(
    logits: Float[Array, "*batch labels"],
    labels: Int[Array, "*batch"],
    weights: Float[Array, "*batch"] | None = None,
) -> Float[Array, ""]:
    """Returns the share of items whose label has the largest logit; of ties, the first.

    It is NaN where logits are, as `error`.

    Args:
      logits: `[..., labels]`.
      labels: `[...]`.
      weights: `[...]`; None means all ones.

    Examples:
      >>> float(accuracy(jnp.eye(4), jnp.array([0, 1, 2, 0])))
      0.75
    """
    _check_items(logits, labels)
    return _share(jnp.argmax(logits, axis=-1) == labels, logits, weights)


def _share(
    chosen: jax.Array, logits: jax.Array, weights: jax.Array | None
) -> jax.Array:
    """Returns the share of items that are chosen, NaN if a logit of one is."""
    # The largest of logits with NaN is the NaN: often the first class, maybe the right.
    lost = jnp.isnan(logits).any(axis=-1)
    return weighted_mean(jnp.where(lost, jnp.nan, chosen.astype(jnp.float32)), weights)


def error(
    logits: Float[Array, "*batch labels"],
    labels: Int[Array, "*batch"],
    weights: Float[Array, "*batch"] | None = None,
) -> Float[Array, ""]:
    """Returns 1 − `accuracy`: the share of items classified wrongly.

    Args:
      logits: `[..., labels]`; an item of which one is NaN makes the share NaN.
      labels: `[...]`.
      weights: `[...]`; None means all ones.

    Examples:
      >>> float(error(jnp.eye(4), jnp.array([0, 1, 2, 0])))
      0.25
    """
    _check_items(logits, labels)
    return _share(jnp.argmax(logits, axis=-1) != labels, logits, weights)


def perplexity(mean_cross_entropy: Float[Array, "*batch"]) -> Float[Array, "*batch"]:
    """Returns exp of a mean cross-entropy in nats.

    Average the cross-entropy over all tokens first: a mean of the perplexities of parts
    is not the perplexity of their union.

    Args:
      mean_cross_entropy: nats per token.

    Examples:
      >>> float(perplexity(jnp.array(0.0)))
      1.0
    """
    return jnp.exp(mean_cross_entropy.astype(jnp.float32))
