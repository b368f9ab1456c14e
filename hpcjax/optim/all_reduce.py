"""The mean of gradients over a mesh axis, as an optax transform."""

import functools
from typing import Any

import jax
import optax

from hpcjax.collectives import map_buckets
from hpcjax.core import checks, trees
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


def comm_bytes(params: Any, axis_size: int) -> int:
    """Returns the bytes that one device hands to `all_reduce_mean`'s collective.

    This is the size of the operand. How many bytes it sends depends on the algorithm; a
    ring sends 2(p − 1)/p times the operand. A single device communicates nothing.

    Args:
      params: the parameters, or their shapes; gradients have the same dtypes.
      axis_size: the number of devices along the axis.

    Raises:
      ConfigError: `axis_size` < 1.

    Examples:
      >>> comm_bytes({"w": jax.ShapeDtypeStruct((3, 4), "float32")}, axis_size=8)
      48
    """
    checks.require(axis_size >= 1, "axis_size must be >= 1", axis_size=axis_size)
    return trees.num_bytes(params) if axis_size > 1 else 0
