"""Training with compressed state in the training loop."""

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Bool

from hpcjax.core import masks, trees
from hpcjax.core.errors import ConfigError
from hpcjax.core.keys import derive
from hpcjax.core.method import Method, Optimization, PassResult, RunShape, StepInput
from hpcjax.core.patterns import check_pruned, check_stacked, matches_any
from hpcjax.core.structures import count_kept
from hpcjax.core.varying import vary
from hpcjax.optim.loss_scale import scale_outputs
from hpcjax.optim.methods import differentiate_pass
from hpcjax.optim.sparse_state._positions import locate
from hpcjax.optim.sparse_state._pruned import make_slots, with_slots
from hpcjax.optim.sparse_state._state import SparseState, compress, wrap

if TYPE_CHECKING:
    from hpcjax.optim.sparse_state.config import SparseStateConfig

Link = Callable[[Any], optax.GradientTransformation]


def sparse_training(
    config: "SparseStateConfig", optimizer: Optimization, mean: Link, setup: RunShape
) -> Method:
    """Returns data-parallel training of a network that is pruned before the first step.

    Models get parameters of which some are `Pruned`; the rest of the state, which the
    loop keeps as the optimizer's, is that of `wrap`.

    Args:
      config: what is pruned and how the rest is stored.
      optimizer: whose transform is elementwise.
      mean: `mean(axes)` returns the transform that averages gradients over mesh axes.
      setup: the run.

    Raises:
      ConfigError: a transform that is not elementwise, or regexes that match nothing.
    """
    wrapped = wrap(
        optimizer.tx, mean=mean(optimizer.axes), loss_scale=config.loss_scale
    )
    # Only random positions are others in a run of another seed.
    seed = setup.seed() if config.keep == "random" else 0

    def init(params: Any) -> tuple[Any, SparseState]:
        made = compress(
            params,
            _choose_positions(config, params, seed),
            dtype=config.dtype,
            mode=config.mode,
        )
        state = wrapped.init(made)
        return state.params, dataclasses.replace(state, params=None)

    def update(result: PassResult, state: Any, params: Any) -> tuple[Any, Any]:
        whole = dataclasses.replace(state, params=params)
        new = wrapped.step(whole, result.grads, **result.extras)
        return new.params, dataclasses.replace(new, params=None)

    shapes, _ = jax.eval_shape(setup.model.init, jax.random.key(0))
    try:
        jax.eval_shape(init, shapes)
    except (ConfigError, TypeError) as error:
        raise ConfigError(f"state=sparse: {error}") from error
    gradients = _gradients(config)
    return Method(optimizer.mesh_shape, init, gradients, update, optimizer.facts)


def _gradients(config: "SparseStateConfig") -> Any:
    """Returns the backward pass whose gradients are compressed."""

    def gradients(one_pass: StepInput, params: Any, state: SparseState) -> PassResult:
        def apply(slots: Any, *args: Any, **options: Any) -> tuple[Any, Any]:
            attached = with_slots(params, slots)
            outputs, new = one_pass.model.apply(attached, *args, **options)
            return scale_outputs(outputs, new, state.scaling)

        model = one_pass.model._replace(apply=apply)
        own = one_pass._replace(model=model)
        result, _ = differentiate_pass(own, make_slots(params))
        # It would be a function of the slots.
        extras = {k: v for k, v in result.extras.items() if k != "value_fn"}
        result = result._replace(extras=extras)
        if state.scaling is None or config.loss_scale is None:
            return result
        lowest = state.scaling.scale <= config.loss_scale.least
        return _clear_overflow(result, lowest, one_pass.axes)

    return gradients


def _clear_overflow(
    result: PassResult, lowest: Bool[Array, ""], axes: tuple[str, ...]
) -> PassResult:
    """Replaces gradients by zeros, on all devices, if one of them is not finite.

    The loop skips steps with such gradients, and with its state the smaller loss scale.
    Once the scale is at its lowest, that is what has to happen.
    """
    bad = [~jnp.isfinite(g).all() for g in jax.tree.leaves(result.grads)]
    count = vary(jnp.stack(bad).any().astype(jnp.int32), axes)
    overflow = (jax.lax.psum(count, axes) > 0) & ~lowest
    grads = jax.tree.map(lambda g: jnp.where(overflow, 0, g), result.grads)
    return result._replace(grads=grads, extras={**result.extras, "overflow": overflow})


def _choose_positions(config: "SparseStateConfig", params: Any, seed: int) -> Any:
    """Returns the positions to keep, None for parameters that are not pruned."""
    leaves = trees.flatten(params)
    for name in ("pruned", "stacked"):
        check_stacked(getattr(config, name), leaves)
    chosen = {}
    for path, leaf in leaves.items():
        stacked = matches_any(config.stacked, path)
        inner = leaf.shape[1:] if stacked else leaf.shape
        prunes = matches_any(config.pruned, path) if config.pruned else len(inner) > 1
        if not prunes:
            chosen[path] = None
            continue
        kept = count_kept(math.prod(inner), config.sparsity)
        score = jnp.abs(leaf)
        if config.keep == "random":
            key = derive(jax.random.key(seed), f"keep {path}")
            score = jax.random.uniform(key, leaf.shape)
        # Every layer of a stack keeps as many as the others: none has room to spare.
        choose = functools.partial(masks.keep_largest, k=kept)
        mask = jax.vmap(choose)(score) if stacked else choose(score)
        chosen[path] = locate(
            path, mask, kept=kept, index=config.index, stacked=stacked
        )
    shapes = {path: leaf.shape for path, leaf in leaves.items()}
    check_pruned(shapes, [each is not None for each in chosen.values()])
    return trees.unflatten(params, chosen)
