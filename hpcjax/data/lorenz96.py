"""Ensemble forecasts of a toy atmosphere, made when they are loaded.

The truth is Lorenz's model of 1996 with two scales, the forecasts' model has the large
one alone, and a polynomial in place of the small one: so they become biased and too
sure, in a second and without any file.
"""

import dataclasses
import functools
import pathlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar

import numpy as np

from hpcjax.core.config import AtLeast, Count, NotNegative, Positive, Several
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


@dataclasses.dataclass(frozen=True, kw_only=True)
class Lorenz96Config(MembersConfig):
    """Forecasts of Lorenz's two-scale model of 1996 by one with a single scale.

    Attributes:
      train: number of dates for training, five days apart.
      validation: number of dates for validation, and as many for test; a month apart
        from other parts.
      lead_days: how long forecasts are.
      simulated: members that are made; None for those that are used. What more there
        are can be learnt as the spread.
      contrast: by how much the truth's forcing differs from place to place, so that
        forecasts, which know of none, have biases of places.
      share: of the difference of two days, by which initial states differ.
      draw_seed: of the truth and the members; it is not the seed of the run.
    """

    smoke: ClassVar[Mapping[str, str]] = {"train": "16", "validation": "4"}

    train: Annotated[int, AtLeast(4)] = 100
    validation: Annotated[int, AtLeast(1)] = 25
    lead_days: Annotated[int, AtLeast(1)] = 3
    simulated: Several | None = None
    contrast: NotNegative = 0.0
    share: Positive = 0.003
    draw_seed: Count = 0

    def open(self, root: pathlib.Path) -> "Forecasts":
        """Simulates truth and forecasts; `root` is not used."""
        from hpcjax.data import forecast_inputs, postprocessing
        from hpcjax.metrics.fields import find_truth

        del root
        sizes = self.train, self.validation, self.validation
        simulated = self.simulated or self.members
        forecast, truth = simulate(
            sizes,
            self.lead_days,
            simulated,
            self.draw_seed,
            contrast=self.contrast,
            share=self.share,
        )
        lead = np.timedelta64(self.lead_days, "D")
        members = forecast.sel(lead_time=lead, drop=True)
        found = forecast_inputs.find_blocks(forecast, truth, members, lead, self)
        true = find_truth(truth["x"], members["time"].to_numpy(), lead)
        parts = postprocessing.split_by_part(forecast, "Lorenz-96")
        return postprocessing.Forecasts(members, true, parts, *found)


@functools.lru_cache(maxsize=2)
def simulate(
    sizes: tuple[int, int, int],
    lead_days: int,
    members: int,
    seed: int,
    *,
    contrast: float = 0.0,
    share: float = 0.003,
) -> "tuple[xr.Dataset, xr.Dataset]":
    """Returns forecasts and truth, of a variable x at one latitude.

    Args:
      sizes: number of dates for training, validation and test.
      lead_days: for which forecasts are valid, after their start.
      members: of each forecast.
      seed: of the truth.
      contrast: of its forcing, F = 20 + contrast (sin 2πk/36 + ½ at every ninth k).
      share: of the difference of two days, by which initial states differ.

    Returns:
      Forecasts [number, time, lead_time, latitude, longitude], of all days up to
      `lead_days`, and the truth without number.
    """
    import jax
    import xarray as xr

    from hpcjax.data.ensembles import EVERY, draw_pairs, label_dates, number_states

    parts = ("train", "validation", "test")
    starts = number_states(dict(zip(parts, sizes, strict=True)))
    numbers = np.concatenate(list(starts.values()))
    days = EVERY * int(numbers[-1]) + lead_days + 1
    large, pull = jax.device_get(_run_truth(days, seed, contrast))
    closure = np.polyfit(large.ravel(), pull.ravel(), 4)
    states = large[::EVERY]
    pairs = np.stack([draw_pairs(at, starts["train"], members) for at in numbers], 1)
    spread = share * (states[pairs[..., 0]] - states[pairs[..., 1]])
    forecast = forecaster(closure, lead_days)(states[numbers] + spread)
    leads = np.arange(lead_days + 1)
    coords = {
        **label_dates(starts),
        "number": np.arange(1, members + 1),
        "lead_time": leads.astype("timedelta64[D]").astype("timedelta64[ns]"),
        "latitude": [0.0],
        "longitude": 360 / LARGE * np.arange(LARGE),
    }
    dims = ("number", "time", "lead_time", "latitude", "longitude")
    x = np.moveaxis(np.asarray(forecast), 0, 2)[:, :, :, None]
    valid = EVERY * numbers[:, None] + leads
    true = {"x": (dims[1:], large[valid][:, :, None])}
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


def _advect(x: "jax.Array", forcing: Any = FORCING) -> "jax.Array":
    """Returns X_{k−1} (X_{k+1} − X_{k−2}) − X_k + F along the last axis."""
    import jax.numpy as jnp

    before, after = jnp.roll(x, 1, -1), jnp.roll(x, -1, -1)
    return before * (after - jnp.roll(x, 2, -1)) - x + forcing


def _small_pull(y: "jax.Array") -> "jax.Array":
    """Returns what the small scale adds to dX/dt, −(h c / b) Σ_j Y_j."""
    return -COUPLING * y.reshape(LARGE, SMALL).sum(-1)


def _force(contrast: float) -> np.ndarray:
    """Returns the truth's forcing at each place."""
    k = np.arange(LARGE)
    return FORCING + contrast * (np.sin(2 * np.pi * k / LARGE) + 0.5 * (k % 9 == 0))


def _two_scales(forcing: Any, state: Any) -> Any:
    """Returns dX/dt and dY/dt; Lorenz, Predictability, 1996, eqs. 3.2 and 3.3."""
    import jax.numpy as jnp

    x, y = state
    next_one, next_two = jnp.roll(y, -1), jnp.roll(y, -2)
    inner = RATIO * next_one * (jnp.roll(y, 1) - next_two) - y
    outer = COUPLING / RATIO * jnp.repeat(x, SMALL)
    return _advect(x, forcing) + _small_pull(y), RATIO * (inner + outer)


def _run_truth(days: int, seed: int, contrast: float) -> Any:
    """Returns X [days, K] and what the small scale adds to its slope, likewise."""
    import jax

    from hpcjax.core.keys import derive

    slope = functools.partial(_two_scales, np.float32(_force(contrast)))

    def run_day(state: Any, _: Any) -> Any:
        step = functools.partial(_advance, slope)
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


def forecaster(closure: np.ndarray, days: int) -> "Callable[[Any], jax.Array]":
    """Returns what takes X and returns it at the start and after each day, [day, …, K].

    Args:
      closure: of X, a polynomial in place of the small scale, highest power first.
      days: how long forecasts are.
    """
    import jax
    import jax.numpy as jnp

    factors = jnp.asarray(closure, jnp.float32)

    def slope(x: jax.Array) -> jax.Array:
        return _advect(x) + jnp.polyval(factors, x)

    def run_day(x: jax.Array, _: Any) -> Any:
        step = functools.partial(_advance, slope)
        return jax.lax.fori_loop(0, DAY, lambda _, each: step(each), x), x

    @jax.jit
    def run(x: jax.Array) -> jax.Array:
        return jax.lax.scan(run_day, x, length=days + 1)[1]

    return run
