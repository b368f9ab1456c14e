"""Fitting a network to a field, until it is the field."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import xarray as xr

from hpcjax.compress.fields import _network
from hpcjax.compress.fields._grid import Grid, interpolate, read_grid
from hpcjax.compress.fields._network import CompressedField, Scaling
from hpcjax.compress.fields._sampler import PointSampler
from hpcjax.compress.fields.config import FitConfig
from hpcjax.core.config import Config
from hpcjax.core.keys import derive
from hpcjax.core.model import Model

_STEPS = 50  # of a scan
Told = Callable[[int, float], None]


def compress(
    field: xr.DataArray,
    network: Config,
    fit: FitConfig,
    *,
    key: jax.Array,
    tx: optax.GradientTransformation | None = None,
    told: Told | None = None,
) -> CompressedField:
    """Fits a network to a field, and rounds it to what is stored.

    Each step draws points between those of the grid, evenly over time, the sphere and
    levels. The loss is the mean square of errors in units of the network's output, to
    what is interpolated there. The last, incomplete scan of steps is whole: they are
    rounded up to a multiple of 50, unless there are fewer.

    Args:
      field: of the globe, see `Grid`.
      network: the config of a model of points, such as `models.CoordNetConfig`.
      fit: the training.
      key: of the first parameters and of the points.
      tx: another optimizer; by default Adam, as `fit` says.
      told: is called with the steps taken, and the mean loss of the last ones.

    Raises:
      DataFormatError: no field of a globe, or values that are not finite.
      Diverged: training ended in numbers that are not.

    References:
      Huang, Hoefler, ICLR 2023, section 3.
    """
    grid, values = read_grid(field)
    if fit.scaling == "range":
        scaling = _network.range_scaling(values)
    else:
        scaling = _network.pressure_scaling(grid.level)
    params, statistics = _train(
        network.make(), grid, values, scaling, fit, key, tx or _adam(fit), told
    )
    params, statistics = _network.store(params, statistics, fit.precision)
    attrs = {n: x for n, x in field.attrs.items() if isinstance(x, str | int | float)}
    return CompressedField(
        grid=grid,
        network=network,
        params=params,
        statistics=statistics,
        scaling=scaling,
        name=str(field.name or ""),
        attrs=attrs,
    )


def _adam(fit: FitConfig) -> optax.GradientTransformation:
    rate = optax.cosine_decay_schedule(fit.learning_rate, fit.steps)
    return optax.chain(optax.clip_by_global_norm(fit.clip), optax.adam(rate))


def _train(
    model: Model,
    grid: Grid,
    values: np.ndarray,
    scaling: Scaling,
    fit: FitConfig,
    key: jax.Array,
    tx: optax.GradientTransformation,
    told: Told | None,
) -> tuple[Any, Any]:
    """Returns parameters and statistics after all steps."""
    scaled = (values - scaling.shift[:, None, None]) / scaling.scale[:, None, None]
    seed = int(jax.random.bits(derive(key, "points")))
    sampler = PointSampler(grid, seed)
    steps = min(_STEPS, fit.steps)

    @functools.partial(jax.jit, donate_argnums=0)
    def scan(carry: Any, field: jax.Array, drawn: Any) -> Any:
        def step(carry: Any, batch: Any) -> Any:
            points, level = batch
            target = interpolate(field, grid, points, level)
            return take_step(model, tx, carry, points, target)

        return jax.lax.scan(step, carry, drawn)

    params, statistics = jax.jit(model.init)(derive(key, "init"))
    carry, field = (params, statistics, tx.init(params)), jnp.asarray(scaled)
    for done in range(0, fit.steps, steps):
        batches = [sampler.draw(fit.batch_size) for _ in range(steps)]
        drawn = jax.tree.map(lambda *each: np.stack(each), *batches)
        carry, losses = scan(carry, field, drawn)
        if told is not None:
            told(done + steps, float(losses.mean()))
    return carry[0], carry[1]


def take_step(
    model: Model,
    tx: optax.GradientTransformation,
    carry: Any,
    points: jax.Array,
    target: jax.Array,
) -> tuple[Any, jax.Array]:
    """Returns parameters, statistics and optimizer state after a step, and the loss."""
    params, statistics, inner = carry

    def loss(params: Any) -> Any:
        y, new = model.apply(params, statistics, points, train=True)
        return jnp.mean(jnp.square(y - target)), new

    (value, statistics), grads = jax.value_and_grad(loss, has_aux=True)(params)
    updates, inner = tx.update(grads, inner, params)
    return (optax.apply_updates(params, updates), statistics, inner), value
