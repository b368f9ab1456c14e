"""A training step whose update is not traced: only its gradients are one program.

That of one worker among several processes sends and receives while it computes, which
no program can; that of a state in tiles is a program for each tile.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hpcjax import optim
from hpcjax.core import checks, per_device
from hpcjax.core.method import Batch, PassResult
from hpcjax.core.varying import vary
from hpcjax.sharding.mesh import data_axes
from hpcjax.train.state import TrainState, state_shapes
from hpcjax.train.step import (
    NONFINITE,
    UNSCORED,
    Metrics,
    list_guarded,
    scored_by,
    step_input,
    weigh_means,
)
from hpcjax.train.task import Task

HostStep = Callable[[TrainState, Batch], tuple[TrainState, Metrics]]


def lower_gradients(task: Task, mesh: Mesh, batch: Batch) -> jax.stages.Lowered:
    """Returns the program of a step whose update is not traced.

    Gradients and running statistics are means over this worker's devices. Statistics of
    a step whose gradients are not finite are left out; what becomes of these gradients
    is for the worker.

    It takes a state of which gradients know what `Around.seen` shows, and a batch.
    """
    axes, around = data_axes(mesh), task.method.around
    whole = state_shapes(task, mesh)
    own = jax.tree.leaves(
        per_device.specs(whole.model_state),
        is_leaf=lambda x: isinstance(x, PartitionSpec),
    )
    rule = "a model whose devices keep states of their own needs a traced update"
    checks.require(all(spec == PartitionSpec() for spec in own), rule)
    unknown = len(list_guarded(whole))

    def body(state: TrainState, batch: Batch) -> tuple[PassResult, Metrics]:
        count = scored_by(task, state, batch)
        one_pass = step_input(task, state, batch, count, mesh, process=around.rank)
        unscored = one_pass.share == 0
        found = task.method.gradients(one_pass, state.params, state.opt_state)
        grads, means, model_state = jax.lax.pmean(
            vary((found.grads, found.means, found.model_state), axes), axes
        )
        extras = {"value": means["loss"], "step": state.step}
        passed = PassResult(grads, means, model_state, extras)
        passed = around.settle(passed, state.opt_state, unscored)
        finite = [jnp.isfinite(g).all() for g in jax.tree.leaves(passed.grads)]
        lost = ~jnp.stack(finite)
        left_out = passed.extras.get("spoiled", jnp.any(lost))
        model_state = jax.tree.map(
            lambda old, new: jnp.where(left_out, old, new),
            state.model_state,
            model_state,
        )
        counts = jnp.pad(lost.astype(jnp.int32), (0, unknown - len(lost)))
        return passed._replace(model_state=model_state), {
            # Where this worker's batch scores nothing, means are not numbers.
            **weigh_means(means, one_pass.share / one_pass.share),
            NONFINITE: counts,
            UNSCORED: unscored,
        }

    mapped = jax.shard_map(
        body,
        mesh=mesh,
        in_specs=(PartitionSpec(), PartitionSpec(axes)),
        out_specs=PartitionSpec(),
    )
    return jax.jit(mapped).lower(_bare(task, around.trained(whole)), batch)


def compile_host_step(task: Task, mesh: Mesh, batch: Batch) -> HostStep:
    """Returns the step `(state, batch) -> (state, metrics)` whose update is not traced.

    Returns:
      A function with the metrics of `train_step`, of this worker alone. `NONFINITE`
      tells of each gradient, and at the first parameter whether an update was left out.
    """
    compiled = lower_gradients(task, mesh, batch).compile()
    everywhere = NamedSharding(mesh, PartitionSpec())
    gradients = len(jax.tree.leaves(state_shapes(task, mesh).params))

    def step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
        found, metrics = compiled(_bare(task, state), batch)
        params, opt_state = task.method.update(found, state.opt_state, state.params)
        spoiled = _left_out(opt_state) > _left_out(state.opt_state)
        counts = metrics[NONFINITE].at[gradients].max(jnp.asarray(spoiled, jnp.int32))
        metrics = {**metrics, NONFINITE: counts}
        skipped = jnp.any(metrics[NONFINITE] > 0).astype(jnp.int32)
        new = TrainState(
            step=state.step + 1,
            params=jax.device_put(params, everywhere),
            model_state=found.model_state,
            opt_state=opt_state,
            key=state.key,
            skipped=state.skipped + skipped,
        )
        kept = {name: jnp.asarray(v) for name, v in optim.inspect(opt_state).items()}
        return new, metrics | kept

    return step


def _bare(task: Task, state: TrainState) -> TrainState:
    """Returns a state with what gradients see of the optimizer's."""
    seen = task.method.around.seen(state.opt_state)
    return dataclasses.replace(state, opt_state=seen)


def _left_out(opt_state: Any) -> Any:
    """Returns how many updates a worker's optimizer has left out as not finite."""
    return optim.inspect(opt_state).get("left_out", 0)
