"""Gradients and K-FAC's statistics of a Fisher matrix, from one forward pass."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from hpcjax.core.errors import ConfigError, nearest
from hpcjax.core.keys import Key, each_row
from hpcjax.core.model import Tap
from hpcjax.optim.differentiation import (
    Differentiated,
    Forward,
    Loss,
    value_and_grad,
)
from hpcjax.optim.kfac._blocks import statistics_of
from hpcjax.optim.kfac.options import Fisher

FISHERS = ("empirical", "true", "exact")


def differentiate(
    forward: Forward,
    loss: Loss,
    params: Any,
    taps: Mapping[str, Tap],
    labels: Any,
    *,
    fisher: Fisher = "empirical",
    key: Key | None = None,
) -> Differentiated:
    """Returns a loss with its gradients and K-FAC's statistics.

    A is the second moment of layers' inputs. G is the second moment of the loss's
    gradients with respect to layers' outputs, where the loss is taken at

    - `"empirical"`: the labels of the data, so that one backward pass gives everything;
    - `"true"`: labels drawn from softmax(outputs), in one additional backward pass;
    - `"exact"`: every label in turn, weighted by its probability, in as many additional
      backward passes as there are labels. This is the expectation of `"true"`. Each
      example must have one label, and not depend on others, as it does in batch norm.

    Both are means over all places of the batch, scored or not: where a loss scores 30 %
    of the tokens, A is of all inputs, since gradients flow through all of them, and in
    G the places whose outputs no gradient reaches count as zeros. An example's weight w
    multiplies its gradients, so that it is in G by its square.

    If the taps have a flag `active`, the program holds a pass with statistics and one
    without, and takes the latter where the flag is false. Labels below zero, which a
    loss may ignore, are never replaced.

    Args:
      forward: `(params, taps) -> (outputs, aux)` with logits `[..., labels]`.
      loss: `(outputs, labels) -> (mean loss, aux)`, a mean of one term for each label.
      params: the parameters to differentiate with respect to.
      taps: from `kfac.make_taps`.
      labels: int `[...]`.
      fisher: which Fisher matrix, see above.
      key: random key, needed for `"true"`.

    Raises:
      ConfigError: an unknown `fisher`, `"true"` without a key, outputs that are not
        one array of logits where labels are to be drawn, or `"exact"` where they are
        not `[batch, labels]`.
    """
    if fisher not in FISHERS:
        raise ConfigError(f"unknown fisher {fisher!r}{nearest(fisher, FISHERS)}")
    if fisher == "true" and key is None:
        raise ConfigError("fisher='true' draws labels and needs key=")
    flags = [jnp.any(t.active != 0) for t in taps.values() if t.active is not None]
    if not flags:
        return _differentiate_with_taps(
            forward, loss, params, taps, labels, fisher, key
        )
    always = {path: dataclasses.replace(tap, active=None) for path, tap in taps.items()}

    def with_statistics() -> Differentiated:
        return _differentiate_with_taps(
            forward, loss, params, always, labels, fisher, key
        )

    def without() -> Differentiated:
        result = value_and_grad(forward, loss, params, labels)
        # The taps' own zeros have the shapes of statistics; the update ignores them.
        return result._replace(statistics=statistics_of(taps))

    # One `cond` around the whole pass. A `cond` at each layer would be a barrier to
    # fusion: XLA would have to write out its inputs and gradients in every step.
    return jax.lax.cond(flags[0], with_statistics, without)


def _differentiate_with_taps(
    forward: Forward,
    loss: Loss,
    params: Any,
    taps: Mapping[str, Tap],
    labels: Any,
    fisher: Fisher,
    key: Key | None,
) -> Differentiated:
    """Returns the result of `differentiate`, computing the statistics of all taps."""
    # The loss is differentiated apart from the network, so that the stored activations
    # of one forward pass serve the backward passes from other labels.
    outputs, pull, aux = jax.vjp(forward, params, dict(taps), has_aux=True)
    slope = jax.value_and_grad(loss, has_aux=True)
    if fisher != "empirical" and not isinstance(outputs, jax.Array):
        raise ConfigError(
            f"fisher={fisher!r} needs outputs that are one array of logits: got "
            f"{jax.tree.structure(outputs)}"
        )
    if fisher == "exact" and outputs.ndim != 2:
        # With several labels per example, one backward pass for the same label at all
        # places would mix the gradients of different places, whose labels are drawn
        # independently.
        raise ConfigError(
            "fisher='exact' needs one label an example, outputs [batch, labels]: got "
            f"{outputs.shape}; fisher='true' draws one at every place"
        )
    (value, loss_aux), cotangent = slope(outputs, labels)
    grads, observed = pull(cotangent)
    statistics = statistics_of(observed)

    def statistics_at(labels: Any, weight: Any = 1.0) -> Any:
        """Returns statistics of a backward pass from other labels."""
        return statistics_of(pull(slope(outputs, labels)[1] * weight)[1])

    if fisher == "true" and key is not None:
        keys = each_row(key, len(outputs))
        drawn = jax.vmap(jax.random.categorical)(keys, _widen(outputs))
        statistics = statistics_at(_replace_scored(labels, drawn))
    elif fisher == "exact":
        outer = _sum_over_labels(statistics_at, outputs, labels)
        statistics = {
            path: {"a": each["a"], "g": outer[path]}
            for path, each in statistics.items()
        }
    return Differentiated(value, aux, loss_aux, grads, statistics)


def _sum_over_labels(
    statistics_at: Callable[..., Any], outputs: jax.Array, labels: Any
) -> Any:
    """Returns Σ_c p(c) G(c), summed over labels c with probabilities p."""
    probabilities = jax.nn.softmax(_widen(outputs), axis=-1).astype(outputs.dtype)

    def one(label: jax.Array) -> Any:
        chosen = _replace_scored(labels, label)
        # G(c) is quadratic in the gradient: weighting that by √p weights G by p.
        weight = jnp.sqrt(jnp.take(probabilities, label, axis=-1))[..., None]
        # A is the same for every label and not formed again.
        return {path: each["g"] for path, each in statistics_at(chosen, weight).items()}

    by_label = jax.lax.map(one, jnp.arange(outputs.shape[-1]))
    return {path: each.sum(0) for path, each in by_label.items()}


def _widen(logits: jax.Array) -> jax.Array:
    """Returns logits in float32 or better."""
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def _replace_scored(labels: jax.Array, others: jax.Array) -> jax.Array:
    """Returns `others` in place of labels that are scored, those not below zero."""
    return jnp.where(labels < 0, labels, others).astype(labels.dtype)
