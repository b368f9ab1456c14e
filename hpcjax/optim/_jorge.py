"""Jorge: second-order preconditioning by matrix products alone."""

import functools
import warnings
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array

from hpcjax.optim import jorge_factor, matrices, preconditioning
from hpcjax.optim._owners import map_groups_on_owners, unstack
from hpcjax.optim.jorge_config import JorgeOptions
from hpcjax.optim.jorge_factor import FactorState


def _refresh(
    groups: list[FactorState],
    gradients: list[list[Array]],
    count: Array,
    options: JorgeOptions,
) -> list[FactorState]:
    """Starts and updates the factors when it is their turn."""

    def measured(function: Callable[..., Any]) -> list[Any]:
        """Returns the function of each gradient, stacked by group."""
        found = [
            matrices.map_equal_shapes(function, [(g,) for g in own])
            for own in gradients
        ]
        return [jax.tree.map(lambda *each: jnp.stack(each), *own) for own in found]

    def start(groups: list[FactorState]) -> list[FactorState]:
        found = measured(jorge_factor.scaled_square)
        return [
            jax.vmap(jorge_factor.start)(state, *own)
            for state, own in zip(groups, found, strict=True)
        ]

    def update(groups: list[FactorState]) -> list[FactorState]:
        gram = functools.partial(jorge_factor.scaled_gram, precision=options.precision)
        step = functools.partial(jorge_factor.update, options=options)
        if options.axis_name is not None:
            pairs = [
                [*zip(unstack(group), own, strict=True)]
                for group, own in zip(groups, gradients, strict=True)
            ]
            return map_groups_on_owners(
                lambda pair: step(pair[0], *gram(pair[1])),
                pairs,
                _multiply_adds,
                options.axis_name,
            )
        return [
            jax.vmap(step)(state, *own)
            for state, own in zip(groups, measured(gram), strict=True)
        ]

    if options.init == "grad":
        waiting = jnp.concatenate([state.updates for state in groups]).min() < 0
        groups = jax.lax.cond(waiting, start, lambda kept: kept, groups)
    if options.update_every == 1 and options.start_step == 0:
        return update(groups)
    since = count - options.start_step
    turn = (since >= 0) & (since % options.update_every == 0)
    return jax.lax.cond(turn, update, lambda kept: kept, groups)


def _multiply_adds(pair: tuple[FactorState, Array]) -> float:
    """Returns 5m³ + m²n, the work of updating a factor by a gradient `[m, n]`."""
    m, n = pair[1].shape
    return m * m * (5.0 * m + n)


def _metrics(found: preconditioning.Figures) -> dict[str, Array]:
    state = FactorState(found.figures, found.figures)
    return {
        "jorge_beta2_left": jnp.where(found.left, state.beta2, 0).max(),
        "jorge_beta2_right": jnp.where(found.left, 0, state.beta2).max(),
        "jorge_nu": state.nu.max(),
        "jorge_gain": state.gain.max(),
        "jorge_asymmetry": state.asymmetry.max(),
        "jorge_sign": found.sign,
        "jorge_stalled": state.stalled.sum(),
        "jorge_diverged_updates": state.diverged_updates.sum(),
    }


def _say_diverged(updates: Any) -> None:
    if updates > 0:
        warnings.warn(
            f"Jorge's series does not converge at this beta2 in {int(updates)} updates "
            "of preconditioners: use beta2='dynamic' or one nearer to 1",
            stacklevel=2,
        )


def _warn_diverged(old: dict[str, Array], new: dict[str, Array]) -> None:
    added = new["jorge_diverged_updates"] - old["jorge_diverged_updates"]
    jax.lax.cond(
        added > 0,
        lambda: jax.debug.callback(_say_diverged, added),
        lambda: None,
    )


def scale_by_jorge(**options: Any) -> optax.GradientTransformationExtraArgs:
    """Preconditions by approximate inverse fourth roots and smooths by momentum.

    A parameter seen as matrices G (`matrix_shape`) keeps L̂ ≈ L^(−1/4) and
    R̂ ≈ R^(−1/4) of Shampoo's averages, updated without any root or factorization by
    `jorge_factor_update`: G̃ = L̂GR̂, m ← β₁m + (1 − β₁)G̃. A parameter with no
    preconditioned side gets the momentum of its raw gradient.

    The direction is Shampoo's, the length is not (at its fixed point a 1×1 problem has
    L̂⁴s = 2.07, not 1), so that it must be grafted: use `jorge` or `graft`. From
    ε^(−1/4)·I the preconditioners take hundreds of updates to adapt; `jorge_nu` shows
    it and `init="grad"` shortens it. All is done in float32, or in the parameters'
    dtype if that is better.

    With `axis_name` the updates of the preconditioners are shared out over a mesh axis:
    each device computes those it owns, balanced by their multiply-adds, and broadcasts
    them. Everything else, and the result, is the same on all devices.

    Expects averaged gradients. `state.metrics` has, over all factors, the largest
    `jorge_beta2_left`, `jorge_beta2_right`, `jorge_nu`, `jorge_gain`,
    `jorge_asymmetry`, the smallest `jorge_sign` of ⟨G̃, G⟩, and the numbers
    `jorge_stalled` of factors and `jorge_diverged_updates`; `factors_of` gives
    those of each factor.

    Args:
      **options: the fields of `JorgeOptions`.

    Returns:
      A transform; its updates have the dtype of the gradients.

    Raises:
      ConfigError: an option out of its range; an update outside of `shard_map` over
        `axis_name`.
      TypeError: at init, for complex or integer parameters.

    References:
      Singh, Sating, Bhatele, Jorge, arXiv 2310.12298, Algorithm 2.

    Examples:
      >>> tx = scale_by_jorge(update_every=1, init="grad")
      >>> params = {"kernel": jnp.ones((3, 2))}
      >>> updates, state = tx.update(params, tx.init(params))
      >>> int(state.count), updates["kernel"].shape
      (1, (3, 2))
    """
    chosen = JorgeOptions.of(options, scale_by_jorge)
    dynamic = chosen.beta2 == "dynamic"
    return preconditioning.scale_by_preconditioners(
        preconditioning.Preconditioner(
            init=functools.partial(jorge_factor.jorge_factor_init, options=chosen),
            refresh=functools.partial(_refresh, options=chosen),
            metrics=_metrics,
            check=None if dynamic else _warn_diverged,
        ),
        b1=chosen.b1,
        cuts=matrices.Cuts(chosen.max_dim, chosen.block_size, chosen.stacked),
        precision=chosen.precision,
    )
