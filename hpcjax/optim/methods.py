"""The training method in which all devices share one model."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import optax

from hpcjax.core import checks, per_device, trees
from hpcjax.core.keys import derive
from hpcjax.core.method import (
    Gradients,
    Method,
    Optimization,
    PassResult,
    StepInput,
    take_extra_args,
)
from hpcjax.core.model import added_loss
from hpcjax.core.scored import divide
from hpcjax.core.varying import Axes, vary
from hpcjax.optim.all_reduce import all_reduce_mean
from hpcjax.optim.differentiation import (
    Differentiate,
    Differentiated,
    value_and_grad,
)

Link = Callable[[Axes], optax.GradientTransformation]


class _Adding(NamedTuple):
    """The outputs of a model together with the loss that its layers add.

    One `outputs` is passed from the forward pass to the loss; the added loss must
    travel with it to be differentiated.
    """

    outputs: Any
    added: jax.Array


def data_parallel(
    optimizer: Optimization | optax.GradientTransformation,
    *,
    mean: Link | None = all_reduce_mean,
    gradients: Gradients | None = None,
) -> Method:
    """Returns data-parallel training: all devices hold the same model.

    Each device differentiates the loss on its part of the batch, the gradients are
    averaged over the devices, and every device applies the same update.

    Args:
      optimizer: a single-device transform, or an `Optimization` where the optimizer
        brings its own backward pass or mesh, as K-FAC does.
      mean: `mean(axes)` returns the transform that averages gradients over mesh axes,
        such as `functools.partial(optim.exchange_gradients, OkTopkConfig())`; None if
        `optimizer` communicates by itself.
      gradients: the backward pass. By default that of `optimizer`, and if it has none
        `whole_backward`.

    Examples:
      >>> method = data_parallel(optax.sgd(0.1))
      >>> method.mesh_shape(8)
      {'data': 8}
    """
    if not isinstance(optimizer, Optimization):
        optimizer = Optimization(take_extra_args(optimizer=optimizer))
    chained, sent = optimizer.tx, optimizer.sent
    if mean is not None:
        chained = optax.chain(mean(optimizer.axes), chained)
    tx = optax.with_extra_args_support(chained)

    def update(result: PassResult, state: Any, params: Any) -> tuple[Any, Any]:
        extras = dict(result.extras)
        if sent is not None and mean is not None:
            extras["sent"] = sent(state[1], params)
        updates, state = tx.update(result.grads, state, params, **extras)
        # As optax.apply_updates, which would keep a wider update's type.
        new = jax.tree.map(lambda p, u: (p + u).astype(p.dtype), params, updates)
        return new, state

    def init(params: Any) -> tuple[Any, Any]:
        begun = optimizer.begin(params)
        return begun, tx.init(begun)

    return Method(
        optimizer.mesh_shape,
        init,
        gradients or optimizer.gradients or whole_backward,
        update,
        optimizer.facts,
    )


def holding(method: Method, frozen: Sequence[str]) -> Method:
    """Returns a method that leaves some parameters as they are.

    Whatever the optimizer: neither weight decay nor an old momentum moves them.

    Args:
      method: of the others.
      frozen: regexes of their paths, in a `PerDevice` as outside.

    Raises:
      ConfigError: no method; or, when it is initialized, one that is found in no path.
    """
    good = isinstance(method, Method)
    checks.require(good, "method must be a training method", method=method)
    rules = [*((pattern, True) for pattern in frozen), ("", False)]

    def init(params: Any) -> tuple[Any, Any]:
        trees.choose_tree(rules, params)
        return method.init(params)

    def update(result: PassResult, state: Any, params: Any) -> tuple[Any, Any]:
        moved, state = method.update(result, state, params)
        kept = trees.choose_tree(rules, per_device.bare(params))
        old, structure = jax.tree.flatten(params)
        rows = zip(jax.tree.leaves(kept), old, jax.tree.leaves(moved), strict=True)
        return structure.unflatten([a if keep else b for keep, a, b in rows]), state

    return method._replace(init=init, update=update)


def whole_backward(one_pass: StepInput, params: Any, state: Any) -> PassResult:
    """Returns gradients of the objective on this device's part of the batch."""
    del state
    return differentiate_pass(one_pass, params)[0]


def differentiate_pass(
    one_pass: StepInput,
    params: Any,
    differentiate: Differentiate = value_and_grad,
) -> tuple[PassResult, Differentiated]:
    """Returns gradients of the objective, and whatever else is differentiated.

    The differentiated loss is the objective's sum by the step's `share`, plus the loss
    that the model's layers add, such as the load-balancing loss of mixtures of experts,
    which is a mean of this device's own. Of the reported means `"loss"` is the
    objective alone and `"added_loss"` the rest.

    Args:
      one_pass: the model, objective, batch and random key of this device.
      params: the parameters to differentiate with respect to.
      differentiate: computes them; K-FAC's also observes layers.
    """
    model, objective, model_state, batch, key, _, axes, share = one_pass
    # Marked as differing between devices, the gradients stay local sums: for replicated
    # parameters `shard_map` would transpose their broadcast to an all-reduce.
    params = vary(params, axes)

    def forward(params: Any, taps: Any) -> tuple[Any, Any]:
        outputs, new = model.apply(
            params, model_state, batch["x"], train=True, key=key, taps=taps or None
        )
        added = added_loss(new)
        return (outputs if added is None else _Adding(outputs, added)), new

    def loss(outputs: Any, labels: Any) -> tuple[Any, Any]:
        outputs, added = outputs if isinstance(outputs, _Adding) else (outputs, None)
        totals = objective(outputs, {**batch, "y": labels})
        mean = divide(totals.sums, share)["loss"]
        return (mean if added is None else mean + added), totals

    def value_fn(params: Any) -> Any:
        return loss(forward(params, {})[0], batch["y"])[0]

    result = differentiate(
        forward,
        loss,
        params,
        batch.get("y"),
        key=derive(key, "labels"),
    )
    means, added = divide(result.loss_aux.sums, share), added_loss(result.aux)
    if added is not None:
        means["added_loss"] = added
    extras = {
        "value": result.value,
        "value_fn": value_fn,
        "step": one_pass.step,
        "loss_terms": share,
    }
    return PassResult(result.grads, means, result.aux, extras), result
