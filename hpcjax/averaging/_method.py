"""Averaging workers as a training method: each has a model of its own."""

from typing import Any

import optax

from hpcjax.averaging.workers import Averaging
from hpcjax.core import checks
from hpcjax.core.method import WORKER_AXIS, Method, Optimization, PassResult, StepInput
from hpcjax.core.per_device import unwrap, wrap
from hpcjax.core.varying import assume_equal, vary
from hpcjax.optim.all_reduce import all_reduce_mean
from hpcjax.optim.methods import Link, whole_backward


def inner_transform(
    optimizer: Optimization, mean: Link = all_reduce_mean
) -> optax.GradientTransformationExtraArgs:
    """Returns a worker's own optimizer; its devices average their gradients first.

    It communicates along the optimizer's axes alone, and knows nothing of the other
    workers: for it all values are typed as if there were none, see `alone`.
    """
    chained = optax.chain(mean(optimizer.axes), optimizer.tx)
    tx = optax.with_extra_args_support(chained)

    def update(updates, state, params=None, **extras):
        return together(tx.update(*alone((updates, state, params)), **extras))

    return optax.GradientTransformationExtraArgs(tx.init, update)


def alone(tree: Any) -> Any:
    """Returns values typed as equal for all workers, for what has no use for others.

    They are not; but nothing that happens to them until `together` looks along the
    axis of workers, and branches and loops of other rooms need know of no further axis.
    """
    return assume_equal(tree, WORKER_AXIS)


def together(tree: Any) -> Any:
    """Returns values typed as what they are: each worker's own."""
    return vary(tree, WORKER_AXIS)


def train_apart(worker: Averaging, optimizer: Optimization, *, workers: int) -> Method:
    """Returns the method by which workers train models of their own and average them.

    Devices are a grid: those along `core.method.WORKER_AXIS` have models of their own,
    those along the optimizer's axes share one and average their gradients. What is
    validated is the mean of all models.

    Args:
      worker: averages over `WORKER_AXIS`; made with `inner_transform(optimizer)`.
      optimizer: what it updates its model with.
      workers: how many there are.

    Raises:
      ConfigError: by `mesh_shape`, unless the workers divide the devices.
    """
    backward = optimizer.gradients or whole_backward

    def mesh_shape(devices: int) -> dict[str, int]:
        rule = f"workers must divide the {devices} devices"
        checks.require(devices % workers == 0, rule, workers=workers)
        return {WORKER_AXIS: workers, **optimizer.mesh_shape(devices // workers)}

    def init(params: Any) -> tuple[Any, Any]:
        return wrap(params, WORKER_AXIS), worker.init(params)

    def gradients(one_pass: StepInput, params: Any, state: Any) -> PassResult:
        inner = unwrap(state.own).inner
        own = one_pass._replace(
            batch=alone(dict(one_pass.batch)),
            key=alone(one_pass.key),
            share=alone(one_pass.share),
            axes=tuple(axis for axis in one_pass.axes if axis != WORKER_AXIS),
        )
        found = backward(own, alone(unwrap(params)), alone(inner))
        # Extras, which may be functions, go to the worker's own optimizer alone.
        bare = together(found._replace(extras={}))
        return bare._replace(extras=found.extras)

    def update(found: PassResult, state: Any, params: Any) -> tuple[Any, Any]:
        extras = found.extras
        new, state = worker.step(found.grads, state, unwrap(params), **extras)
        return wrap(new, WORKER_AXIS), state

    return Method(mesh_shape, init, gradients, update, optimizer.facts)
