"""Averaging gradients by any exchange of `collectives`, as an optax transform."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from hpcjax.collectives import (
    CommStats,
    ExchangeConfig,
    ExchangeState,
    MeshGroup,
)
from hpcjax.core import checks, masks
from hpcjax.core.per_device import require_entered, unwrap, wrap
from hpcjax.core.varying import Axes, after, assume_equal, require_axes

_COUNTS = CommStats(*[jax.ShapeDtypeStruct((), "int32")] * len(CommStats._fields))


class ExchangeLinkState(NamedTuple):
    """State of `exchange_gradients`.

    Attributes:
      residual: that of `collectives.ExchangeState`, as a `core.PerDevice`.
      own: likewise.
      shared: that of `collectives.ExchangeState`, the same on all devices.
      step: likewise.
      stats: this device's `CommStats` of the last step, as a `core.PerDevice`.
      metrics: `"selected_entries"`, `"kept_entries"` and `"sent_words"` of the last
        step, averaged over devices.
    """

    residual: Any
    own: Any
    shared: Any
    step: jax.Array
    stats: Any
    metrics: dict[str, jax.Array]


def exchange_gradients(
    exchange: ExchangeConfig, axis_name: Axes | None = None
) -> optax.GradientTransformationExtraArgs:
    """Averages gradients over one or several mesh axes, by an exchange.

    Expects local gradients; returns identical updates on every member of `axis_name`.
    Where the update gets `sent=` masks, like the gradients, nothing else is sent, nor
    kept in a residual, from which it would compete for a sparse exchange's places.
    Placed after the learning rate in a chain, it accumulates residuals of updates that
    are already scaled by the rate of their step.

    Args:
      exchange: such as `collectives.OkTopkConfig(density=0.01)`.
      axis_name: the mesh axis, or axes; None stands for a group of this device alone.

    Returns:
      A transform for use inside `jax.shard_map`.

    Raises:
      TypeError: at `init`, a parameter that is not floating; names its path.
      ConfigError: an update outside of `shard_map` over the axes, or of state that was
        not entered, see `core.per_device`.

    Examples:
      >>> from hpcjax.collectives import OkTopkConfig
      >>> tx = exchange_gradients(OkTopkConfig(density=0.5))
      >>> gradients = {"w": jnp.array([1.0, -4.0, 3.0, 2.0])}
      >>> updates, state = tx.update(gradients, tx.init(gradients))
      >>> updates["w"].tolist(), state.residual["w"].tolist()
      ([0.0, -4.0, 3.0, 0.0], [1.0, 0.0, 0.0, 2.0])
    """
    checks.require_has("the config of an exchange", ("make",), exchange=exchange)
    method = exchange.make()

    def init(params):
        state = jax.tree.map(jnp.asarray, method.init(params))
        return _link_state(state, axis_name, _counts(state.stats))

    def update(updates, state, params=None, *, sent=None, **extra_args):
        del params, extra_args
        if axis_name is not None:
            require_axes(axis_name, "the exchange of gradients")
            # Of all that differs between devices these are there in every exchange.
            require_entered(state.stats, _COUNTS, "the exchange's state")
        group = MeshGroup(axis_name)
        bare = ExchangeState(*map(unwrap, state[:-1]))
        if sent is not None:
            updates = masks.apply(updates, sent)
            if bare.residual is not None:
                bare = bare._replace(residual=masks.apply(bare.residual, sent))
        mean, new = method.average(group, updates, bare)
        # All members computed these from the same numbers; the type system of
        # `shard_map` cannot know this.
        mean, shared, step = assume_equal(
            (mean, new.shared, new.step), () if axis_name is None else axis_name
        )
        new = new._replace(shared=shared, step=step)
        counts = group.sum(_counts(new.stats)) / group.size
        # What comes next may communicate in a branch, as WAGMA does: not before this.
        mean = after(mean, counts)
        return mean, _link_state(new, axis_name, counts)

    return optax.GradientTransformationExtraArgs(init, update)


def _counts(stats: CommStats) -> jax.Array:
    """Returns the metrics of one device, `[3]`, stacked to be averaged in one call."""
    counts = stats.selected, stats.kept, stats.sent_words
    return jnp.stack(counts).astype(jnp.float32)


def _link_state(
    state: ExchangeState, axis: Axes | None, counts: jax.Array
) -> ExchangeLinkState:
    """Returns an exchange's state with what differs between devices in `PerDevice`."""
    names = "selected_entries", "kept_entries", "sent_words"
    return ExchangeLinkState(
        wrap(state.residual, axis),
        wrap(state.own, axis, "reset"),
        state.shared,
        state.step,
        wrap(state.stats, axis, "reset"),
        metrics=dict(zip(names, counts, strict=True)),
    )
