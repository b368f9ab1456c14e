"""Shampoo: preconditioning by exact inverse roots of averaged statistics."""

import functools
import sys
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jaxtyping import Array, Float

from hpcjax.optim import matrices, matrix_roots, preconditioning
from hpcjax.optim._owners import map_groups_on_owners, unstack
from hpcjax.optim.shampoo_config import ShampooOptions

DEFAULT_POWER = 4
FOUND = ("matrix", "figures")  # what a new root changes
FAILED = np.array([False, False, True])  # which of the figures counts failures


class ShampooFactor(NamedTuple):
    """The statistic and the root of one side.

    Attributes:
      statistic: L, the average or sum of GGᵀ, `[dim, dim]`.
      matrix: L^(−1/4) at the last refresh, `[dim, dim]`.
      figures: the properties `error`, `iterations` and `failed`, one array of them all.
    """

    statistic: Float[Array, "*stack dim dim"]
    matrix: Float[Array, "*stack dim dim"]
    figures: Float[Array, "*stack 3"]

    @property
    def error(self) -> Any:
        """Residual of the last Newton iteration; zero for `root="eigh"`."""
        return self.figures[..., 0]

    @property
    def iterations(self) -> Any:
        """Steps of the last Newton iteration."""
        return self.figures[..., 1]

    @property
    def failed(self) -> Any:
        """Statistics and roots that were not finite and so were not taken."""
        return self.figures[..., 2]


def _init(dim: int, dtype: jnp.dtype, eps: float, power: int) -> ShampooFactor:
    identity = jnp.eye(dim, dtype=dtype)
    return ShampooFactor(
        statistic=eps * identity,
        matrix=eps ** (-1 / power) * identity,
        figures=jnp.zeros(3, dtype),
    )


def _take(state: ShampooFactor, good: Array, new: ShampooFactor) -> ShampooFactor:
    figures = jnp.where(FAILED, state.figures + 1, state.figures)
    failed = state._replace(figures=figures)
    return jax.tree.map(lambda n, o: jnp.where(good, n, o), new, failed)


def _accumulate(state: ShampooFactor, gram: Array, b2: float) -> ShampooFactor:
    """L ← β₂L + (1 − β₂)GGᵀ; for β₂ = 1 the sum L + GGᵀ."""
    statistic = b2 * state.statistic + (1 - b2 if b2 < 1 else 1.0) * gram
    good = jnp.all(jnp.isfinite(statistic))
    return _take(state, good, state._replace(statistic=statistic))


def _refresh_root(
    state: ShampooFactor, root: str, power: int, eps: float, damping: str
) -> ShampooFactor:
    if root == "newton":
        found = matrix_roots.inverse_root_newton(state.statistic, power, eps)
    else:
        matrix = matrix_roots.inverse_root_eigh(
            state.statistic, power, eps, "ridge" if damping == "ridge" else "floor"
        )
        zero = jnp.zeros_like(state.error)
        found = matrix_roots.NewtonRoot(matrix, zero, jnp.zeros((), jnp.int32))
    iterations = found.iterations.astype(state.figures.dtype)
    figures = jnp.stack([found.error, iterations, state.failed])
    new = state._replace(matrix=found.root, figures=figures)
    return _take(state, jnp.all(jnp.isfinite(found.root)), new)


def _metrics(found: preconditioning.Figures) -> dict[str, Array]:
    state = ShampooFactor(found.figures, found.figures, found.figures)
    return {
        "shampoo_root_error": state.error.max(),
        "shampoo_iterations": state.iterations.max(),
        "shampoo_failed": state.failed.sum(),
        "shampoo_sign": found.sign,
    }


def _on_turn(count: Array, every: int, function, states: list[ShampooFactor]):
    if every == 1:
        return function(states)
    return jax.lax.cond(count % every == 0, function, lambda kept: kept, states)


def scale_by_shampoo(**options: Any) -> optax.GradientTransformationExtraArgs:
    """Preconditions by inverse fourth roots of second moments, smooths by momentum.

    L ← β₂L + (1 − β₂)GGᵀ, R ← β₂R + (1 − β₂)GᵀG, from ε·I;
    G̃ = L^(−1/4)GR^(−1/4); m ← β₁m + (1 − β₁)G̃. β₂ = 1 sums instead of averaging. The
    first step computes the first roots. Parameters with less than two dimensions get
    the momentum of their raw gradient. Expects averaged gradients and computes in
    float32 or better; a statistic or root that is not finite is counted in
    `shampoo_failed` and the last good one is kept.

    The length of its updates is not the gradient's, whatever its size: graft it, as
    `shampoo` does, or find a rate for it.

    With `axis_name` the roots are shared out over a mesh axis: each device computes
    those it owns, balanced by their cost, and broadcasts them. Everything else, and the
    result, is the same on all devices.

    Args:
      **options: the fields of `ShampooOptions`; see `inverse_root_eigh` for
        `root_damping`.

    Returns:
      A transform; its updates have the dtype of the gradients.

    Raises:
      ConfigError: a value out of its range.
      TypeError: at init, for complex or integer parameters.

    References:
      Gupta, Koren, Singer, Shampoo, arXiv 1802.09568, Algorithm 1.

    Examples:
      >>> tx = scale_by_shampoo(b1=0.0, b2=1.0)
      >>> gradient = {"kernel": jnp.diag(jnp.array([4.0, 9.0]))}
      >>> updates, _ = tx.update(gradient, tx.init(gradient))
      >>> updates["kernel"].round(3).tolist()
      [[1.0, 0.0], [0.0, 1.0]]
    """
    chosen = ShampooOptions.of(options, scale_by_shampoo)
    power = chosen.exponent_override or DEFAULT_POWER

    def refresh(groups, gradients, count):
        def statistics(groups):
            step = jax.vmap(functools.partial(_accumulate, b2=chosen.b2))
            grams = [
                jnp.stack(matrices.map_equal_shapes(matrices.gram, [(g,) for g in own]))
                for own in gradients
            ]
            return list(map(step, groups, grams))

        def roots(groups):
            step = functools.partial(
                _refresh_root,
                root=chosen.root,
                power=power,
                eps=chosen.eps,
                damping=chosen.root_damping,
            )
            if chosen.axis_name is None:
                return list(map(jax.vmap(step), groups))

            def root(state):
                new = step(state)
                return {name: getattr(new, name) for name in FOUND}

            made = map_groups_on_owners(
                root,
                [*map(unstack, groups)],
                lambda state: len(state.statistic) ** 3.0,
                chosen.axis_name,
            )
            return [old._replace(**new) for old, new in zip(groups, made, strict=True)]

        groups = _on_turn(count, chosen.stats_every, statistics, groups)
        return _on_turn(count, chosen.roots_every, roots, groups)

    return preconditioning.scale_by_preconditioners(
        preconditioning.Preconditioner(
            init=functools.partial(_init, eps=chosen.eps, power=power),
            refresh=refresh,
            metrics=_metrics,
        ),
        b1=chosen.b1,
        cuts=matrices.Cuts(sys.maxsize, chosen.block_size, chosen.stacked),
    )
