"""Statistics of batch norms for images of a size, from passes over training batches."""

import dataclasses
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, PartitionSpec

from hpcjax import data
from hpcjax.core import checks, per_device, trees
from hpcjax.core.keys import BatchKey, derive
from hpcjax.core.varying import vary
from hpcjax.sharding.mesh import batch_specs, data_axes, place_batch, row_axes
from hpcjax.train.state import TrainState, state_shapes
from hpcjax.train.task import Task

Variance = Literal["pooled", "paper"]
# Names of a batch norm's statistics: of our layer, and of flax's.
_VARIANCES = ("variance", "var")
Moments = tuple[dict[str, Any], dict[str, Any], dict[str, Any]]


def calibrate(
    task: Task,
    state: TrainState,
    size: int,
    batches: int,
    *,
    batch_size: int = 100,
    seed: int = 0,
    variance: Variance = "pooled",
) -> TrainState:
    """Returns a state whose batch norms have the statistics of images of a size.

    Activations depend on the size of images, and the running statistics of a network
    that was trained on several sizes are those of none. Here they are cumulative means
    over training passes, in each of which layers normalise by the batch. No weight is
    changed, and the same arguments give the same bits.

    Args:
      task: with the training images, augmented as in training.
      state: trained, on its mesh.
      size: sides of the images; that of the data set, unless it is `mixed_sizes`.
      batches: how many passes.
      batch_size: images of each, over all devices.
      seed: of their order and augmentation.
      variance: "pooled" is E[x²] − E[x]² over all batches. "paper" is the mean of the
        batches' variances, which leaves out how their means differ; they are biased
        here, divided by n, where PyTorch's are divided by n − 1.

    Raises:
      ConfigError: the data set has no images of that size, devices cannot share a
        batch, or the model has no batch norm.

    References:
      Hoffer et al., Mix & Match, 2019; `calibrate_bn` of eladhoffer/convNet.pytorch.
    """
    checks.require_count(1, batches=batches)
    checks.require_choice("variance", variance, ("pooled", "paper"))
    names = trees.flatten(state.model_state)
    rule = "the model must have batch norms, whose statistics are calibrated"
    normed = any(_partner(path, names) for path in names)
    checks.require(normed, rule, model_state=tuple(names))
    mesh = state.step.sharding.mesh
    devices = per_device.axis_size(mesh, row_axes(mesh))
    rule = f"batch_size must divide by the {devices} devices"
    checks.require(batch_size % devices == 0, rule, batch_size=batch_size)
    train = task.dataset.train
    if hasattr(train, "at"):
        train = train.at(size)
    else:
        own = task.dataset.inputs[0]
        checks.require(size == own, f"size must be {own}, the data set's", size=size)
    stream = data.batches(train, batch_size, seed, augment=task.dataset.augment)
    measure = task.once(("calibration", mesh), lambda: _moments(task, mesh))
    means, variances = [], []
    for number in range(batches):
        batch = place_batch(stream[number], mesh, task.method.batch)
        key = derive(jax.random.key(seed), "calibrate", number)
        found = measure(state.params, state.model_state, batch, key)
        mean, within, between = jax.device_get(found)
        means.append(mean)
        # Devices' means differ as batches' do.
        pooled = variance == "pooled"
        variances.append({p: within[p] + between[p] * pooled for p in within})
    return _with_statistics(state, means, variances, variance)


def _with_statistics(
    state: TrainState, means: list[Any], variances: list[Any], variance: Variance
) -> TrainState:
    """Returns a state with cumulative statistics, which are added in float64."""
    leaves = dict(trees.flatten(state.model_state))
    for path in means[0]:
        each = np.stack([mean[path] for mean in means]).astype(np.float64)
        spread = np.stack([own[path] for own in variances]).astype(np.float64).mean(0)
        if variance == "pooled":
            spread += each.var(0)
        for place, value in ((path, each.mean(0)), (_partner(path, leaves), spread)):
            old = leaves[place]
            leaves[place] = jax.device_put(value.astype(old.dtype), old.sharding)
    found = trees.unflatten(state.model_state, leaves)
    return dataclasses.replace(state, model_state=found)


def _partner(path: str, leaves: Any) -> str:
    """Returns the path of the variance that belongs to a mean; "" if there is none."""
    parent = path.removesuffix("mean")
    found = [parent + name for name in _VARIANCES if parent + name in leaves]
    return found[0] if found and path.endswith("mean") else ""


def _moments(task: Task, mesh: Mesh) -> Callable[..., Moments]:
    """Returns `(params, model_state, batch, key) -> (mean, within, between)`, by path.

    Of each batch norm, by the path of its mean: the mean over devices of what a batch
    has there, that of its variances, and that of the squared distance of its means.
    """
    axes = data_axes(mesh)
    specs = jax.tree.map(lambda x: x.sharding.spec, state_shapes(task, mesh).params)

    def on_device(outer: Any, model_state: Any, batch: Any, key: Any) -> Moments:
        params = per_device.average(per_device.enter(outer))
        old = trees.flatten(model_state)
        partners = {path: pair for path in old if (pair := _partner(path, old))}
        kept = [*partners, *partners.values()]
        rows = len(jax.tree.leaves(batch)[0])
        first = jax.lax.axis_index(row_axes(mesh)) * rows
        keys = BatchKey(key=key, rows=first + jnp.arange(rows, dtype=jnp.int32))

        def apply(statistics: dict[str, Any]) -> dict[str, Any]:
            given = trees.unflatten(model_state, {**old, **statistics})
            _, new = task.model.apply(params, given, batch["x"], train=True, key=keys)
            return {path: vary(trees.flatten(new)[path], axes) for path in kept}

        # A pass gives m · old + (1 − m) · own, of which the derivative by old is m.
        zeros = {path: jnp.zeros_like(old[path]) for path in kept}
        ones = {path: jnp.ones_like(old[path]) for path in kept}
        new, momentum = jax.jvp(apply, (zeros,), (ones,))
        own = {path: new[path] / (1 - momentum[path]) for path in kept}
        mean = {path: jax.lax.pmean(own[path], axes) for path in partners}
        within = {p: jax.lax.pmean(own[pair], axes) for p, pair in partners.items()}
        between = {
            path: jax.lax.pmean(jnp.square(own[path] - mean[path]), axes)
            for path in partners
        }
        return mean, within, between

    def body(params: Any, model_state: Any, batch: Any, key: Any) -> Moments:
        whole = PartitionSpec()
        mapped = jax.shard_map(
            on_device,
            mesh=mesh,
            in_specs=(specs, whole, batch_specs(batch, mesh, task.method.batch), whole),
            out_specs=whole,
        )
        return mapped(params, model_state, batch, key)

    return jax.jit(body)
