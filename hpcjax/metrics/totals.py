"""Scores of outputs: sums over the scored items of a batch."""

import math
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpcjax.core import checks
from hpcjax.core.errors import ConfigError
from hpcjax.core.method import Batch, Totals
from hpcjax.metrics.classification import token_cross_entropy
from hpcjax.metrics.crps import crps_gaussian
from hpcjax.metrics.forecast import is_close
from hpcjax.metrics.means import weighted_mean
from hpcjax.metrics.segmentation import dice
from hpcjax.metrics.structure import ms_ssim

# Half the width of the middle 80 % of a Gaussian, in deviations.
_MIDDLE = 1.2815515655446004
_TOP = 5
_POWERS = {"inside": 0, **dict.fromkeys(("square", "further", "variance", "spread"), 2)}


def label_totals(
    logits: "Float[Array, 'batch *time labels'] | Any", batch: Batch
) -> Totals:
    """Sums cross-entropy (nats) and errors over the labels of a batch.

    Args:
      logits: unnormalised log-probabilities; or what computes them in chunks and gives
        each to a function, such as `models.ChunkedLogits`; or what scores labels
        itself, such as `models.SplitLogits`.
      batch: int labels `"y"` [batch, *time], in validation `"weight"` [batch], and
        where some labels are not scored `"scored"` [batch, *time], 1 or 0.
    """
    labels, weight = batch["y"], _weigh(batch)
    if hasattr(logits, "scores"):
        losses, wrong = logits.scores(labels)
    elif hasattr(logits, "each"):
        losses, wrong = logits.each(_scores, labels)
    else:
        losses, wrong = _scores(logits, labels)
    sums = {"loss": jnp.sum(weight * losses), "error": jnp.sum(weight * wrong)}
    return Totals(sums, jnp.sum(weight))


def class_totals(logits: Float[Array, "batch *places labels"], batch: Batch) -> Totals:
    """Sums what `label_totals` does, and `"top5_error"`, of labels not among the first.

    Logits that are equal to a label's are before it, so that equal ones say nothing.

    Args:
      logits: unnormalised log-probabilities.
      batch: see `label_totals`.
    """
    found, weight = label_totals(logits, batch), _weigh(batch)
    own = jnp.take_along_axis(logits, batch["y"][..., None], axis=-1)
    missed = jnp.sum(logits < own, axis=-1) < logits.shape[-1] - _TOP
    sums = {**found.sums, "top5_error": jnp.sum(weight * missed)}
    return found._replace(sums=sums)


def _weigh(batch: Batch) -> jax.Array:
    """Returns the weight of each label, float32."""
    labels = batch["y"]
    weight = jnp.asarray(batch.get("scored", jnp.ones(labels.shape)), jnp.float32)
    if "weight" in batch:
        # One weight for each example, broadcast over its labels. It is zero for the
        # examples that pad the last batch.
        rows = batch["weight"]
        weight = weight * rows.reshape(rows.shape + (1,) * (labels.ndim - 1))
    return weight


def positive_totals(logits: Float[Array, "batch *places 2"], batch: Batch) -> Totals:
    """Sums cross-entropy (nats) over labels, and counts the positive ones.

    Of a whole set, F1 is 2 · true / (predicted + actual).

    Args:
      logits: unnormalised log-probabilities of no and yes.
      batch: int labels `"y"` [batch, *places], 0 or 1; `"scored"` and `"weight"` as
        for `label_totals`.

    Returns:
      Sums `"loss"`; `"true"`, labels 1 that are predicted so; `"predicted"`, all that
      are; and `"actual"`, all labels 1. The count is the number of scored labels.
    """
    labels, weight = batch["y"], _weigh(batch)
    losses, _ = _scores(logits, labels)
    predicted = jnp.where(jnp.isnan(losses), losses, jnp.argmax(logits, axis=-1))
    each = {
        "loss": losses,
        "true": predicted * labels,
        "predicted": predicted,
        "actual": labels,
    }
    sums = {name: jnp.sum(weight * values) for name, values in each.items()}
    return Totals(sums, jnp.sum(weight))


def _scores(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns cross-entropies, and 1.0 where the largest logit is not the label's.

    Both are NaN where the first is: the largest of logits with NaN says nothing.
    """
    losses = token_cross_entropy(logits, labels)
    wrong = jnp.argmax(logits, axis=-1) != labels
    return losses, jnp.where(jnp.isnan(losses), losses, wrong)


def masked_language_totals(outputs: Any, batch: Batch) -> Totals:
    """Sums BERT's two cross-entropies (nats) and errors over the scored tokens.

    The loss of a scored token is its own cross-entropy plus that of its example's
    sentence order. All sums are thus over tokens, and sums of parts of a batch can be
    added. The mean of `"order_loss"` weights examples by their number of scored tokens,
    which is the same for all sequences of one length.

    Args:
      outputs: logits of both heads, `tokens` and `order`, as `models.BertOutputs`.
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
    logits: "Float[Array, 'batch *space classes'] | Any",
    batch: Batch,
    *,
    dice_weight: float = 1.0,
) -> Totals:
    """Sums over images of cross-entropy per pixel, the soft Dice loss, and scores.

    The loss of an image is mean(−log p) + w (1 − D), where D is the mean of the soft
    Dice score (2 Σ p t + 1) / (Σ p + Σ t + 1) over all classes except the first, the
    background.

    Args:
      logits: unnormalised log-probabilities, `[batch, ..., classes]`; or a block of
        them with the mesh axes over which images are cut, `models.CutPixels`, of which
        D is the whole image's and all else the block's.
      batch: int labels `"y"` [batch, ...] and, in validation, `"weight"` [batch].
      dice_weight: w.

    Returns:
      Sums `"loss"`; `"error"`, the share of wrong pixels; `"overlap"`, twice the share
      of foreground pixels that are right; and `"area"`, the share of predicted plus
      that of labelled foreground pixels, so that overlap / area is the Dice score of
      all images together. The count is the number of images.
    """
    logits, axes = getattr(logits, "values", logits), getattr(logits, "axes", ())
    labels, classes = batch["y"], logits.shape[-1]
    weight = batch.get("weight", jnp.ones(len(labels), jnp.float32))
    target = jax.nn.one_hot(labels, classes)
    predicted = jax.nn.one_hot(jnp.argmax(logits, axis=-1), classes)
    # `predicted · target` is 1 where a pixel of that class is right; the sum over all
    # classes therefore counts the right pixels.
    space = tuple(range(1, labels.ndim))
    soft = dice(
        jax.nn.softmax(logits.astype(jnp.float32)), target, smooth=1.0, axes=axes
    )
    entropy = jnp.mean(token_cross_entropy(logits, labels), axis=space)
    right, both = (
        jnp.sum(values, axis=space)
        for values in (predicted * target, predicted + target)
    )
    pixels = math.prod(labels.shape[1:])
    per_image = {
        "loss": entropy + dice_weight * (1 - jnp.mean(soft[:, 1:], axis=1)),
        "error": 1 - jnp.sum(right, axis=1) / pixels,
        "overlap": 2 * jnp.sum(right[:, 1:], axis=1) / pixels,
        "area": jnp.sum(both[:, 1:], axis=1) / pixels,
    }
    lost = jnp.isnan(entropy)
    per_image = {n: jnp.where(lost, jnp.nan, each) for n, each in per_image.items()}
    sums = {name: jnp.sum(weight * values) for name, values in per_image.items()}
    return Totals(sums, jnp.sum(weight))


def click_totals(logits: Float[Array, " batch"], batch: Batch) -> Totals:
    """Sums binary cross-entropy (nats) and errors over examples.

    Args:
      logits: log-odds of label 1.
      batch: labels `"y"` [batch], 0 or 1, and in validation `"weight"` [batch].
    """
    labels = batch["y"].astype(jnp.float32)
    checks.require_same_shape(logits=logits, labels=labels)
    weight = batch.get("weight", jnp.ones(labels.shape, jnp.float32))
    # log(1 + exp(z)) − y z: the sigmoid's logarithms, without their overflow.
    losses = jax.nn.softplus(logits) - labels * logits
    wrong = jnp.where(jnp.isnan(losses), losses, (logits > 0) != (labels > 0))
    sums = {"loss": jnp.sum(weight * losses), "error": jnp.sum(weight * wrong)}
    return Totals(sums, jnp.sum(weight))


def regression_totals(outputs: Float[Array, "batch numbers"], batch: Batch) -> Totals:
    """Sums over examples of the mean squared error, and of the mean absolute.

    Args:
      outputs: predicted numbers, `[batch, numbers]`.
      batch: `"y"` of the same shape, and in validation `"weight"` [batch].
    """
    checks.require_same_shape(outputs=outputs, y=batch["y"])
    weight = batch.get("weight", jnp.ones(len(outputs), jnp.float32))
    away = outputs.astype(jnp.float32) - batch["y"]
    each = {"loss": jnp.mean(away**2, axis=1), "error": jnp.mean(abs(away), axis=1)}
    sums = {name: jnp.sum(weight * values) for name, values in each.items()}
    return Totals(sums, jnp.sum(weight))


def gaussian_totals(outputs: Any, batch: Batch) -> Totals:
    """Sums over dates of the CRPS of predicted Gaussians, and what tells their spread.

    Args:
      outputs: `mean` and `std` [batch, latitude, longitude], in the target's standard
        unit.
      batch: observations `"y"` likewise; `"spread"`, deviations of members; `"area"`,
        weights of points, which are zero where nothing is observed; `"efi"`, the
        forecast's index of extremes; `"scale"` [batch], the standard unit in the
        target's own; and, in validation, `"weight"` [batch]. Of what the loss is, one
        of these says: `"asked"` [batch, 3], weights of the CRPS and of the squared
        errors of the spread and of the mean, or `"structure"` [batch], the range of the
        spread's MS-SSIM in the target's own unit. Of the further means in
        `outputs.apart` that of number `"fold"` [batch] does not learn from a date, and
        that of number `"around"` is μ there, for the spread to learn; −1 is none.

    Returns:
      Sums over dates of weighted means over points, in the target's own unit: `"loss"`,
      as asked, or 0.16 |error| + 0.84 (1 − MS-SSIM) of the spread; `"crps"`;
      `"eecrps"`, |EFI| times the CRPS; `"square"`, the mean's squared error;
      `"variance"`, the predicted one; `"spread"`, the squared error of the predicted
      deviation; and `"inside"`, the share of the truth in the middle 80 %. The count
      is the number of dates.

    Raises:
      ConfigError: "around" of a model that has no further means.
    """
    area, scale = batch["area"], batch["scale"]
    weight = batch.get("weight", jnp.ones(scale.shape, jnp.float32))
    # A network that learns the spread alone may put out one below zero.
    std = jnp.maximum(outputs.std, 1e-6)
    mean = _choose_mean(outputs, batch)
    error = mean - batch["y"]
    crps = crps_gaussian(mean, std, batch["y"])
    apart = outputs.std - batch["spread"]
    points = {
        "crps": crps,
        "eecrps": jnp.abs(batch["efi"]) * crps,
        "distance": jnp.abs(apart),
        "square": error**2,
        "inside": jnp.where(jnp.isnan(crps), crps, jnp.abs(error) <= _MIDDLE * std),
        "further": _square_further(outputs, batch),
        "variance": outputs.std**2,
        "spread": apart**2,
    }
    dates = {}
    for name, values in points.items():
        found = weighted_mean(values.astype(jnp.float32), area, (-2, -1))
        dates[name] = scale ** _POWERS.get(name, 1) * found
    distance, further = dates.pop("distance"), dates.pop("further")
    if "structure" in batch:
        # What is not scored is as it should be.
        std = jnp.where(area > 0, outputs.std, batch["spread"])
        share = batch["structure"] / scale
        fields = [each / share[:, None, None] for each in (std, batch["spread"])]
        alike = ms_ssim(*fields, data_range=1.0, **_scales(area.shape[1:]))
        dates["loss"] = 0.16 * distance + 0.84 * (1 - alike)
    else:
        first, second, third = batch["asked"].T
        dates["loss"] = first * dates["crps"] + second * dates["spread"]
        dates["loss"] += third * (dates["square"] + further)
    sums = {name: jnp.sum(weight * each) for name, each in dates.items()}
    return Totals(sums, jnp.sum(weight))


def _choose_mean(outputs: Any, batch: Batch) -> jax.Array:
    """Returns μ: of each date of the mean that does not know it, if so is asked."""
    if "around" not in batch:
        return outputs.mean
    if outputs.apart is None:
        raise ConfigError(
            "learn=joint is of a mean that is trained apart: take model=mean_and_spread"
        )
    all_means = jnp.stack([outputs.mean, *outputs.apart])
    own = batch["around"] + 1 if outputs.apart else jnp.zeros_like(batch["around"])
    return jax.lax.stop_gradient(all_means[own, jnp.arange(len(own))])


def _square_further(outputs: Any, batch: Batch) -> jax.Array:
    """Returns squared errors of the further means, but for dates not to be known.

    Each counts as much as if it knew all dates.
    """
    apart = outputs.apart if "fold" in batch else None
    if not apart:
        return jnp.zeros_like(batch["y"])
    errors = (jnp.stack(apart) - batch["y"]) ** 2
    known = batch["fold"] != jnp.arange(len(apart))[:, None]
    share = 1 - 1 / len(apart)
    return jnp.sum(known[:, :, None, None] * errors, axis=0) / share


def _scales(sides: tuple[int, ...]) -> dict[str, Any]:
    """Returns the paper's scales where there is room, else three of five taps."""
    if min(sides) >= 161:
        return {}
    return {"scales": 3, "window": 5, "sigma": 1.0}


def field_totals(
    outputs: "Float[Array, 'batch height width variables'] | Any", batch: Batch
) -> Totals:
    """Sums over examples the squared error of predicted fields, and what compares it.

    Args:
      outputs: predicted fields, or blocks of them, `models.CutPixels`.
      batch: true ones, `"y"`; `"x"`, those that they follow, of the same variables;
        and, in validation, `"weight"` [batch].

    Returns:
      Sums of means over points: `"loss"`, the squared error; `"close"`, the percentage
      of points within 1 % of the truth; and `"persistence"`, the squared error of
      "x" as a prediction. The count is the number of examples.
    """
    x, y = batch["x"].astype(jnp.float32), batch["y"].astype(jnp.float32)
    outputs = getattr(outputs, "values", outputs).astype(jnp.float32)
    weight = batch.get("weight", jnp.ones(len(y), jnp.float32))
    points = {
        "loss": (outputs - y) ** 2,
        "close": 100.0 * is_close(outputs, y, 0.01),
        "persistence": (x - y) ** 2,
    }
    sums = {
        name: jnp.sum(weight * jnp.mean(values, axis=(1, 2, 3)))
        for name, values in points.items()
    }
    return Totals(sums, jnp.sum(weight))
