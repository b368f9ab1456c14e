"""A loss and its gradients, where the loss is a model's outputs scored."""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from hpcjax.core.keys import Key

Forward = Callable[[Any, Any], tuple[Any, Any]]
Loss = Callable[[Any, Any], tuple[Any, Any]]


class Differentiated(NamedTuple):
    """A loss with its gradients and statistics.

    Attributes:
      value: the mean loss.
      aux: the second value that `forward` returned.
      loss_aux: the second value that `loss` returned.
      grads: gradients of the parameters.
      statistics: `{path: {"a": A, "g": G}}`, for `update(..., taps=)`; empty of plain
        gradients.
    """

    value: Any
    aux: Any
    loss_aux: Any
    grads: Any
    statistics: dict[str, Any]


Differentiate = Callable[..., Differentiated]
"""`differentiate(forward, loss, params, labels, key=)`, as `value_and_grad`."""


def value_and_grad(
    forward: Forward,
    loss: Loss,
    params: Any,
    labels: Any,
    *,
    key: Key | None = None,
) -> Differentiated:
    """Returns a loss with its plain gradients.

    Args:
      forward: `(params, taps) -> (outputs, aux)`; it gets no taps.
      loss: `(outputs, labels) -> (mean loss, aux)`.
      params: the parameters to differentiate with respect to.
      labels: what the loss takes beside the outputs.
      key: not used; K-FAC draws labels by it.
    """
    del key
    outputs, pull, aux = jax.vjp(lambda p: forward(p, {}), params, has_aux=True)
    slope = jax.value_and_grad(loss, has_aux=True)
    (value, loss_aux), cotangent = slope(outputs, labels)
    (grads,) = pull(cotangent)
    return Differentiated(value, aux, loss_aux, grads, {})
