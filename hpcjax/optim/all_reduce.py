"""The mean of gradients over a mesh axis, as an optax transform."""

import functools

import jax
import optax

from hpcjax.collectives import map_buckets
from hpcjax.core import checks
from hpcjax.core.varying import Axes, assume_equal, require_axes


def all_reduce_mean(
    axis_name: Axes | None = None, bucket_bytes: int | None = None
) -> optax.GradientTransformationExtraArgs:
    """Averages gradients over one or several mesh axes by an all-reduce.

    Expects local gradients; returns identical updates on every member of `axis_name`.
    The sum is taken in the gradients' dtype, which is also what is communicated.

    Args:
      axis_name: the mesh axis, or axes; with None the gradients pass unchanged.
      bucket_bytes: sends gradients in buckets of at most so many bytes, those of the
        last layers first, see `collectives.fill_buckets`; 25 000 000 is usual. None
        hands all of them to XLA at once, whose flags say what it sends together.

    Returns:
      A transform without state, for use inside `jax.shard_map`.

    Raises:
      ConfigError: `bucket_bytes` < 1; an update outside of `shard_map` over the axes.

    Examples:
      >>> tx = all_reduce_mean(None)
      >>> tx.update({"w": 3.0}, tx.init({"w": 1.0}))[0]
      {'w': 3.0}
    """
    if bucket_bytes is not None:
        checks.require_count(1, bucket_bytes=bucket_bytes)

    def init(params):
        del params
        return optax.EmptyState()

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        if axis_name is None:
            return updates, state
        require_axes(axis_name, "all_reduce_mean")
        if bucket_bytes is None:
            return jax.lax.pmean(updates, axis_name), state
        mean = functools.partial(jax.lax.pmean, axis_name=axis_name)
        # Empty arrays are in no bucket, and equal without being sent.
        return assume_equal(map_buckets(mean, updates, bucket_bytes), axis_name), state

    return optax.GradientTransformationExtraArgs(init, update)
