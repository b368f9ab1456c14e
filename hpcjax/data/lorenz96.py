"""Ensemble forecasts of a toy atmosphere, made when they are loaded.

The truth is Lorenz's model of 1996 with two scales, the forecasts' model has the large
one alone, and a polynomial in place of the small one: so they become biased and too
sure, in a second and without any file.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np

from hpcjax.core.config import AtLeast, Count
from hpcjax.data.ens10 import MembersConfig

if TYPE_CHECKING:
    import jax
    import xarray as xr

    from hpcjax.data.postprocessing import Forecasts

LARGE, SMALL = 36, 10  # K variables X, and J variables Y of each
FORCING, COUPLING, RATIO = 20.0, 1.0, 10.0  # F, h, and b = c
# Five days are a unit of time, of which a step is this part.
STEP, DAY = 1 / 400, 80
SPIN_UP = 50  # days
SHARE = 0.003  # of the difference of two days, by which initial states differ


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lorenz96Config(MembersConfig):
    """Forecasts of Lorenz's two-scale model of 1996 by one with a single scale.

    Attributes:
      train: number of dates for training, five days apart.
      validation: number of dates for validation, and as many for test; a month apart
        from other parts.
      lead_days: how long forecasts are.
      draw_seed: of the truth and the members; it is not the seed of the run.
    """

    smoke: ClassVar[Mapping[str, str]] = {"train": "16", "validation": "4"}

    train: Annotated[int, AtLeast(4)] = 100
    validation: Annotated[int, AtLeast(1)] = 25
    lead_days: Annotated[int, AtLeast(1)] = 3
    draw_seed: Count = 0

    def open(self, root: pathlib.Path) -> "Forecasts":
        """Simulates truth and forecasts; `root` is not used."""
        from hpcjax.data import postprocessing

        del root
        sizes = self.train, self.validation, self.validation
        made = simulate(sizes, self.lead_days, self.members, self.draw_seed)
        parts = postprocessing.split_by_part(made[0], "Lorenz-96")
        return postprocessing.Forecasts(made[0], made[1]["x"], parts)


@functools.lru_cache(maxsize=2)
def simulate(
    sizes: tuple[int, int, int], lead_days: int, members: int, seed: int
) -> "tuple[xr.Dataset, xr.Dataset]":
    """Returns forecasts and truth, of a variable x at one latitude.

    Args:
      sizes: number of dates for training, validation and test.
      lead_days: for which forecasts are valid, after their start.
      members: of each forecast.
      seed: of the truth.

    Returns:
      Forecasts [number, time, latitude, longitude], and the truth without number.
    """
    import jax
    import xarray as xr

    from hpcjax.data.ensembles import EVERY, draw_pairs, label_dates, number_states

    parts = ("train", "validation", "test")
    starts = number_states(dict(zip(parts, sizes, strict=True)))
    numbers = np.concatenate(list(starts.values()))
    days = EVERY * int(numbers[-1]) + lead_days + 1
    large, pull = jax.device_get(_run_truth(days, seed))
    closure = np.polyfit(large.ravel(), pull.ravel(), 4)
    states = large[::EVERY]
    pairs = np.stack([draw_pairs(at, starts["train"], members) for at in numbers], 1)
    spread = SHARE * (states[pairs[..., 0]] - states[pairs[..., 1]])
    forecast = _run_forecasts(states[numbers] + spread, closure, lead_days)
    coords = {
        **label_dates(starts),
        "number": np.arange(1, members + 1),
        "latitude": [0.0],
        "longitude": 360 / LARGE * np.arange(LARGE),
    }
    dims = ("number", "time", "latitude", "longitude")
    x = np.asarray(forecast)[:, :, None]
    true = {"x": (dims[1:], large[EVERY * numbers + lead_days][:, None])}
    kept = {name: each for name, each in coords.items() if name != "number"}
    return xr.Dataset({"x": (dims, x)}, coords), xr.Dataset(true, kept)


def _advance(slope: Any, state: Any) -> Any:
    """Returns the state after a step of Runge and Kutta's fourth order."""
    import jax

    def move(by: Any, share: float) -> Any:
        return jax.tree.map(lambda a, b: a + share * STEP * b, state, by)

    k1 = slope(state)
    k2 = slope(move(k1, 0.5))
    k3 = slope(move(k2, 0.5))
    k4 = slope(move(k3, 1.0))
    mean = jax.tree.map(lambda a, b, c, d: (a + 2 * b + 2 * c + d) / 6, k1, k2, k3, k4)
    return move(mean, 1.0)


def _advect(x: "jax.Array") -> "jax.Array":
    """Returns X_{k−1} (X_{k+1} − X_{k−2}) − X_k + F along the last axis."""
    import jax.numpy as jnp

    before, after = jnp.roll(x, 1, -1), jnp.roll(x, -1, -1)
    return before * (after - jnp.roll(x, 2, -1)) - x + FORCING


def _small_pull(y: "jax.Array") -> "jax.Array":
    """Returns what the small scale adds to dX/dt, −(h c / b) Σ_j Y_j."""
    return -COUPLING * y.reshape(LARGE, SMALL).sum(-1)


def _two_scales(state: Any) -> Any:
    """Returns dX/dt and dY/dt; Lorenz, Predictability, 1996, eqs. 3.2 and 3.3."""
    import jax.numpy as jnp

    x, y = state
    next_one, next_two = jnp.roll(y, -1), jnp.roll(y, -2)
    inner = RATIO * next_one * (jnp.roll(y, 1) - next_two) - y
    outer = COUPLING / RATIO * jnp.repeat(x, SMALL)
    return _advect(x) + _small_pull(y), RATIO * (inner + outer)


def _run_truth(days: int, seed: int) -> Any:
    """Returns X [days, K] and what the small scale adds to its slope, likewise."""
    import jax

    from hpcjax.core.keys import derive

    def run_day(state: Any, _: Any) -> Any:
        step = functools.partial(_advance, _two_scales)
        moved = jax.lax.fori_loop(0, DAY, lambda _, each: step(each), state)
        return moved, (state[0], _small_pull(state[1]))

    @jax.jit
    def run(key: jax.Array) -> Any:
        x, y = (
            jax.random.normal(derive(key, name), shape)
            for name, shape in (("large", (LARGE,)), ("small", (LARGE * SMALL,)))
        )
        start = FORCING + x, 0.1 * y
        series = jax.lax.scan(run_day, start, length=SPIN_UP + days)[1]
        return jax.tree.map(lambda each: each[SPIN_UP:], series)

    return run(jax.random.key(seed))


def _run_forecasts(x: np.ndarray, closure: np.ndarray, days: int) -> "jax.Array":
    """Returns X after so many days, of many forecasts [..., K]."""
    import jax
    import jax.numpy as jnp

    factors = jnp.asarray(closure, jnp.float32)

    def slope(x: jax.Array) -> jax.Array:
        return _advect(x) + jnp.polyval(factors, x)

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        step = functools.partial(_advance, slope)
        return jax.lax.fori_loop(0, DAY * days, lambda _, each: step(each), x)

    return run(jnp.asarray(x))
