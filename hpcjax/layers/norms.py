"""Normalisation: over features, groups of channels, or the batch.

All is float32 inside, and float64 of what is.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jaxtyping import Array, Bool, Float

from hpcjax.core import shards
from hpcjax.core.varying import Axes, vary


def layer_norm(
    x: Float[Array, "*batch dim"],
    scale: Float[Array, " dim"] | shards.Part,
    bias: Float[Array, " dim"] | shards.Part | None = None,
    *,
    eps: float = 1e-5,
) -> Float[Array, "*batch dim"]:
    """Computes (x − mean) / √(variance + eps) · scale + bias over the last axis.

    Args:
      x: `[..., dim]`, any floating dtype; the result has the same.
      scale: `[dim]`; of a `core.shards.Part`, inside `shard_map`, x is this device's
        part, and moments are those of all parts.
      bias: `[dim]`, or None for no shift.
      eps: added to the (biased) variance.

    Examples:
      >>> layer_norm(jnp.array([-1.0, 1.0]), jnp.ones(2), eps=0.0).tolist()
      [-1.0, 1.0]
    """
    wide = _wide(x)
    scale, axes = shards.open_part(scale, -1)
    bias, _ = shards.open_part(bias, -1)
    centred = wide - _mean(wide, axes)
    variance = _mean(jnp.square(centred), axes)
    y = centred * lax.rsqrt(variance + eps) * _wide(scale)
    if bias is not None:
        y = y + _wide(bias)
    return y.astype(x.dtype)


def rms_norm(
    x: Float[Array, "*batch dim"],
    scale: Float[Array, " dim"] | shards.Part,
    *,
    eps: float = 1e-5,
) -> Float[Array, "*batch dim"]:
    """Computes x / √(mean(x²) + eps) · scale over the last axis.

    Args:
      x: `[..., dim]`, any floating dtype; the result has the same.
      scale: `[dim]`, or a `core.shards.Part` as for `layer_norm`.
      eps: added to the mean square.

    Examples:
      >>> rms_norm(jnp.array([3.0, -3.0]), jnp.ones(2), eps=0.0).tolist()
      [1.0, -1.0]
    """
    wide = _wide(x)
    scale, axes = shards.open_part(scale, -1)
    mean_square = _mean(jnp.square(wide), axes)
    y = wide * lax.rsqrt(mean_square + eps) * _wide(scale)
    return y.astype(x.dtype)


def _wide(x: jax.Array) -> jax.Array:
    """Returns it in float32, or in float64 if it is."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def _mean(x: jax.Array, axes: tuple[str, ...]) -> jax.Array:
    """Returns the mean over the last axis, of which devices may have parts."""
    mean = jnp.mean(x, axis=-1, keepdims=True)
    return shards.received(lax.pmean(mean, axes)) if axes else mean


def group_norm(
    x: Float[Array, "batch *space channels"],
    scale: Float[Array, " channels"],
    bias: Float[Array, " channels"],
    *,
    groups: int,
    eps: float = 1e-5,
    axis_name: Axes | None = None,
) -> Float[Array, "batch *space channels"]:
    """Normalises each example over space and over the channels of one group.

    Args:
      x: `[batch, ..., channels]`, any floating dtype; the result has the same.
      scale: `[channels]`.
      bias: `[channels]`.
      groups: number of groups of neighbouring channels.
      eps: added to the (biased) variance.
      axis_name: mesh axes over which the space of examples is cut into equal blocks.

    Raises:
      ValueError: `groups` does not divide the channels.
    """
    channels = x.shape[-1]
    if groups < 1 or channels % groups:
        raise ValueError(
            f"groups must divide channels: got groups={groups}, channels={channels}"
        )
    split = _wide(x).reshape(*x.shape[:-1], groups, channels // groups)
    # [batch, ..., groups, channels / groups]: all but the batch and the groups.
    axes = (*range(1, x.ndim - 1), x.ndim)

    def mean(values: jax.Array) -> jax.Array:
        found = jnp.mean(values, axis=axes, keepdims=True)
        return lax.pmean(found, axis_name) if axis_name else found

    centred = split - mean(split)
    variance = mean(jnp.square(centred))
    y = (centred * lax.rsqrt(variance + eps)).reshape(x.shape)
    y = y * _wide(scale) + _wide(bias)
    return y.astype(x.dtype)


class RunningStatistics(NamedTuple):
    """Statistics for batch normalisation in evaluation, each `[channels]`, float32."""

    mean: jax.Array
    variance: jax.Array


def batch_statistics(
    x: Float[Array, "*batch channels"],
    axis_name: Axes | None = None,
    where: Bool[Array, "..."] | None = None,
) -> RunningStatistics:
    """Returns the mean and biased variance of each channel over all other axes.

    Args:
      x: `[..., channels]`.
      axis_name: mesh axes over which the batch, or the space of examples, is split, to
        get the statistics of the whole (devices must hold equally much); None: this
        device's part.
      where: broadcast to `[..., 1]`, what counts, such as points that are not past the
        end of what is cut; None for all. Devices may hold differently much of it.
    """
    wide = _wide(x)
    axes = tuple(range(x.ndim - 1))
    share = None
    if where is not None:
        where = jnp.broadcast_to(where, (*x.shape[:-1], 1))
        share = jnp.mean(where, dtype=jnp.float32)
        share = lax.pmean(vary(share, axis_name), axis_name) if axis_name else share

    def mean(values: jax.Array) -> jax.Array:
        kept = values if where is None else jnp.where(where, values, 0)
        found = jnp.mean(kept, axis=axes)
        found = found if axis_name is None else lax.pmean(found, axis_name)
        return found if share is None else found / share

    # Two passes: E[x²] − E[x]² loses all digits where the mean is large.
    centre = mean(wide)
    return RunningStatistics(centre, mean(jnp.square(wide - centre)))


def batch_norm(
    x: Float[Array, "*batch channels"],
    scale: Float[Array, " channels"],
    bias: Float[Array, " channels"],
    running: RunningStatistics,
    *,
    train: bool,
    momentum: float = 0.9,
    eps: float = 1e-5,
    axis_name: Axes | None = None,
    where: Bool[Array, "..."] | None = None,
) -> tuple[Float[Array, "*batch channels"], RunningStatistics]:
    """Normalises each channel by the batch's statistics, or by the running ones.

    In training, running ← momentum · running + (1 − momentum) · batch, where the batch
    variance is the biased one (divided by N, not N − 1).

    Args:
      x: `[..., channels]`, any floating dtype; the result has the same.
      scale: `[channels]`.
      bias: `[channels]`.
      running: the running statistics; used, and left unchanged, in evaluation.
      train: whether to normalise by the batch's statistics and to accumulate them.
      momentum: weight of the old running statistics.
      eps: added to the variance.
      axis_name: mesh axes to take the batch's statistics over, see `batch_statistics`.
      where: what counts for them, likewise.

    Returns:
      The normalised x and the new running statistics. Without `axis_name` these differ
      from device to device inside `shard_map`: average them.
    """
    used = batch_statistics(x, axis_name, where) if train else running
    if train:
        # The batch's statistics have a gradient in y; the running ones have none.
        running = RunningStatistics(
            *(
                (momentum * old + (1 - momentum) * lax.stop_gradient(new)).astype(
                    old.dtype
                )
                for old, new in zip(running, used, strict=True)
            )
        )
    factor = _wide(scale) * lax.rsqrt(used.variance + eps)
    y = (_wide(x) - used.mean) * factor + _wide(bias)
    return y.astype(x.dtype), running
