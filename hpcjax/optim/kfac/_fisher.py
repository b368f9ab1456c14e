"""Gradients and the statistics of a Fisher matrix, from one forward pass."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hpcjax.core.errors import ConfigError, nearest
from hpcjax.core.model import Tap
from hpcjax.optim.kfac._blocks import statistics_of
from hpcjax.optim.kfac.config import Fisher

Forward = Callable[[Any, Any], tuple[Any, Any]]
Loss = Callable[[Any, Any], tuple[Any, Any]]
FISHERS = ("empirical", "true", "exact")


class Differentiated(NamedTuple):
    """What `differentiate` returns.

    Attributes:
      value: the loss.
      aux: what the forward pass returned beside the outputs.
      loss_aux: what the loss returned beside its value.
      grads: of the parameters.
      statistics: `{path: {"a": A, "g": G}}`, for `update(..., taps=)`.
    """

    value: Any
    aux: Any
    loss_aux: Any
    grads: Any
    statistics: dict[str, Any]


def differentiate(
    forward: Forward,
    loss: Loss,
    params: Any,
    taps: Mapping[str, Tap],
    labels: Any,
    *,
    fisher: Fisher = "empirical",
    key: jax.Array | None = None,
) -> Differentiated:
    """Returns loss, gradients and K-FAC's statistics.

    G is formed of the gradients of the loss with respect to layers' outputs at

    - `"empirical"`: the labels of the data, from the same backward pass,
    - `"true"`: labels drawn from softmax(outputs), by one backward pass more,
    - `"exact"`: every label c in turn, weighted by its probability, by as many backward
      passes more as there are labels: the expectation of `"true"`. One label of each
      example, and no example may depend on another, as under batch norm.

    Where the taps are not active, neither statistics nor backward passes beyond the
    first are made; the program then holds both passes. A label below zero, which a loss
    may leave out, is left as it is.

    Args:
      forward: `(params, taps) -> (outputs, aux)`, outputs being logits `[..., labels]`.
      loss: `(outputs, labels) -> (mean loss, aux)`, a sum of terms for each label.
      params: what is differentiated in.
      taps: from `kfac.make_taps`.
      labels: int `[...]`.
      fisher: which Fisher matrix.
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
        return _observed(forward, loss, params, taps, labels, fisher, key)
    always = {path: dataclasses.replace(tap, active=None) for path, tap in taps.items()}

    def with_statistics() -> Differentiated:
        return _observed(forward, loss, params, always, labels, fisher, key)

    def without() -> Differentiated:
        made = _observed(forward, loss, params, {}, labels, "empirical", None)
        return made._replace(statistics=statistics_of(taps))

    # One choice for the whole pass: one at each layer keeps its inputs and gradients
    # apart from what XLA would fuse them with, on every step.
    return jax.lax.cond(flags[0], with_statistics, without)


def _observed(
    forward: Forward,
    loss: Loss,
    params: Any,
    taps: Mapping[str, Tap],
    labels: Any,
    fisher: Fisher,
    key: jax.Array | None,
) -> Differentiated:
    """Returns `differentiate` with taps that are all active."""
    outputs, pull, aux = jax.vjp(forward, params, dict(taps), has_aux=True)
    slope = jax.value_and_grad(loss, has_aux=True)
    if fisher != "empirical" and not isinstance(outputs, jax.Array):
        raise ConfigError(
            f"fisher={fisher!r} needs outputs that are one array of logits: got "
            f"{jax.tree.structure(outputs)}"
        )
    if fisher == "exact" and outputs.ndim != 2:
        # The same label everywhere would add what different places have in common.
        raise ConfigError(
            "fisher='exact' needs one label an example, outputs [batch, labels]: got "
            f"{outputs.shape}; fisher='true' draws one at every place"
        )
    (value, loss_aux), cotangent = slope(outputs, labels)
    grads, observed = pull(cotangent)
    statistics = statistics_of(observed)

    def at(labels: Any, weight: Any = 1.0) -> Any:
        return statistics_of(pull(slope(outputs, labels)[1] * weight)[1])

    if fisher == "true" and key is not None:
        drawn = jax.random.categorical(key, _wide(outputs))
        statistics = at(_instead(labels, drawn))
    elif fisher == "exact":
        outer = _expected(at, outputs, labels)
        statistics = {
            path: {"a": each["a"], "g": outer[path]}
            for path, each in statistics.items()
        }
    return Differentiated(value, aux, loss_aux, grads, statistics)


def _expected(at: Callable[..., Any], outputs: jax.Array, labels: Any) -> Any:
    """Returns the sum over labels of G weighted by their probability."""
    probabilities = jax.nn.softmax(_wide(outputs), axis=-1).astype(outputs.dtype)

    def one(label: jax.Array) -> Any:
        chosen = _instead(labels, label)
        # The square root, since G is quadratic in the gradient.
        weight = jnp.sqrt(jnp.take(probabilities, label, axis=-1))[..., None]
        # A is the same for every label and not formed again.
        return {path: each["g"] for path, each in at(chosen, weight).items()}

    every = jax.lax.map(one, jnp.arange(outputs.shape[-1]))
    return {path: each.sum(0) for path, each in every.items()}


def _wide(logits: jax.Array) -> jax.Array:
    return logits.astype(jnp.promote_types(logits.dtype, jnp.float32))


def _instead(labels: jax.Array, others: jax.Array) -> jax.Array:
    """Returns `others` where a label is scored."""
    return jnp.where(labels < 0, labels, others).astype(labels.dtype)
