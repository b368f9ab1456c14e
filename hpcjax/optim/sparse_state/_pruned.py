"""A pruned parameter in the place of a dense one, with a gradient born compressed."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from hpcjax.core.deferred import Deferred, is_deferred
from hpcjax.core.structs import pytree, static
from hpcjax.core.varying import Axes, vary, vary_like
from hpcjax.optim.loss_scale import Scaling, scale_gradient
from hpcjax.optim.sparse_state._positions import Positions


@pytree
class Pruned(Deferred):
    """A pruned parameter, which a model takes in the place of the array.

    Attributes:
      weights: the parameter, with zeros where it is pruned; or its kept values, from
        which it is made where it is used.
      positions: the `Positions` of the kept values.
      slot: zeros like the kept values, whose gradient is that of these; None where no
        gradient is taken.
      dense: whether `weights` is the parameter.
    """

    weights: Any
    positions: Any
    slot: Any = None
    dense: bool = static(default=True)

    def realize(self) -> jax.Array:
        """Returns the parameter; with a slot, its gradient goes there alone."""
        whole = self.weights if self.dense else self.positions.expand(self.weights)
        if self.slot is None:
            return whole
        return attach(whole, self.slot, self.positions)

    def values(self) -> jax.Array:
        """Returns the kept values."""
        return self.positions.gather(self.weights) if self.dense else self.weights

    def replace(self, values: jax.Array) -> "Pruned":
        """Returns the parameter with other kept values."""
        values = values.astype(self.weights.dtype)
        weights = self.positions.write(self.weights, values) if self.dense else values
        return Pruned(weights=weights, positions=self.positions, dense=self.dense)


def attach(
    weights: Float[Array, "..."],
    slot: Float[Array, "*lead kept"],
    positions: Positions,
) -> Float[Array, "..."]:
    """Returns the weights; of their gradient dW the slot gets the kept entries.

    The gradient of `weights` itself is zero. dW is gathered where it arises, so that
    XLA can free it before that of the next layer. A scan over layers must attach in its
    body, and the body must be in `jax.checkpoint`: otherwise the weights that this
    returns are stored for the backward pass, once more for all layers.

    Args:
      weights: the dense parameter, with zeros where it is pruned.
      slot: zeros.
      positions: of the kept values.

    References:
      Singh and Bhatele, Exploiting Sparsity in Pruned Neural Networks to Optimize Large
      Model Training, IPDPS 2023, §III-C.

    Examples:
      >>> from hpcjax.optim import sparse_state
      >>> at = sparse_state.locate("w", jnp.array([True, False, True]))
      >>> weights = jnp.array([1.0, 0.0, 3.0])
      >>> loss = lambda slot: (attach(weights, slot, at) ** 2).sum()
      >>> jax.grad(loss)(jnp.zeros(2)).tolist()
      [2.0, 6.0]
    """
    # Where only the slot differs between devices, the transposed broadcast of equal
    # weights would sum dense gradients over all devices.
    weights = vary_like(jax.lax.stop_gradient(weights), slot)
    return _attach(weights, slot, positions)


@jax.custom_vjp
def _attach(weights: Array, slot: Array, positions: Positions) -> Array:
    del slot, positions
    return weights


def _attach_forward(weights: Array, slot: Array, positions: Positions) -> Any:
    del slot
    return weights, positions


def _attach_backward(positions: Positions, gradient: Array) -> Any:
    return None, positions.gather(gradient), None


_attach.defvjp(_attach_forward, _attach_backward)


def map_pruned(
    function: Callable[..., Any],
    params: Any,
    *others: Any,
    dense: Callable[..., Any] = lambda leaf, *_: leaf,
) -> Any:
    """Maps `function(pruned, *others)`, and `dense(leaf, *others)` where none is."""

    def visit(node: Any, *rest: Any) -> Any:
        return (function if is_deferred(node) else dense)(node, *rest)

    return jax.tree.map(visit, params, *others, is_leaf=is_deferred)


def make_slots(params: Any) -> Any:
    """Returns what a loss is differentiated by: zeros, and parameters not pruned."""
    return map_pruned(
        lambda node: jnp.zeros(
            (*node.positions.lead, node.positions.kept), node.weights.dtype
        ),
        params,
    )


def with_slots(params: Any, slots: Any) -> Any:
    """Returns the parameters whose gradients go to the slots."""

    def insert(node: Pruned, slot: Array) -> Pruned:
        return Pruned(
            weights=node.weights,
            positions=node.positions,
            slot=slot,
            dense=node.dense,
        )

    return map_pruned(insert, params, slots, dense=lambda _, leaf: leaf)


def value_and_grad(
    loss_fn: Callable[..., Any],
    *,
    has_aux: bool = False,
    scaling: Scaling | None = None,
    axis_name: Axes | None = None,
) -> Callable[..., Any]:
    """Returns `f(params, *args) -> (loss, compressed gradients)`.

    Args:
      loss_fn: `(params, *args) -> loss`. It may give `params` to a `Model`; of other
        functions it calls `core.realize(params)` first, and in the body of a scan over
        layers, which must be in `jax.checkpoint`, realizes those of a layer.
      has_aux: whether `loss_fn` returns `(loss, aux)`.
      scaling: by which gradients, not the returned loss, are multiplied; `wrap` with a
        `LossScale` divides by it.
      axis_name: the mesh axes that the batch is split over, inside `shard_map`;
        gradients are then each device's own.

    Returns:
      A function of compressed parameters, see `compress`; no dense gradient outlives
      the layer that it belongs to.

    Examples:
      >>> from hpcjax import core
      >>> from hpcjax.optim import sparse_state
      >>> kept = {"w": jnp.array([True, False, True])}
      >>> params = {"w": jnp.array([1.0, 2.0, 3.0])}
      >>> made = sparse_state.compress(params, kept, dtype="float32")
      >>> loss = lambda params: (core.realize(params)["w"] ** 2).sum()
      >>> value, grads = sparse_state.value_and_grad(loss)(made.params)
      >>> float(value), grads["w"].tolist()
      (10.0, [2.0, 6.0])
    """

    def differentiate(params: Any, *args: Any) -> Any:
        def attached(slots: Any) -> Any:
            result = loss_fn(with_slots(params, slots), *args)
            if scaling is None:
                return result
            value, *aux = result if has_aux else (result,)
            value = scale_gradient(value, scaling.scale)
            return (value, *aux) if has_aux else value

        slots = make_slots(params)
        if axis_name is not None:
            slots = vary(slots, axis_name)
        return jax.value_and_grad(attached, has_aux=has_aux)(slots)

    return differentiate
