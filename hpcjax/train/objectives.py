"""What is minimised: sums over the scored items of a batch, for each kind of data."""

import math

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpcjax import metrics, models
from hpcjax.data.source import Kind
from hpcjax.train.task import Batch, Objective, Totals


def label_totals(
    logits: "Float[Array, 'batch *time labels'] | models.ChunkedLogits", batch: Batch
) -> Totals:
    """Sums cross-entropy (nats) and errors over the labels of a batch.

    Args:
      logits: unnormalised log-probabilities, whole or chunk by chunk.
      batch: int labels `"y"` [batch, *time] and, in validation, `"weight"` [batch].
    """
    labels = batch["y"]
    weight = jnp.ones(labels.shape, jnp.float32)
    if "weight" in batch:
        rows = batch["weight"]
        weight = weight * rows.reshape(rows.shape + (1,) * (labels.ndim - 1))
    if isinstance(logits, models.ChunkedLogits):
        losses, wrong = logits.each(_scores, labels)
    else:
        losses, wrong = _scores(logits, labels)
    sums = {"loss": jnp.sum(weight * losses), "error": jnp.sum(weight * wrong)}
    return Totals(sums, jnp.sum(weight))


def _scores(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns cross-entropies, and 1 where the largest logit is another label's."""
    wrong = (jnp.argmax(logits, axis=-1) != labels).astype(jnp.float32)
    return metrics.token_cross_entropy(logits, labels), wrong


def masked_language_totals(outputs: "models.BertOutputs", batch: Batch) -> Totals:
    """Sums BERT's two cross-entropies (nats) and errors over the scored tokens.

    A scored token counts with its own cross-entropy and with that of the order of its
    example's sentences. So every sum is one over tokens, and parts of a batch can be
    added; the mean of `"order_loss"` weights examples by how many tokens they score,
    which are equally many in sequences of one length.

    Args:
      outputs: logits of both heads.
      batch: int tokens `"y"` [batch, time], float `"scored"` [batch, time] that is 1
        where a token is to be predicted and else 0, int labels `"order"` [batch] and,
        in validation, `"weight"` [batch].

    Returns:
      Sums `"loss"`, of which `"token_loss"` and `"order_loss"` are the parts,
      `"token_error"` and `"order_error"`; the count is the number of scored tokens.
    """
    scored = batch["scored"]
    if "weight" in batch:
        scored = scored * batch["weight"][:, None]
    rows = jnp.sum(scored, axis=1)

    def totals(logits: jax.Array, labels: jax.Array, weight: jax.Array) -> jax.Array:
        losses, wrong = _scores(logits, labels)
        return jnp.stack([jnp.sum(weight * losses), jnp.sum(weight * wrong)])

    token_loss, token_error = totals(outputs.tokens, batch["y"], scored)
    order_loss, order_error = totals(outputs.order, batch["order"], rows)
    sums = {
        "loss": token_loss + order_loss,
        "token_loss": token_loss,
        "token_error": token_error,
        "order_loss": order_loss,
        "order_error": order_error,
    }
    return Totals(sums, jnp.sum(rows))


def segmentation_totals(
    logits: Float[Array, "batch *space classes"],
    batch: Batch,
    *,
    dice_weight: float = 1.0,
) -> Totals:
    """Sums, over images, cross-entropy per pixel and the soft Dice loss, and scores.

    loss = mean over pixels of −log p + w (1 − D), D being the mean over the classes but
    the first, the background, of (2 Σ p t + 1) / (Σ p + Σ t + 1).

    Args:
      logits: unnormalised log-probabilities, `[batch, ..., classes]`.
      batch: int labels `"y"` [batch, ...] and, in validation, `"weight"` [batch].
      dice_weight: w.

    Returns:
      Sums `"loss"`; `"error"`, the share of pixels that are wrong; and of the pixels of
      the foreground `"overlap"`, twice those that are right, and `"area"`, those that
      are predicted and those that are labelled: overlap / area is the Dice score of all
      images together. The count is that of images.
    """
    labels, classes = batch["y"], logits.shape[-1]
    weight = batch.get("weight", jnp.ones(len(labels), jnp.float32))
    target = jax.nn.one_hot(labels, classes)
    found = jax.nn.one_hot(jnp.argmax(logits, axis=-1), classes)
    space = tuple(range(1, labels.ndim))
    soft = metrics.dice(jax.nn.softmax(logits.astype(jnp.float32)), target, smooth=1.0)
    entropy = jnp.mean(metrics.token_cross_entropy(logits, labels), axis=space)
    right, both = (
        jnp.sum(values, axis=space) for values in (found * target, found + target)
    )
    pixels = math.prod(labels.shape[1:])
    per_image = {
        "loss": entropy + dice_weight * (1 - jnp.mean(soft[:, 1:], axis=1)),
        "error": 1 - jnp.sum(right, axis=1) / pixels,
        "overlap": 2 * jnp.sum(right[:, 1:], axis=1),
        "area": jnp.sum(both[:, 1:], axis=1),
    }
    sums = {name: jnp.sum(weight * values) for name, values in per_image.items()}
    return Totals(sums, jnp.sum(weight))


OBJECTIVES: dict[Kind, Objective] = {
    "classification": label_totals,
    "language": label_totals,
    "masked": masked_language_totals,
    "segmentation": segmentation_totals,
}
