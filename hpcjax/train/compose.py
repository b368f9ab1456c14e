"""Composing a training method from the parts of a config."""

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from hpcjax import data, optim, perf
from hpcjax.core import checks
from hpcjax.core.method import (
    DATA_AXIS,
    Backward,
    Method,
    Optimization,
    RunSeed,
    RunShape,
)
from hpcjax.core.model import Model
from hpcjax.train.task import rows_like

if TYPE_CHECKING:
    from hpcjax.hostcomm import Transport


def compose(  # noqa: PLR0913 - an argument for each part
    model: Model,
    dataset: "data.Dataset",
    optimizer: Any,
    *,
    exchange: Any = None,
    backward: Any = None,
    averaged: Any = None,
    state: Any = None,
    sparsity: Any = None,
    parallel: Any = None,
    batch_size: int,
    steps: int,
    devices: int = 1,
    seed: int | RunSeed = 0,
    transport: "Transport | None" = None,
) -> Method:
    """Returns the training method of a run.

    Gradients are computed by the backward pass of the optimizer, or by that of
    `backward`, averaged over the devices that share a model, and turned into an update
    by the optimizer. With `averaged` there are several models, which are then averaged.

    Args:
      model: the model to train; that of `apply_to` of what changes it.
      dataset: the data set to train it on.
      optimizer: config of the optimizer, with either `build(setup)`, which returns a
        `core.Optimization`, or `make(steps)`, which returns a transform.
      exchange: config of the exchange that averages gradients; None for their mean.
      backward: config of a backward pass with a mean of its own, whose `build(setup)`
        returns a `core.Backward`.
      averaged: config of workers that train separate models.
      state: config of parameters and optimizer state in a form of their own, whose
        `build(optimization, mean, setup)` returns a `core.Method`.
      sparsity: config of pruning, whose `build(optimization, setup)` returns a
        `core.Optimization` that also sets parameters to zero, or that trains what the
        weights of `model` are made of.
      parallel: config of how the one model is spread over devices, whose `build(setup)`
        returns a `core.Parallel`.
      batch_size: number of examples in a step over all devices.
      steps: length of the run.
      devices: number of devices; those of this process, where `transport` is given.
      seed: seed of the run.
      transport: of this process among the workers, where these are processes.

    Raises:
      ConfigError: the parts do not fit each other, the devices or the model.
    """
    if hasattr(parallel, "cut_model"):
        _check_over_space(averaged, backward, optimizer)
    workers = 1
    if transport is not None:
        workers, devices = transport.size, devices * transport.size
    elif averaged is not None:
        workers = averaged.count(devices, shared=exchange is not None)
    # What each worker's optimizer sees: its share of the batch and of the devices.
    setup = RunShape(
        model,
        rows_like(dataset, batch_size // workers),
        steps,
        workers,
        devices // workers,
        seed if isinstance(seed, RunSeed) else RunSeed(seed),
        functools.cache(functools.partial(_layer_flops, model, dataset)),
        dataset.train,
    )
    mean: Callable[[Any], Any] = optim.all_reduce_mean
    if exchange is not None:
        mean = functools.partial(optim.exchange_gradients, exchange)
    drawn = getattr(optimizer, "fisher", "empirical") != "empirical"
    what = dataset.objective.name
    rule = f"labels of {what} are no classes: fisher must be empirical"
    checks.require(dataset.objective.classes or not drawn, rule, optimizer=optimizer)
    chosen = _build_optimization(optimizer, state, setup)
    if backward is not None:
        whole = chosen.gradients is None and exchange is None
        rule = (
            "a backward pass of its own needs an optimizer without one, such as K-FAC "
            "has, and averages by itself: give no exchange"
        )
        checks.require(whole, rule, optimizer=optimizer, exchange=exchange)
        own: Backward = backward.build(setup)
        mean, facts = own.mean, {**chosen.facts, **own.facts}
        chosen = chosen._replace(gradients=own.gradients, facts=facts)
    spread = None if parallel is None else parallel.build(setup)
    cut = {} if spread is None else spread.batch
    if spread is not None and cut:  # of means over the axes of space, too
        chosen = chosen._replace(axes=spread.axes, mesh_shape=spread.mesh_shape)
    if sparsity is not None:
        chosen = sparsity.build(chosen, setup)
    if state is not None:
        plain = averaged is None and backward is None and chosen.gradients is None
        rule = "state in a form of its own is of one model with plain gradients"
        checks.require(plain, rule, averaging=averaged, backward=backward)
        return state.build(chosen, mean, setup)._replace(batch=cut)
    if spread is not None and not cut:
        alone = averaged is None and exchange is None and backward is None
        rule = "what spreads one model over devices averages its gradients by itself"
        given = {"averaging": averaged, "exchange": exchange, "backward": backward}
        checks.require(alone and chosen.gradients is None, rule, **given)
        return optim.train_shards(chosen, spread, model, devices)
    if averaged is None:
        return optim.data_parallel(chosen, mean=mean)._replace(batch=cut)
    if transport is not None:
        rule = "a worker in a process of its own takes the mean of whole gradients"
        plain = exchange is None and backward is None
        checks.require(plain, rule, exchange=exchange, backward=backward)
        return averaged.build_on_hosts(chosen, transport, setup)
    return averaged.build(chosen, mean, setup)


def _check_over_space(averaged: Any, backward: Any, optimizer: Any) -> None:
    """Raises ConfigError if a part does not go on where examples are cut."""
    rule = "examples that are cut in space are of one model with plain gradients"
    plain = "gradients" not in getattr(optimizer, "claims", ())
    given = {"averaging": averaged, "backward": backward, "optimizer": optimizer}
    checks.require(averaged is None and backward is None and plain, rule, **given)


def _build_optimization(optimizer: Any, state: Any, setup: RunShape) -> Optimization:
    """Returns the optimizer of a config, with its own backward pass if it has one.

    A form of state that `clips` takes the norm of all gradients by itself.
    """
    clip = getattr(optimizer, "clip_norm", None)
    if clip is not None and getattr(state, "clips", False):
        bare = dataclasses.replace(optimizer, clip_norm=None)
        return _build_optimization(bare, None, setup)._replace(clip_norm=clip)
    if hasattr(optimizer, "build"):
        return optimizer.build(setup)
    return Optimization(optimizer.make(setup.steps))


def _layer_flops(model: Model, dataset: "data.Dataset", rows: int) -> tuple[float, ...]:
    """Returns the FLOPs of each layer's backward pass for a number of examples."""
    batch = rows_like(dataset, rows)
    params, state = jax.eval_shape(model.init, jax.random.key(0))

    def loss(params: Any, state: Any, batch: Any) -> Any:
        def score(batch: Any) -> Any:
            outputs, _ = model.apply(
                params, state, batch["x"], train=True, key=jax.random.key(0)
            )
            return dataset.objective(outputs, batch).sums["loss"]

        # Batch statistics may be of all devices: here of one.
        alone = jax.tree.map(lambda leaf: leaf[None], batch)
        return jax.vmap(score, axis_name=DATA_AXIS)(alone)[0]

    layers = optim.layers_of_model(model, batch["x"])
    return perf.backward_flops(loss, layers, params, state, batch)
