"""Ensemble forecasts that are made here, in the layout of ENS-10.

The truth is a run of a general circulation model, the forecasts are runs of the same
model with other mountains, heating and friction, from states that differ by a little:
they are biased, agree too well with each other, and spread with the flow, as raw
ensembles do. The model is the dry one of Held and Suarez (1994), on the dynamical core
of the package dinosaur. Everything here is `simulated`.
"""

import dataclasses
import functools
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
import numpy as np
import xarray as xr

from hpcjax.core import files
from hpcjax.core.errors import DataMissing

LEADS = (0, 24, 48, 72)  # hours
LEVELS = (500, 850)  # hPa
MEMBERS = 10
# Days between two start dates, and from the last of one part to the first of the next,
# so that forecasts of two parts have nothing in common.
EVERY, APART = 5, 30
SPIN_UP = 80  # days
# Initial states differ by such shares of the difference of two days of the truth.
TRUTH_SHARE, MEMBER_SHARE = 0.10, 0.07
SIZES = {
    "ens10-light": {"train": 84, "validation": 16, "test": 40},
    "ens10-tiny": {"train": 8, "validation": 2, "test": 2},
}
# Fields are kept as 16-bit integers: the worth of one, the middle, units and CF's name.
PACKED = {
    "z": (2.0, 30000.0, "m**2 s**-2", "geopotential"),
    "t": (0.005, 250.0, "K", "air_temperature"),
    "u": (0.01, 0.0, "m s**-1", "eastward_wind"),
    "v": (0.01, 0.0, "m s**-1", "northward_wind"),
    "d": (1e-8, 0.0, "s**-1", "divergence_of_wind"),
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Climate:
    """What drives the model; the defaults are the truth's.

    Attributes:
      mountains: factor of the heights of the ground.
      contrast: of temperature between equator and pole, in K.
      drag_days: time in which friction at the ground brakes the wind, in days.
    """

    mountains: float = 1.0
    contrast: float = 75.0
    drag_days: float = 1.0


TRUTH = Climate()
FORECAST = Climate(mountains=0.85, contrast=73.0, drag_days=1.15)


class Atmosphere:
    """The dry primitive equations at T21, 8 levels, forced as by Held and Suarez.

    States are pytrees of spectral coefficients; methods can be mapped over them.
    """

    def __init__(self, heights: np.ndarray, climate: Climate) -> None:
        """Prepares the model for ground at `heights` [longitude, latitude] in m."""
        import dinosaur.primitive_equations as equations
        from dinosaur import held_suarez, primitive_equations_states, scales, units
        from dinosaur import time_integration as stepping

        # Whose classes type checkers see as something else.
        unit = cast(Any, scales.units)
        self.specs = cast(Any, units.SimUnits.from_si())
        self.coords = _coordinates()
        self.start, features = primitive_equations_states.isothermal_rest_atmosphere(
            self.coords,
            self.specs,
            p0=1e5 * unit.pascal,
            p1=5e3 * unit.pascal,
            surface_height=climate.mountains * heights * unit.meter,
        )
        self.reference = features["ref_temperatures"]
        ground = equations.truncated_modal_orography(features["orography"], self.coords)
        self.ground = self.coords.horizontal.to_nodal(ground)
        dynamics = equations.PrimitiveEquationsSigma(
            self.reference, ground, self.coords, self.specs
        )
        forcing = held_suarez.HeldSuarezForcingSigma(
            self.coords,
            self.specs,
            self.reference,
            kf=1 / (climate.drag_days * unit.day),
            dTy=climate.contrast * unit.degK,
        )
        hour = float(self.specs.nondimensionalize(1 * unit.hour))
        step = stepping.imex_rk_sil3(
            stepping.compose_equations([dynamics, forcing]), hour
        )
        # Of order 4 in a day it takes from the smallest scales alone: stronger
        # diffusion stops the growth of errors.
        diffuse = stepping.horizontal_diffusion_step_filter(
            self.coords.horizontal, hour, tau=24 * hour, order=4
        )
        self.step = stepping.step_with_filters(step, [diffuse])

    def run(self, state: Any, hours: int) -> Any:
        """Returns the state after so many hours, in steps of one."""
        return jax.lax.fori_loop(0, hours, lambda _, each: self.step(each), state)

    def fields(self, state: Any) -> dict[str, jax.Array]:
        """Returns each of `PACKED`, [level, latitude, longitude] at `LEVELS`, in SI."""
        import dinosaur.primitive_equations as equations
        from dinosaur import spherical_harmonic, vertical_interpolation

        horizontal = self.coords.horizontal
        u, v = spherical_harmonic.vor_div_to_uv_nodal(
            horizontal, state.vorticity, state.divergence
        )
        warm = horizontal.to_nodal(state.temperature_variation)
        t = warm + self.reference[:, None, None]
        z = equations.get_geopotential_on_sigma(
            t,
            nodal_orography=self.ground,
            sigma=self.coords.vertical,
            gravity_acceleration=self.specs.g,
            ideal_gas_constant=self.specs.R,
        )
        d = horizontal.to_nodal(state.divergence)
        surface = jnp.exp(horizontal.to_nodal(state.log_surface_pressure))
        levels = vertical_interpolation.PressureCoordinates(np.asarray(LEVELS, float))
        at_levels = vertical_interpolation.interp_sigma_to_pressure(
            {"z": z, "t": t, "u": u, "v": v, "d": d},
            levels,
            self.coords.vertical,
            surface * self._worth("hPa"),
            # Below the ground there is air too, by a line through the lowest levels.
            vertical_interpolation.vectorize_vertical_interpolation(
                vertical_interpolation.linear_interp_with_linear_extrap
            ),
        )
        return {
            name: jnp.swapaxes(values, -1, -2) * self._worth(PACKED[name][2])
            for name, values in at_levels.items()
        }

    def _worth(self, units: str) -> float:
        """Returns what the number 1 of the model is in these units."""
        from dinosaur import scales

        unit: Any = scales.units(units)
        return float(self.specs.dimensionalize(1.0, unit.units).m)


def _coordinates() -> Any:
    from dinosaur import coordinate_systems, sigma_coordinates, spherical_harmonic

    return coordinate_systems.CoordinateSystem(
        spherical_harmonic.Grid.T21(), sigma_coordinates.SigmaCoordinates.equidistant(8)
    )


def read_heights(path: pathlib.Path) -> np.ndarray:
    """Returns the earth's ground in m on T21's grid, [longitude, latitude]."""
    horizontal = _coordinates().horizontal
    with xr.open_dataset(path, engine="h5netcdf") as terrain:
        ground = terrain["orog"].transpose("lon", "lat").load()
    around = ground.isel(lon=[0]).assign_coords(lon=[360.0])
    at = {
        "lon": np.rad2deg(horizontal.longitudes),
        "lat": np.rad2deg(horizontal.latitudes),
    }
    # The outermost latitudes of both grids differ by a degree.
    near = {"fill_value": "extrapolate"}
    whole = xr.concat([ground, around], "lon")
    return np.maximum(whole.interp(at, kwargs=near).to_numpy(), 0.0)


def number_states(sizes: Mapping[str, int]) -> dict[str, np.ndarray]:
    """Returns by part which of the truth's states, `EVERY` days apart, are starts.

    Examples:
      >>> {part: at.tolist() for part, at in number_states({"a": 2, "b": 1}).items()}
      {'a': [0, 1], 'b': [7]}
    """
    first, parts = 0, {}
    for part, size in sizes.items():
        parts[part] = np.arange(first, first + size)
        first += size - 1 + APART // EVERY
    return parts


def build(name: str, folder: pathlib.Path, report: Callable[[str], None]) -> None:
    """Makes a set of forecasts, `folder/ens10.zarr`; goes on where it was stopped.

    Args:
      name: one of `SIZES`.
      folder: has "terrain.nc", the heights of the ground.
      report: is called with a line after every few dates.

    Raises:
      DataMissing: the packages that simulate are not installed.
    """
    try:
        import dinosaur as _dinosaur
        import zarr as _zarr
    except ImportError as error:
        raise DataMissing(
            f"{name} is simulated by packages: pip install 'hpcjax[weather]' ({error})"
        ) from error
    del _dinosaur, _zarr
    heights = read_heights(folder / "terrain.nc")
    starts = number_states(SIZES[name])
    states = _simulate_truth(heights, starts, folder / "states.npz", report)
    partial = folder / "partial.zarr"
    _simulate_forecasts(heights, starts, states, partial, report)
    for line in describe(partial):
        report(line)
    partial.rename(folder / "ens10.zarr")
    (folder / "states.npz").unlink(missing_ok=True)


def describe(store: pathlib.Path) -> list[str]:
    """Returns how far a store's forecasts are spread and wrong, a line a lead time.

    Of temperature at 850 hPa, weighted by area: the spread, the absolute bias, which is
    that of the mean over dates at a point, and the ratio of spread and skill.
    """
    from hpcjax import metrics
    from hpcjax.data import weather

    forecast, truth = (
        weather.open_fields(store, ["t"], group=group).sel(level=[LEVELS[-1]])
        for group in ("forecast", "truth")
    )
    scores = ["spread", "rmse", "spread_skill_ratio"]
    found = metrics.evaluate(forecast, truth, scores, by=["lead_time"])["t"]
    error = (forecast["t"].mean("number") - truth["t"]).mean("time").isel(level=0)
    rows = metrics.latitude_weights(forecast["latitude"].to_numpy())
    lines = []
    for at, hours in enumerate(LEADS):
        bias = np.abs(error.isel(lead_time=at).transpose("latitude", ...).to_numpy())
        size = np.average(bias.mean(1), weights=rows)
        spread, wrong, ratio = found.isel(lead_time=at).to_numpy().tolist()
        lines.append(
            f"t850 after {hours} h: spread {spread:.2f} K, RMSE {wrong:.2f} K, "
            f"absolute bias {size:.2f} K, spread over skill {ratio:.2f}"
        )
    return lines


def _simulate_truth(
    heights: np.ndarray,
    starts: Mapping[str, np.ndarray],
    path: pathlib.Path,
    report: Callable[[str], None],
) -> Any:
    """Returns the truth's states, `EVERY` days apart, and keeps them in a file."""
    nature = Atmosphere(heights, TRUTH)
    first = nature.start(jax.random.key(0))
    if path.exists():
        with np.load(path) as kept:
            leaves = [kept[str(at)] for at in range(len(jax.tree.leaves(first)))]
        return jax.tree.unflatten(jax.tree.structure(first), leaves)
    count = 1 + max(int(at[-1]) for at in starts.values())
    report(f"the truth runs for {SPIN_UP + EVERY * (count - 1)} days")
    run = jax.jit(nature.run, static_argnums=1)
    states = [run(first, 24 * SPIN_UP)]
    for _ in range(count - 1):
        states.append(run(states[-1], 24 * EVERY))
    stacked = jax.tree.map(lambda *each: np.stack(each), *states)
    named = {str(at): leaf for at, leaf in enumerate(jax.tree.leaves(stacked))}
    with files.replacing(path) as temporary, temporary.open("wb") as file:
        np.savez(file, **named)
    return stacked


def _simulate_forecasts(
    heights: np.ndarray,
    starts: Mapping[str, np.ndarray],
    states: Any,
    store: pathlib.Path,
    report: Callable[[str], None],
) -> None:
    """Writes forecasts and truth of all dates into a store, skipping those done."""
    dates = [int(at) for each in starts.values() for at in each]
    if not store.exists():
        _lay_out(store, starts)
    done = xr.open_zarr(store, group="done", consolidated=False)["done"].to_numpy()
    simulate = _simulator(heights)
    for row, at in enumerate(dates):
        if done[row]:
            continue
        pairs = draw_pairs(at, starts["train"], 1 + MEMBERS)
        forecast, truth = simulate(states, at, pairs)
        _write(store, row, forecast, truth)
        if row % 10 == 9 or row == len(dates) - 1:
            report(f"{row + 1} of {len(dates)} dates")


def draw_pairs(at: int, library: np.ndarray, count: int) -> np.ndarray:
    """Returns two states of a library for each of `count` perturbations, [count, 2].

    Args:
      at: the state that is perturbed, which is in no pair.
      library: numbers of states.
      count: of pairs.

    Examples:
      >>> pairs = draw_pairs(2, np.arange(5), 3)
      >>> pairs.shape, 2 in pairs
      ((3, 2), False)
    """
    rng = np.random.Generator(np.random.Philox(at))
    others = library[library != at]
    return np.stack([rng.permutation(others)[:2] for _ in range(count)])


def label_dates(starts: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """Returns the coordinates `time` and `part` of the states that are starts."""
    names = list(starts)
    flags = {"flag_values": list(range(len(names))), "flag_meanings": " ".join(names)}
    sizes = [len(each) for each in starts.values()]
    days = EVERY * np.concatenate(list(starts.values()))
    times = np.datetime64("2001-01-01", "ns") + days.astype("timedelta64[D]")
    part = np.repeat(np.arange(len(names), dtype="int8"), sizes)
    return {"time": times, "part": ("time", part, flags)}


def _simulator(heights: np.ndarray) -> Callable[..., tuple[Any, Any]]:
    """Returns `(states, start, pairs) -> (members' fields, truth's)` at all `LEADS`."""
    nature, model = Atmosphere(heights, TRUTH), Atmosphere(heights, FORECAST)

    def trace(atmosphere: Atmosphere, state: Any) -> dict[str, jax.Array]:
        def advance(state: Any, _: Any) -> tuple[Any, Any]:
            return atmosphere.run(state, 24), atmosphere.fields(state)

        return jax.lax.scan(advance, state, length=len(LEADS))[1]

    def perturb(states: Any, start: Any, pair: Any, share: float) -> Any:
        def move(leaf: jax.Array) -> jax.Array:
            return leaf[start] + share * (leaf[pair[0]] - leaf[pair[1]])

        return jax.tree.map(move, states)

    @jax.jit
    def simulate(states: Any, start: Any, pairs: jax.Array) -> tuple[Any, Any]:
        true = perturb(states, start, pairs[0], TRUTH_SHARE)
        member = jax.vmap(lambda pair: perturb(states, start, pair, MEMBER_SHARE))
        forecast = jax.vmap(functools.partial(trace, model))(member(pairs[1:]))
        return forecast, trace(nature, true)

    return simulate


def _lay_out(store: pathlib.Path, starts: Mapping[str, np.ndarray]) -> None:
    """Writes a store of all dates without their fields, as cfgrib names dimensions."""
    horizontal = _coordinates().horizontal
    coords = {
        **label_dates(starts),
        "number": np.arange(1, MEMBERS + 1),
        "step": np.array(LEADS, "timedelta64[h]").astype("timedelta64[ns]"),
        "isobaricInhPa": ("isobaricInhPa", np.array(LEVELS, float), {"units": "hPa"}),
        "latitude": np.rad2deg(horizontal.latitudes)[::-1],
        "longitude": np.rad2deg(horizontal.longitudes),
    }
    attributes = {"source": "simulated", "title": "Held-Suarez T21 ensemble"}
    partial = store.with_suffix(".new")
    shutil.rmtree(partial, ignore_errors=True)
    for group, dims in (("forecast", ("number", *_TRUTH_DIMS)), ("truth", _TRUTH_DIMS)):
        kept = {name: at for name, at in coords.items() if name in (*dims, "part")}
        empty = xr.Dataset(coords=kept, attrs=attributes)
        shape = [empty.sizes[dim] for dim in dims]
        chunks = [1 if dim == "time" else empty.sizes[dim] for dim in dims]
        for name, (_, _, unit, standard) in PACKED.items():
            like = np.broadcast_to(np.int16(0), shape)
            described = {"units": unit, "standard_name": standard}
            empty[name] = (dims, like, described | _packing(name))
        encoding = {name: {"chunks": chunks} for name in PACKED}
        empty.to_zarr(partial, group=group, encoding=encoding, consolidated=False)
    done = xr.Dataset({"done": ("time", np.zeros(len(coords["time"]), bool))})
    encoding = {"done": {"chunks": [1]}}
    done.to_zarr(partial, group="done", encoding=encoding, consolidated=False)
    partial.rename(store)


_TRUTH_DIMS = ("time", "step", "isobaricInhPa", "latitude", "longitude")


def _packing(name: str) -> dict[str, float]:
    scale, middle, _, _ = PACKED[name]
    return {"scale_factor": scale, "add_offset": middle}


def _write(store: pathlib.Path, row: int, forecast: Any, truth: Any) -> None:
    """Writes one date's fields, and then that it is done."""
    import zarr

    opened: Any = zarr.open_group(store, mode="r+")
    for group, fields in (("forecast", forecast), ("truth", truth)):
        for name, values in fields.items():
            scale, middle, _, _ = PACKED[name]
            # [..., step, level, latitude, longitude], northernmost latitude first.
            numbers = np.rint((np.asarray(values)[..., ::-1, :] - middle) / scale)
            if not np.all(np.abs(numbers) < 2**15):
                raise FloatingPointError(f"{name} at date {row} left its range")
            packed = numbers.astype("int16")
            at = (slice(None), row) if group == "forecast" else (row,)
            opened[f"{group}/{name}"][at] = packed
    opened["done/done"][row] = True
