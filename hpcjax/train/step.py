"""One training step and one validation step, as single SPMD programs.

Both run inside `shard_map` over the data axis, on one device as on many. The checker of
`shard_map` (`check_vma=True`) knows which values may differ between devices; a missing
exchange of gradients is therefore an error here and not a slow drift of parameters.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from hpcjax import optim
from hpcjax.core import per_device, trees
from hpcjax.core.keys import derive
from hpcjax.core.varying import vary, varying_axes
from hpcjax.sharding.mesh import data_axes
from hpcjax.train.gradients import Metrics, gradients
from hpcjax.train.state import TrainState
from hpcjax.train.task import Batch, Task, Totals

NONFINITE, STOP = "nonfinite", "stop"
_GUARDED = ("params", "model_state", "opt_state")


def train_step(
    task: Task, mesh: Mesh, like: TrainState, *, check: bool = True
) -> jax.stages.Wrapped:
    """Returns the jitted step `(state, batch) -> (state, metrics)`; it donates `state`.

    A step in which a gradient is not finite, or which would make a finite number of the
    state non-finite, on any device, changes no parameter and no state on any device,
    except the counters `step` and `skipped`.

    Args:
      task: what is trained.
      mesh: a mesh with data axes.
      like: a state, or its shapes.
      check: False takes every step, finite or not, and leaves `NONFINITE` out.

    Returns:
      A function whose metrics are replicated scalars: the objective's means over the
      global batch, the optimizer's own, and `NONFINITE`, int32 [leaves]: on how many
      devices each of the arrays that `guarded` names stopped being finite. Where the
      batch holds `STOP`, int32 [devices], its largest entry is a metric too.

    Raises:
      ValueError: when traced, if updates or bare optimizer state differ along the axis.
    """
    axes = data_axes(mesh)

    def body(outer: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        state = per_device.enter(outer)
        batch, stop = dict(batch), batch.get(STOP)
        batch.pop(STOP, None)
        key = jax.random.fold_in(
            derive(state.key, "step", state.step), jax.lax.axis_index(axes)
        )

        found = gradients(task, state, batch, key, axes)
        updates, opt_state = task.optimizer.update(
            found.grads, state.opt_state, state.params, **found.extras
        )
        check_replicated(updates, "updates", axes)
        check_replicated(opt_state, "optimizer state", axes)
        new = TrainState(
            step=state.step + 1,
            params=jax.tree.map(
                lambda p, u: (p + u).astype(p.dtype), state.params, updates
            ),
            model_state=_mean(found.model_state, axes),
            opt_state=opt_state,
            key=state.key,
            skipped=state.skipped,
        )
        metrics = _mean(found.means, axes)
        if check:
            new, metrics[NONFINITE] = keep_finite(found.grads, new, state, axes)
        if stop is not None:
            metrics[STOP] = jax.lax.pmax(jnp.max(stop), axes)
        new = per_device.leave(new)
        return new, metrics | optim.inspect(new.opt_state)

    specs = per_device.specs(like)
    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(specs, PartitionSpec(axes)),
        out_specs=(specs, PartitionSpec()),
        check_vma=True,
    )
    return jax.jit(mapped, donate_argnums=0)


def eval_step(task: Task, mesh: Mesh) -> Callable[[Any, Any, Batch], Totals]:
    """Returns the jitted `(params, model_state, batch) -> Totals` over all devices."""
    axes = data_axes(mesh)

    def body(params: Any, model_state: Any, batch: Batch) -> Totals:
        outputs, _ = task.model.apply(params, model_state, batch["x"], train=False)
        return jax.lax.psum(vary(task.objective(outputs, batch), axes), axes)

    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(), PartitionSpec(axes)),
        out_specs=PartitionSpec(),
    )
    return jax.jit(mapped)


def check_replicated(tree: Any, what: str, axes: tuple[str, ...]) -> None:
    """Raises ValueError naming the leaves that may differ between devices of `axes`.

    `PerDevice` parts are meant to differ and are left out.
    """
    bare = per_device.map_per_device(lambda *_: None, tree)
    differing = [
        path
        for path, leaf in trees.flatten(bare).items()
        if varying_axes(leaf) & set(axes)
    ]
    if differing:
        raise ValueError(
            f"{what} differ between devices of axes {axes}: {differing[:5]}; "
            "chain optim.all_reduce_mean before transforms that do not communicate, "
            "and keep what must differ in core.PerDevice"
        )


def guarded(state: TrainState) -> list[str]:
    """Returns what the entries of `NONFINITE` stand for: `"gradient dense/kernel"`."""
    trees_by_name = {"gradient": state.params}
    trees_by_name |= {name: getattr(state, name) for name in _GUARDED}
    return [
        f"{name} {path}" for name, tree in trees_by_name.items() for path in _real(tree)
    ]


def keep_finite(
    grads: Any, new: TrainState, old: TrainState, axes: tuple[str, ...]
) -> tuple[TrainState, jax.Array]:
    """Returns the state to go on with, and what stopped being finite.

    Inside `shard_map`. The state is `new`, or `old` with the counters advanced where a
    gradient is not finite or a finite number of `old` would become non-finite, on any
    device. What was not finite before, such as a best loss that begins at infinity, is
    let be.

    Returns:
      The state, and int32 [leaves]: on how many devices each of the arrays that
      `guarded` names was hit.
    """
    lost = [jnp.any(~jnp.isfinite(leaf)) for leaf in _real(grads).values()]
    for name in _GUARDED:
        before, after = _real(getattr(old, name)), _real(getattr(new, name))
        lost += [
            jnp.any(jnp.isfinite(before[path]) & ~jnp.isfinite(leaf))
            for path, leaf in after.items()
        ]
    count = jnp.stack([vary(each, axes) for each in lost]).astype(jnp.int32)
    count = jax.lax.psum(count, axes)
    return _unless(jnp.any(count > 0), new, old), count


def _real(tree: Any) -> dict[str, Any]:
    """Returns the floating-point leaves by path."""
    return {
        path: leaf
        for path, leaf in trees.flatten(tree).items()
        if jnp.issubdtype(leaf.dtype, jnp.inexact)
    }


def _mean(tree: Any, axes: tuple[str, ...]) -> Any:
    return jax.lax.pmean(vary(tree, axes), axes)


def _unless(bad: Any, new: TrainState, old: TrainState) -> TrainState:
    """Returns `new`, or where `bad` the old values with only the counters advanced."""

    def keep(old_leaf: Any, new_leaf: Any) -> Any:
        return jnp.where(bad, old_leaf, new_leaf)

    return TrainState(
        step=new.step,
        params=jax.tree.map(keep, old.params, new.params),
        model_state=jax.tree.map(keep, old.model_state, new.model_state),
        opt_state=jax.tree.map(keep, old.opt_state, new.opt_state),
        key=new.key,
        skipped=old.skipped + bad.astype(jnp.int32),
    )
