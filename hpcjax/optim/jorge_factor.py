"""One preconditioner of Jorge: the series that replaces an inverse fourth root."""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from hpcjax.optim import matrices, norms
from hpcjax.optim.jorge_config import JorgeOptions

# (1 + y)^(−1/4) = 1 − y/4 + 5y²/32 − 15y³/128 + …
SERIES = (-1 / 4, 5 / 32, -15 / 128)
TINY = 1e-30
STALL_NU = 100.0  # times √m
STALL_UPDATES = 1000


class FactorState(NamedTuple):
    """The approximate inverse fourth root L̂ of one side, and how its updates went.

    Attributes:
      matrix: L̂, `[dim, dim]`.
      figures: the properties `updates` to `diverged_updates`, one array of them all.
    """

    matrix: Float[Array, "*stack dim dim"]
    figures: Float[Array, "*stack 7"]

    @property
    def updates(self) -> Any:
        """Updates done; −1 while `init="grad"` waits for a gradient."""
        return self.figures[..., 0]

    @property
    def nu(self) -> Any:
        """ν = ‖X‖_F at the last update, X = L̂⁴GGᵀ."""
        return self.figures[..., 1]

    @property
    def beta2(self) -> Any:
        """The averaging weight used at the last update."""
        return self.figures[..., 2]

    @property
    def gain(self) -> Any:
        """Largest over smallest row norm, in units of ε^(−1/4), before the guard."""
        return self.figures[..., 3]

    @property
    def asymmetry(self) -> Any:
        """‖L̂ − L̂ᵀ‖_F/‖L̂‖_F."""
        return self.figures[..., 4]

    @property
    def slow_updates(self) -> Any:
        """Updates in a row with ν > 100√m."""
        return self.figures[..., 5]

    @property
    def diverged_updates(self) -> Any:
        """Updates for which the series does not converge."""
        return self.figures[..., 6]

    @property
    def stalled(self) -> Any:
        """Whether ν has been above 100√m for more than 1000 updates in a row."""
        return self.slow_updates > STALL_UPDATES


def jorge_factor_init(
    dim: int, options: JorgeOptions | None = None, dtype: jnp.dtype | str = "float32"
) -> FactorState:
    """Returns ε^(−1/4)·I as the preconditioner of a side of length `dim`.

    Args:
      dim: m, the length of the side.
      options: Jorge's options; None for the defaults.
      dtype: of the matrix.

    Examples:
      >>> state = jorge_factor_init(2, JorgeOptions(eps=1 / 16))
      >>> state.matrix.tolist()
      [[2.0, 0.0], [0.0, 2.0]]
    """
    options = options or JorgeOptions()
    updates = -1 if options.init == "grad" else 0
    return FactorState(
        matrix=options.eps**-0.25 * jnp.eye(dim, dtype=dtype),
        figures=jnp.array([updates, 0, 0, options.eps**0.25, 0, 0, 0], dtype),
    )


def jorge_factor_start(
    state: FactorState, gradient: Float[Array, "dim other"]
) -> FactorState:
    """Returns (tr(GGᵀ)/m)^(−1/4)·I if this is the first gradient, for `init="grad"`.

    Args:
      state: the factor; unchanged if it has started, or if the gradient is zero.
      gradient: G.

    Examples:
      >>> state = jorge_factor_init(2, JorgeOptions(init="grad"))
      >>> started = jorge_factor_start(state, jnp.full((2, 1), 4.0))
      >>> started.matrix.round(3).tolist()
      [[0.5, 0.0], [0.0, 0.5]]
    """
    return start(state, *scaled_square(gradient))


def scaled_square(gradient: Array) -> tuple[Array, Array]:
    """Returns tr(GGᵀ)/scale², and the scale."""
    scale = norms.power_of_two(gradient)
    return jnp.sum(jnp.square(gradient / scale)), scale


def start(state: FactorState, square: Array, scale: Array) -> FactorState:
    """Does what `jorge_factor_start` does, given `scaled_square` of the gradient."""
    dim = state.matrix.shape[0]
    mean = square / dim
    # Below TINY the fourth power of the result would overflow float32.
    usable = jnp.isfinite(mean) & (mean * scale * scale >= TINY)
    begin = (state.updates < 0) & usable
    safe = jnp.where(usable, mean, 1)
    root = 1 / (jnp.sqrt(jnp.sqrt(safe)) * jnp.sqrt(scale))
    identity = jnp.eye(dim, dtype=state.matrix.dtype)
    return FactorState(
        matrix=jnp.where(begin, root * identity, state.matrix),
        figures=state.figures + begin * np.eye(7)[0],
    )


def _series(y: Array, order: int, precision: str) -> Array:
    """Returns (I + y)^(−1/4) up to `order`, with `order` − 1 matrix products."""
    power, total = y, jnp.eye(y.shape[0], dtype=y.dtype) + SERIES[0] * y
    for coefficient in SERIES[1:order]:
        power = jnp.matmul(power, y, precision=precision)
        total = total + coefficient * power
    return total


def _guarded(matrix: Array, options: JorgeOptions) -> tuple[Array, Array]:
    """Returns the matrix with over-long rows shortened, and the gain it had before."""
    rows = jnp.sqrt(jnp.sum(jnp.square(matrix), axis=1))
    smallest = jnp.min(jnp.where(rows > 0, rows, jnp.inf))
    gain = jnp.max(rows) / smallest * options.eps**0.25
    if options.max_gain is None:
        return matrix, gain
    limit = options.max_gain * options.eps**-0.25 * smallest
    return jnp.minimum(1, limit / rows)[:, None] * matrix, gain


class _Step(NamedTuple):
    y: Array  # what enters the series: ((1−β₂)/β₂)·X
    multiplier: Array  # β₂^(−1/4)
    nu: Array
    beta2: Array
    diverged: Array


def _step(x: Array, scale: Array, options: JorgeOptions) -> _Step:
    """Chooses β₂ for X = scale²·x and scales X by it."""
    size = norms.norm(x)
    nu = jnp.minimum(size * scale * scale, jnp.finfo(x.dtype).max / 4)
    if options.beta2 == "dynamic":
        # ‖((1−β₂)/β₂)X‖ = 1 at β₂ = ν/(ν+1): the edge of the series' disc.
        nonzero = jnp.where(nu > 0, nu, 1)
        multiplier = jnp.sqrt(jnp.sqrt((nonzero + 1) / nonzero))
        y = x / jnp.where(size > 0, size, 1)
        return _Step(y, multiplier, nu, nu / (nu + 1), jnp.zeros((), bool))
    weight = (1 - options.beta2) / options.beta2
    beta2 = jnp.full_like(nu, options.beta2)
    return _Step(
        x * (weight * scale * scale), beta2**-0.25, nu, beta2, ~(weight * nu <= 1)
    )


def jorge_factor_update(
    state: FactorState,
    gradient: Float[Array, "dim other"],
    options: JorgeOptions | None = None,
) -> FactorState:
    """Updates one preconditioner by matrix products alone.

    With X = L̂⁴GGᵀ, ν = ‖X‖_F and β₂ = ν/(ν+1):
    L̂ ← ((ν+1)/ν)^(1/4) · L̂ · (I − X/(4ν) + 5X²/(32ν²)), then the guard on rows.
    This is (β₂L̂^(−4) + (1−β₂)GGᵀ)^(−1/4) to second order if L̂ and GGᵀ commute; they
    need not. 5m³ + m²n multiply-adds. With ν < 1e-30, or a gradient that is not
    finite, L̂ stays as it is.

    Args:
      state: the factor of G's rows.
      gradient: G, in the dtype of the factor; pass Gᵀ for the factor of its columns.
      options: Jorge's options; None for the defaults.

    Returns:
      The new factor.

    References:
      Singh, Sating, Bhatele, Jorge, arXiv 2310.12298, Algorithm 2.

    Examples:
      >>> options = JorgeOptions(eps=1.0)
      >>> state = jorge_factor_init(1, options)
      >>> new = jorge_factor_update(state, jnp.ones((1, 1)), options)
      >>> float(new.nu), float(new.beta2)  # L = 1 and s = 1
      (1.0, 0.5)
    """
    options = options or JorgeOptions()
    return update(state, *scaled_gram(gradient, options.precision), options)


def scaled_gram(gradient: Array, precision: str) -> tuple[Array, Array, Array]:
    """Returns GGᵀ/scale², the scale, and whether G is finite."""
    scale = norms.power_of_two(gradient)
    finite = jnp.isfinite(gradient).all()  # a maximum may lack what is NaN
    return matrices.gram(gradient / scale, precision), scale, finite


def update(
    state: FactorState, gram: Array, scale: Array, finite: Array, options: JorgeOptions
) -> FactorState:
    """Does what `jorge_factor_update` does, given `scaled_gram` of the gradient."""
    product = functools.partial(jnp.matmul, precision=options.precision)
    # Brought near 1 by a power of two, so that the fourth power of a small L̂, as huge
    # gradients start it, is not rounded to zero.
    length = jnp.minimum(norms.power_of_two(state.matrix), 1)
    unit = state.matrix / length
    square = product(unit, unit)
    x = product(product(square, square), gram)
    step = _step(x, length * length * scale, options)
    series = _series(step.y, options.order, options.precision)
    new, gain = _guarded(step.multiplier * product(state.matrix, series), options)
    if options.symmetrize:
        new = (new + new.T) / 2
    used = finite & ~(step.nu < TINY) & (state.updates >= 0)
    slow = step.nu > STALL_NU * new.shape[0] ** 0.5
    updated = FactorState(
        matrix=new,
        figures=jnp.stack(
            [
                state.updates + 1,
                step.nu,
                step.beta2,
                gain,
                norms.norm(new - new.T) / norms.norm(new),
                jnp.where(slow, state.slow_updates + 1, 0),
                state.diverged_updates + step.diverged.astype(new.dtype),
            ]
        ),
    )
    return jax.tree.map(lambda n, o: jnp.where(used, n, o), updated, state)
