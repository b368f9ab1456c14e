"""Shampoo: preconditioning by exact inverse roots of averaged statistics."""

import functools
import sys
from typing import Literal, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jaxtyping import Array, Float, Int

from hpcjax.optim import config, matrices, matrix_roots, preconditioning
from hpcjax.optim._owners import map_on_owners

DEFAULT_POWER = 4
FOUND = ("matrix", "error", "iterations", "failed")  # what a new root changes


class ShampooFactor(NamedTuple):
    """The statistic and the root of one side.

    Attributes:
      statistic: L, the average or sum of GGᵀ, `[dim, dim]`.
      matrix: L^(−1/4) at the last refresh, `[dim, dim]`.
      error: residual of the last Newton iteration; zero for `root="eigh"`.
      iterations: its steps.
      failed: statistics and roots that were not finite and so were not taken.
    """

    statistic: Float[Array, "dim dim"]
    matrix: Float[Array, "dim dim"]
    error: Float[Array, ""]
    iterations: Int[Array, ""]
    failed: Int[Array, ""]


def _init(dim: int, dtype: jnp.dtype, eps: float, power: int) -> ShampooFactor:
    identity = jnp.eye(dim, dtype=dtype)
    return ShampooFactor(
        statistic=eps * identity,
        matrix=eps ** (-1 / power) * identity,
        error=jnp.zeros((), dtype),
        iterations=jnp.zeros((), jnp.int32),
        failed=jnp.zeros((), jnp.int32),
    )


def _take(
    state: ShampooFactor, good: Array, new: ShampooFactor, failed: Array
) -> ShampooFactor:
    taken = jax.tree.map(lambda n, o: jnp.where(good, n, o), new, state)
    return taken._replace(failed=jnp.where(good, state.failed, failed))


def _accumulate(state: ShampooFactor, gradient: Array, b2: float) -> ShampooFactor:
    """L ← β₂L + (1 − β₂)GGᵀ; for β₂ = 1 the sum L + GGᵀ."""
    gram = jnp.matmul(gradient, gradient.T, precision=jax.lax.Precision.HIGHEST)
    statistic = b2 * state.statistic + (1 - b2 if b2 < 1 else 1.0) * gram
    good = jnp.all(jnp.isfinite(statistic))
    new = state._replace(statistic=statistic)
    return _take(state, good, new, state.failed + 1)


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
    new = state._replace(
        matrix=found.root, error=found.error, iterations=found.iterations
    )
    good = jnp.all(jnp.isfinite(found.root))
    return _take(state, good, new, state.failed + 1)


def _metrics(
    left: list[ShampooFactor], right: list[ShampooFactor], alignments: list[Array]
) -> dict[str, Array]:
    worst, both = preconditioning.worst, left + right
    return {
        "shampoo_root_error": worst([state.error for state in both], jnp.max),
        "shampoo_iterations": worst([state.iterations for state in both], jnp.max),
        "shampoo_failed": worst([state.failed for state in both], jnp.sum),
        "shampoo_sign": worst([jnp.sign(a) for a in alignments], jnp.min),
    }


def _on_turn(count: Array, every: int, function, states: list[ShampooFactor]):
    if every == 1:
        return function(states)
    return jax.lax.cond(count % every == 0, function, lambda kept: kept, states)


def scale_by_shampoo(  # noqa: PLR0913, PLR0917 - an argument for each option
    b1: float = 0.9,
    b2: float = 0.999,
    eps: float = 1e-6,
    root: Literal["eigh", "newton"] = "eigh",
    root_damping: Literal["floor", "ridge"] = "floor",
    stats_every: int = 1,
    roots_every: int = 50,
    block_size: int | None = 1024,
    exponent_override: int | None = None,
    stacked: tuple[str, ...] = (),
    axis_name: str | None = None,
) -> optax.GradientTransformationExtraArgs:
    """Preconditions by inverse fourth roots of second moments, smooths by momentum.

    L ← β₂L + (1 − β₂)GGᵀ, R ← β₂R + (1 − β₂)GᵀG, from ε·I;
    G̃ = L^(−1/4)GR^(−1/4); m ← β₁m + (1 − β₁)G̃. β₂ = 1 sums instead of averaging. The
    first step computes the first roots. Parameters with less than two dimensions get
    the momentum of their raw gradient. Expects averaged gradients and computes in
    float32 or better; a statistic or root that is not finite is counted in
    `shampoo_failed` and the last good one is kept.

    Args:
      b1: β₁.
      b2: β₂ in (0, 1].
      eps: ε, both of the start and of the damping by ε·λ_max.
      root: `"eigh"`, or `"newton"`: the coupled iteration of matrix products.
      root_damping: `"floor"` or `"ridge"`, see `inverse_root_eigh`; Newton's is a
        ridge whatever this says.
      stats_every: steps between updates of the statistics.
      roots_every: steps between updates of the roots.
      block_size: sides are cut into pieces of at most this length; None cuts nothing.
      exponent_override: p of L^(−1/p); None for 4.
      stacked: regexes of parameters whose first axis is a stack of layers.
      axis_name: mesh axis over which the roots are shared out: each device computes
        those it owns, balanced by their cost, and broadcasts them. Everything else, and
        the result, is the same on all devices.

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
    options = config.ShampooOptions(
        b1=b1,
        b2=b2,
        eps=eps,
        root=root,
        root_damping=root_damping,
        stats_every=stats_every,
        roots_every=roots_every,
        block_size=block_size,
        exponent_override=exponent_override,
        stacked=stacked,
        axis_name=axis_name,
    )
    power = options.exponent_override or DEFAULT_POWER

    def refresh(states, gradients, count):
        def statistics(states):
            step = functools.partial(_accumulate, b2=options.b2)
            pairs = list(zip(states, gradients, strict=True))
            return matrices.map_equal_shapes(step, pairs)

        def roots(states):
            step = functools.partial(
                _refresh_root,
                root=options.root,
                power=power,
                eps=options.eps,
                damping=options.root_damping,
            )
            if options.axis_name is None:
                singles = [(state,) for state in states]
                return matrices.map_equal_shapes(step, singles)

            def root(state):
                new = step(state)
                return {name: getattr(new, name) for name in FOUND}

            costs = [len(state.statistic) ** 3.0 for state in states]
            found = map_on_owners(root, states, costs, options.axis_name)
            return [old._replace(**new) for new, old in zip(found, states, strict=True)]

        states = _on_turn(count, options.stats_every, statistics, states)
        return _on_turn(count, options.roots_every, roots, states)

    return preconditioning.scale_by_preconditioners(
        preconditioning.Method(
            init=functools.partial(_init, eps=options.eps, power=power),
            refresh=refresh,
            metrics=_metrics,
        ),
        b1=options.b1,
        cuts=matrices.Cuts(sys.maxsize, options.block_size, options.stacked),
    )
