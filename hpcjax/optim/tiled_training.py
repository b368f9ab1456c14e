"""Training whose optimizer's state is in tiles: a method whose update is not traced."""

import dataclasses
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp

from hpcjax.core import checks
from hpcjax.core.method import (
    DATA_AXIS,
    Around,
    Method,
    Optimization,
    PassResult,
    RunShape,
    StepInput,
)
from hpcjax.optim.first_order import clip_global_norm
from hpcjax.optim.loss_scale import Scaling, advance, begin_scaling, scale_pass
from hpcjax.optim.methods import whole_backward
from hpcjax.optim.tiles import TiledState, TiledTransform

if TYPE_CHECKING:
    from hpcjax.optim.tiled_config import TiledConfig


def train_tiled(
    config: "TiledConfig", optimizer: Optimization, setup: RunShape
) -> Method:
    """Returns data-parallel training whose update is taken tile by tile.

    Gradients, their mean and its norm are one program. If one of them is not finite no
    tile is touched. What is saved is the state of the whole, with float32 parameters,
    so that a run goes on with any other tile and space.

    Args:
      config: of the tiles.
      optimizer: whose transform works on elements.
      setup: the run.

    Raises:
      ConfigError: see `TiledConfig.build`.
    """
    _check_place(config, optimizer)
    frozen = setup.model.frozen
    checks.require(not frozen, "state=tiled moves all parameters", frozen=frozen)
    shapes, _ = jax.eval_shape(setup.model.init, jax.random.key(0))
    tiled = TiledTransform(optimizer.tx, shapes, config)

    def init(params: Any) -> tuple[Any, TiledState]:
        begun = optimizer.begin(params)
        scaling = begin_scaling(config.loss_scale)
        return begun, TiledState(inner=optimizer.tx.init(begun), scaling=scaling)

    def gradients(one_pass: StepInput, params: Any, state: Any) -> PassResult:
        # Of the state it gets what `seen` shows, the scaling.
        return whole_backward(scale_pass(one_pass, state), params, None)

    def settle(found: PassResult, scaling: Scaling | None, unscored: Any) -> PassResult:
        finite = [jnp.isfinite(g).all() for g in jax.tree.leaves(found.grads)]
        spoiled = ~jnp.stack(finite).all()
        grads, cleared = _clip(found.grads, optimizer.clip_norm, scaling), unscored
        if scaling is not None and config.loss_scale is not None:
            # The guard of the loop sees what no scale makes finite.
            cleared |= spoiled & (scaling.scale > config.loss_scale.least)
        grads = jax.tree.map(lambda g: jnp.where(cleared, 0, g), grads)
        told = {"spoiled": spoiled | unscored, "unscored": unscored}
        return found._replace(grads=grads, extras={**found.extras, **told})

    def update(found: PassResult, state: Any, params: Any) -> tuple[Any, Any]:
        extras = dict(found.extras)
        told = [extras.pop(name) for name in ("spoiled", "unscored")]
        spoiled, unscored = jax.device_get(told)
        new = state
        if not spoiled:
            params, new = tiled.update(found.grads, state, params, **extras)
        if config.loss_scale is None or unscored:
            return params, new
        scaling = advance(config.loss_scale, state.scaling, jnp.asarray(not spoiled))
        return params, dataclasses.replace(new, scaling=scaling)

    def move(state: Any, how: Callable[[Any, Any], tuple[Any, Any]]) -> Any:
        params, own = how(state.params, state.opt_state)
        return dataclasses.replace(state, params=params, opt_state=own)

    host = (
        {f"inner/{path}" for path in tiled.cut_paths} if config.space == "host" else ()
    )
    around = Around(
        traced=False,
        seen=lambda state: state.scaling,
        settle=settle,
        on_host=lambda path: path in host,
        trained=lambda state: move(state, tiled.cut),
        start=lambda state, _: move(state, tiled.cut),
        view=lambda state: lambda batch: (tiled.narrow(state.params), batch),
        pause=lambda state: move(state, tiled.join),
    )
    facts = {**optimizer.facts, "tiles": float(len(tiled.tiles))}
    return Method(
        optimizer.mesh_shape, init, gradients, update, facts=facts, around=around
    )


def _clip(grads: Any, most: float | None, scaling: Scaling | None) -> Any:
    """Returns scaled gradients whose norm, without the scale, is at most `most`."""
    if most is None:
        return grads
    clip = clip_global_norm(most * (1 if scaling is None else scaling.scale))
    return clip.update(grads, clip.init(grads))[0]


def _check_place(config: "TiledConfig", optimizer: Optimization) -> None:
    """Raises ConfigError if devices do not hold whole models, or no host memory."""
    rule = "state=tiled is of one process, which holds one whole model on each device"
    alone = jax.process_count() == 1 and optimizer.axes == DATA_AXIS
    processes, axes = jax.process_count(), optimizer.axes
    checks.require(alone, rule, processes=processes, axes=axes)
    if config.space == "host":
        memories = {each.kind for each in jax.devices()[0].addressable_memories()}
        rule = "space=host needs a device with pinned host memory"
        checks.require("pinned_host" in memories, rule, memories=sorted(memories))
