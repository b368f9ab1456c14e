"""Gradients of one device's part of the batch, and what comes with them."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from hpcjax.core import checks
from hpcjax.core.model import added_loss
from hpcjax.core.varying import vary
from hpcjax.optim import Blocks, PartialBackward, kfac, stop_below
from hpcjax.train.state import TrainState
from hpcjax.train.task import Batch, Task

Metrics = dict[str, Any]


class _Adding(NamedTuple):
    """Outputs of a model whose layers add to the objective, and what they add."""

    outputs: Any
    added: jax.Array


class Differentiated(NamedTuple):
    """What one forward and backward pass gave on this device.

    Attributes:
      grads: of the parameters, of this device's part of the batch alone.
      means: the objective's means over that part.
      model_state: the model's new state.
      extras: what the optimizer's `update` gets beside gradients and parameters.
    """

    grads: Any
    means: Metrics
    model_state: Any
    extras: dict[str, Any]


def gradients(
    task: Task, state: TrainState, batch: Batch, key: jax.Array, axes: tuple[str, ...]
) -> Differentiated:
    """Differentiates the objective on this device's part, inside `shard_map`.

    With `task.backward` a device runs for each of its workers the program of that
    worker's role alone; it holds those of all roles, and a step takes as long as the
    longest. Roles are those of `state.step`, which the optimizer gets as `step`.
    Gradients are then summed over the device's workers, zeros where none has one;
    means and the model's state are averaged over them.

    Raises:
      ConfigError: when traced, if the workers of a device do not divide its examples.
    """
    if task.backward is None:
        return _differentiated(task, state, batch, key, axes)
    return _of_workers(task.backward, task, state, batch, key, axes)


def _differentiated(
    task: Task, state: TrainState, batch: Batch, key: jax.Array, axes: tuple[str, ...]
) -> Differentiated:
    """Differentiates the objective, with K-FAC's statistics where the task has some.

    The gradient is also that of what the model's layers add by themselves, as experts'
    load balance of this device's tokens does; the objective's own mean stays without.
    """
    params, model_state = vary(state.params, axes), state.model_state
    taps, curvature = {}, task.curvature
    if curvature is not None:
        active = kfac.statistics_due(state.opt_state)
        taps = kfac.make_taps(
            curvature.plan, task.model, params, model_state, batch["x"], active=active
        )

    def forward(params: Any, taps: Any) -> tuple[Any, Any]:
        outputs, new = task.model.apply(
            params, model_state, batch["x"], train=True, key=key, taps=taps or None
        )
        added = added_loss(new)
        return (outputs if added is None else _Adding(outputs, added)), new

    def loss(outputs: Any, labels: Any) -> tuple[Any, Any]:
        outputs, added = outputs if isinstance(outputs, _Adding) else (outputs, None)
        totals = task.objective(outputs, {**batch, "y": labels})
        mean = totals.means()["loss"]
        return (mean if added is None else mean + added), totals

    def value_fn(params: Any) -> Any:
        return loss(forward(params, {})[0], batch["y"])[0]

    made = kfac.differentiate(
        forward,
        loss,
        params,
        taps,
        batch.get("y"),
        fisher="empirical" if curvature is None else curvature.fisher,
        key=jax.random.fold_in(key, 1),
    )
    means, added = made.loss_aux.means(), added_loss(made.aux)
    if added is not None:
        means["added_loss"] = added
    extras = {"value": made.value, "value_fn": value_fn}
    if curvature is not None:
        extras |= {"taps": made.statistics, "loss_terms": made.loss_aux.count}
    return Differentiated(made.grads, means, made.aux, extras)


def _of_workers(
    backward: PartialBackward,
    task: Task,
    state: TrainState,
    batch: Batch,
    key: jax.Array,
    axes: tuple[str, ...],
) -> Differentiated:
    count, rows = backward.workers, len(jax.tree.leaves(dict(batch))[0])
    rule = f"workers must divide the {rows} examples of a device"
    checks.require(rows % count == 0, rule, workers=count)
    of_role = [
        functools.partial(_stopped, backward.blocks, role, task, axes)
        for role in range(1, backward.k + 1)
    ]

    def of_worker(own: tuple[Any, Any, Any]) -> Any:
        number, part, key = own
        worker = jax.lax.axis_index(axes) * count + number
        role = backward.role(worker, state.step)
        return jax.lax.switch(role - 1, of_role, state, part, key)

    if count == 1:
        grads, rest = of_worker((0, batch, key))
    else:
        parts = jax.tree.map(lambda b: b.reshape(count, -1, *b.shape[1:]), batch)
        keys = jax.random.split(key, count)
        found = jax.lax.map(of_worker, (jnp.arange(count), parts, keys))
        grads = jax.tree.map(lambda leaf: leaf.sum(0), found[0])
        rest = jax.tree.map(lambda leaf: leaf.mean(0), found[1])
    means, model_state, value = rest
    extras = {"value": value, "step": state.step}
    return Differentiated(grads, means, model_state, extras)


def _stopped(
    blocks: Blocks,
    role: int,
    task: Task,
    axes: tuple[str, ...],
    state: TrainState,
    batch: Batch,
    key: jax.Array,
) -> tuple[Any, tuple[Metrics, Any, Any]]:
    """Returns gradients, means, model's state and objective of a worker of a role."""

    def apply(params: Any, *arguments: Any, **options: Any) -> Any:
        stopped = stop_below(params, blocks, role)
        return task.model.apply(stopped, *arguments, **options)

    stopping = task._replace(model=task.model._replace(apply=apply))
    found = _differentiated(stopping, state, batch, key, axes)
    rest = found.means, found.model_state, found.extras["value"]
    return vary((found.grads, rest), axes)
