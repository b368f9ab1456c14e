"""The average of gradients by any exchange, as a link of a chain."""

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
from hpcjax.core.per_device import unwrap, wrap
from hpcjax.core.varying import Axes, assume_equal


class ExchangeLinkState(NamedTuple):
    """State of `exchange_gradients`.

    Attributes:
      residual: see `collectives.ExchangeState`; `PerDevice`.
      own: likewise.
      shared: see there; the same on all devices.
      step: likewise.
      stats: of this device's last step; `PerDevice`.
      metrics: averages over devices of the last step's selected and kept entries, and
        of words sent.
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
    """Averages the gradients over a mesh axis, or several, by an exchange.

    Expects local gradients; returns identical updates on every member of `axis_name`.
    Put a learning rate before it to have it within the residual.

    Args:
      exchange: such as `collectives.OkTopkConfig(density=0.01)`.
      axis_name: the mesh axis, or axes; with None the gradients of this device alone
        are treated as those of a group of one.

    Returns:
      A transform for use inside `jax.shard_map`. Its `update` raises NameError outside.

    Raises:
      TypeError: at `init`, a parameter that is not floating; names its path.

    Examples:
      >>> from hpcjax.collectives import OkTopkConfig
      >>> tx = exchange_gradients(OkTopkConfig(density=0.5))
      >>> gradients = {"w": jnp.array([1.0, -4.0, 3.0, 2.0])}
      >>> updates, state = tx.update(gradients, tx.init(gradients))
      >>> updates["w"].tolist(), state.residual["w"].tolist()
      ([0.0, -4.0, 3.0, 0.0], [1.0, 0.0, 0.0, 2.0])
    """
    made = exchange.make()

    def init(params):
        state = jax.tree.map(jnp.asarray, made.init(params))
        return _link_state(state, axis_name, _counts(state.stats))

    def update(updates, state, params=None, **extra_args):
        del params, extra_args
        group = MeshGroup(axis_name)
        bare = ExchangeState(*map(unwrap, state[:-1]))
        mean, new = made.average(group, updates, bare)
        # By construction: all members computed it from the same numbers.
        mean, shared, step = assume_equal(
            (mean, new.shared, new.step), () if axis_name is None else axis_name
        )
        new = new._replace(shared=shared, step=step)
        counts = group.sum(_counts(new.stats)) / group.size
        return mean, _link_state(new, axis_name, counts)

    return optax.GradientTransformationExtraArgs(init, update)


def _counts(stats: CommStats) -> jax.Array:
    counts = stats.selected, stats.kept, stats.sent_words
    return jnp.stack(counts).astype(jnp.float32)


def _link_state(
    state: ExchangeState, axis: Axes | None, counts: jax.Array
) -> ExchangeLinkState:
    names = "selected_entries", "kept_entries", "sent_words"
    return ExchangeLinkState(
        wrap(state.residual, axis),
        wrap(state.own, axis, "reset"),
        state.shared,
        state.step,
        wrap(state.stats, axis, "reset"),
        metrics=dict(zip(names, counts, strict=True)),
    )
