"""The training step and the validation step, as single SPMD programs.

Both run inside `shard_map` over the data axes, on one device as on many. With
`check_vma=True` JAX tracks which values may differ between devices. A missing exchange
of gradients is therefore an error at compile time, not a slow drift of parameters.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from hpcjax import optim
from hpcjax.core import per_device, shards, trees
from hpcjax.core.errors import ConfigError
from hpcjax.core.keys import BatchKey, derive
from hpcjax.core.method import WORKER_AXIS, Batch, StepInput, Totals
from hpcjax.core.scored import count_scored, share_out
from hpcjax.core.varying import after, axis_names, vary, varying_axes
from hpcjax.sharding.mesh import batch_specs, data_axes, row_axes
from hpcjax.train.state import TrainState, state_shapes, state_specs
from hpcjax.train.task import Task

Metrics = dict[str, Any]
NONFINITE, UNSCORED, STOP = "nonfinite", "unscored", "stop"
_GUARDED = ("params", "model_state", "opt_state")


def train_step(
    task: Task, mesh: Mesh, like: TrainState, *, check: bool = True
) -> jax.stages.Wrapped:
    """Returns the jitted step `(state, batch) -> (state, metrics)`; it donates `state`.

    The loss is the mean over all that the batch scores, on however many devices. If on
    any of them a gradient is not finite, or a finite number of the state would become
    non-finite, the step changes nothing on any device but the counters `step` and
    `skipped`; if the batch scores nothing at all, nothing but `step`.

    Args:
      task: model, method, objective and data.
      mesh: a mesh with data axes.
      like: a state, or its shapes.
      check: whether to do so; False omits `NONFINITE` and takes every step.

    Returns:
      A function whose metrics are replicated: the objective's means over the global
      batch, the optimizer's scalars, and `NONFINITE`, int32 [leaves], on how many
      devices each of the arrays named by `list_guarded` stopped being finite, and
      `UNSCORED`, whether the batch scores nothing. If the batch holds `STOP`, int32
      [devices], its largest entry is a metric too.

    Raises:
      ValueError: when traced, if updates or the optimizer's state differ between
        devices otherwise than the method's specifications say.
    """
    axes, specs = data_axes(mesh), state_specs(task, like)

    def on_device(outer: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        state = per_device.enter(outer)
        batch, stop = dict(batch), batch.get(STOP)
        batch.pop(STOP, None)
        count = scored_by(task, state, batch)
        every = share_out(count, axes)
        one_pass = step_input(task, state, batch, count, mesh)
        params = state.params
        if varying_axes(count):
            one_pass, params = after_count(one_pass, params, specs.params, every)
        result = task.method.gradients(one_pass, params, state.opt_state)
        params, opt_state = task.method.update(result, state.opt_state, params)
        # `shard_map` would also refuse these, but naming no parameter and no remedy.
        check_varying(params, specs.params, "parameters", axes)
        check_varying(opt_state, specs.opt_state, "optimizer state", axes)
        new = TrainState(
            step=state.step + 1,
            params=params,
            model_state=_mean_statistics(result.model_state, axes),
            opt_state=opt_state,
            key=state.key,
            skipped=state.skipped,
        )
        # Workers with models of their own have each counted for themselves.
        means = weigh_means(result.means, one_pass.share / every)
        metrics = _mean(means, axes)
        if check:
            # Over all axes: the number may be in the part of one device alone.
            new, metrics[NONFINITE] = keep_finite(
                result.grads, new, state, mesh.axis_names
            )
            metrics[UNSCORED] = every == 0
            # What became non-finite for want of anything scored is no such step.
            skipped = jnp.where(every == 0, state.skipped, new.skipped)
            kept = _keep_unless(every == 0, new, state)
            new = dataclasses.replace(kept, skipped=skipped)
        if stop is not None:
            metrics[STOP] = jax.lax.pmax(jnp.max(stop), axes)
        scalars = optim.inspect(new.opt_state)
        if both := metrics.keys() & scalars.keys():
            raise ConfigError(
                f"metrics must not be named as scalars of the optimizer: got "
                f"{', '.join(sorted(both))}"
            )
        metrics |= {name: _replicate(value, axes) for name, value in scalars.items()}
        return per_device.leave(new), metrics

    def body(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        mapped = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(specs, batch_specs(batch, mesh, task.method.batch)),
            out_specs=(specs, PartitionSpec()),
            check_vma=True,
        )
        return mapped(state, batch)

    return jax.jit(body, donate_argnums=0)


def scored_by(task: Task, state: TrainState, batch: Batch) -> jax.Array:
    """Returns how many items of this device's batch are scored."""
    bare = per_device.bare(state.params)
    return count_scored(task.model, task.objective, bare, state.model_state, batch)


def step_input(
    task: Task,
    state: TrainState,
    batch: Batch,
    count: jax.Array,
    mesh: Mesh,
    *,
    process: int = 0,
) -> StepInput:
    """Returns the input of this device's backward pass; inside `shard_map`.

    Args:
      task: model and objective.
      state: before the step.
      batch: this device's rows.
      count: how many items of them are scored.
      mesh: a mesh with data axes.
      process: the place of this mesh among those of other processes, whose rows come
        before its own.
    """
    axes, along = data_axes(mesh), row_axes(mesh)
    rows = len(jax.tree.leaves(dict(batch))[0])
    place = process * jax.lax.axis_size(along) + jax.lax.axis_index(along)
    places = place * rows + jnp.arange(rows, dtype=jnp.int32)
    return StepInput(
        task.model,
        task.objective,
        state.model_state,
        batch,
        BatchKey(key=derive(state.key, "step", state.step), rows=places),
        state.step,
        axes,
        share_out(count, tuple(axis for axis in axes if axis != WORKER_AXIS)),
    )


def after_count(
    one_pass: StepInput, params: Any, specs: Any, every: jax.Array
) -> tuple[StepInput, Any]:
    """Returns a pass that takes no collective before that of the count: `core.after`.

    Its share waits, and with it the backward pass; and so do parameters held in parts,
    which the forward pass gathers.
    """
    share, leaves = after(one_pass.share, every), trees.flatten(params)
    held = trees.flatten(specs, lambda leaf: isinstance(leaf, PartitionSpec))
    cut = {path: leaves[path] for path in leaves if shards.axes_of_spec(held[path])}
    params = trees.unflatten(params, leaves | after(cut, share))
    return one_pass._replace(share=share), params


def weigh_means(means: dict[str, Any], weight: jax.Array) -> dict[str, Any]:
    """Returns a device's means of the objective times what they count; 0 / 0 is NaN."""
    return {
        name: value if name == "added_loss" else value * weight
        for name, value in means.items()
    }


def eval_step(task: Task, mesh: Mesh) -> Callable[[Any, Any, Batch], Totals]:
    """Returns the jitted `(params, model_state, batch) -> Totals` over all devices.

    If parameters differ between devices, the model with their mean is evaluated.
    """
    axes = data_axes(mesh)
    like = state_shapes(task, mesh)
    specs = jax.tree.map(
        lambda leaf: leaf.sharding.spec, (like.params, like.model_state)
    )

    def on_device(outer: Any, model_state: Any, batch: Batch) -> Totals:
        params = per_device.average(per_device.enter(outer))
        model_state = per_device.enter(model_state)
        # Sums, not means, are added over devices: padding may leave them with different
        # numbers of scored items.
        outputs, _ = task.model.apply(params, model_state, batch["x"], train=False)
        return jax.lax.psum(vary(task.objective(outputs, batch), axes), axes)

    def body(params: Any, model_state: Any, batch: Batch) -> Totals:
        cut = batch_specs(batch, mesh, task.method.batch)
        mapped = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(*specs, cut),
            out_specs=PartitionSpec(),
        )
        return mapped(params, model_state, batch)

    return jax.jit(body)


def check_varying(tree: Any, specs: Any, what: str, axes: tuple[str, ...]) -> None:
    """Raises ValueError naming the leaves that may differ between devices of `axes`.

    A leaf may differ along the axes that its `PartitionSpec` names, and no others.
    """
    allowed = trees.flatten(specs, lambda leaf: isinstance(leaf, PartitionSpec))
    differing = [
        path
        for path, leaf in trees.flatten(tree).items()
        if varying_axes(leaf) & set(axes) - shards.axes_of_spec(allowed[path])
    ]
    if differing:
        raise ValueError(
            f"{what} differ between devices of axes {axes}: {differing[:5]}; "
            "chain optim.all_reduce_mean before transforms that do not communicate, "
            "and keep what must differ in core.PerDevice"
        )


def list_guarded(state: TrainState) -> list[str]:
    """Returns the names of the entries of `NONFINITE`: `"gradient dense/kernel"`."""
    trees_by_name = {"gradient": state.params}
    trees_by_name |= {name: getattr(state, name) for name in _GUARDED}
    return [
        f"{name} {path}" for name, tree in trees_by_name.items() for path in _real(tree)
    ]


def keep_finite(
    grads: Any, new: TrainState, old: TrainState, axes: tuple[str, ...]
) -> tuple[TrainState, jax.Array]:
    """Returns `new`, or the old state if something is not finite on any device.

    For use inside `shard_map`. The old state is returned, with advanced counters, if a
    gradient is not finite or a finite number of `old` would become non-finite. Numbers
    that are not finite in `old`, such as a best loss that starts at infinity, do not
    count.

    Returns:
      The state, and int32 [leaves], on how many devices each of the arrays named by
      `list_guarded` became non-finite.
    """
    lost = [jnp.any(~jnp.isfinite(leaf)) for leaf in _real(grads).values()]
    for name in _GUARDED:
        before, after = _real(getattr(old, name)), _real(getattr(new, name))
        lost += [
            jnp.any(jnp.isfinite(before[path]) & ~jnp.isfinite(leaf))
            for path, leaf in after.items()
        ]
    # The sum makes all devices take the same decision, also where only one of them saw
    # the number; otherwise their replicated states would part.
    count = jnp.stack([vary(each, axes) for each in lost]).astype(jnp.int32)
    count = jax.lax.psum(count, axes)
    bad = jnp.any(count > 0)
    skipped = old.skipped + bad.astype(jnp.int32)
    new = dataclasses.replace(_keep_unless(bad, new, old), skipped=skipped)
    return new, count


def _real(tree: Any) -> dict[str, Any]:
    """Returns the floating-point leaves by path."""
    return {
        path: leaf
        for path, leaf in trees.flatten(tree).items()
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
    }


def _replicate(value: Any, axes: tuple[str, ...]) -> Any:
    """Returns a metric that is equal on all devices, or its mean if it is not."""
    if not varying_axes(value) & set(axes):
        return value
    return _mean(jnp.asarray(value, jnp.float32), axes)


def _mean_statistics(state: Any, axes: tuple[str, ...]) -> Any:
    """Returns a model's state, averaged where devices have no part of their own."""

    def along_others(node: per_device.PerDevice, leaf: Any, _: str) -> Any:
        others = tuple(axis for axis in axes if axis not in axis_names(node.axis))
        return _mean(leaf, others) if others else leaf

    average = functools.partial(_mean, axes=axes)
    return per_device.map_per_device(along_others, state, average)


def _mean(tree: Any, axes: tuple[str, ...]) -> Any:
    return jax.lax.pmean(vary(tree, axes), axes)


def _keep_unless(bad: Any, new: TrainState, old: TrainState) -> TrainState:
    """Returns `new`, or if `bad` the old values with advanced counters."""

    def keep(old_leaf: Any, new_leaf: Any) -> Any:
        return jnp.where(bad, old_leaf, new_leaf)

    return TrainState(
        step=new.step,
        params=jax.tree.map(keep, old.params, new.params),
        model_state=jax.tree.map(keep, old.model_state, new.model_state),
        opt_state=jax.tree.map(keep, old.opt_state, new.opt_state),
        key=new.key,
        skipped=new.skipped,
    )
