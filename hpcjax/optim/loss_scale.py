"""A dynamic loss scale: multiplying gradients by it, and what becomes of it."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool

from hpcjax.core.method import StepInput
from hpcjax.core.model import LOSSES
from hpcjax.optim.loss_scale_config import LossScale


class Scaling(NamedTuple):
    """State of a dynamic loss scale.

    Attributes:
      scale: by which gradients are multiplied, float32.
      good: steps since it last changed, int32.
    """

    scale: jax.Array
    good: jax.Array

    @property
    def metrics(self) -> dict[str, jax.Array]:
        """What `optim.inspect` returns."""
        return {"loss_scale": self.scale}


def begin_scaling(loss_scale: LossScale | None) -> Scaling | None:
    """Returns the state before the first step; None where there is no scale."""
    if loss_scale is None:
        return None
    return Scaling(jnp.float32(loss_scale.start), jnp.zeros((), jnp.int32))


@jax.custom_vjp
def scale_gradient(x: Array, scale: Array) -> Array:
    """Returns x, whose gradient is multiplied by the scale."""
    del scale
    return x


scale_gradient.defvjp(
    lambda x, scale: (x, scale),
    lambda scale, gradient: ((gradient * scale).astype(gradient.dtype), None),
)


def scale_outputs(outputs: Any, new: Any, scaling: Scaling | None) -> tuple[Any, Any]:
    """Returns what a model's `apply` does, with gradients multiplied by the scale.

    The loss is computed outside of the model, and its gradient arrives here.
    """
    if scaling is None:
        return outputs, new
    scaled = {LOSSES: new[LOSSES]} if LOSSES in new else {}
    outputs, scaled = jax.tree.map(
        lambda leaf: scale_gradient(leaf.astype(jnp.float32), scaling.scale),
        (outputs, scaled),
    )
    return outputs, {**new, **scaled}


def scale_pass(one_pass: StepInput, scaling: Scaling | None) -> StepInput:
    """Returns a pass whose gradients are multiplied by the scale."""

    def apply(*args: Any, **options: Any) -> tuple[Any, Any]:
        return scale_outputs(*one_pass.model.apply(*args, **options), scaling)

    return one_pass._replace(model=one_pass.model._replace(apply=apply))


def unscale(grads: Any, scaling: Scaling | None) -> Any:
    """Returns gradients in float32, without the loss scale."""
    wide = jax.tree.map(lambda g: g.astype(jnp.float32), grads)
    if scaling is None:
        return wide
    return jax.tree.map(lambda g: g / scaling.scale, wide)


def advance(
    loss_scale: LossScale, scaling: Scaling, finite: Bool[Array, ""]
) -> Scaling:
    """Returns the loss scale after a step."""
    good = jnp.where(finite, scaling.good + 1, 0)
    grows = good == loss_scale.every
    factor = jnp.where(grows, loss_scale.growth, 1.0)
    factor = jnp.where(finite, factor, loss_scale.backoff)
    scale = jnp.maximum(scaling.scale * factor, loss_scale.least)
    if loss_scale.most is not None:
        scale = jnp.minimum(scale, loss_scale.most)
    return Scaling(scale=scale, good=jnp.where(grows, 0, good))
