"""Scores of labelled forecasts, read piece by piece from stores of any size."""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pandas as pd
import xarray as xr

from hpcjax.core.errors import DataFormatError, nearest
from hpcjax.metrics import crps, forecast
from hpcjax.metrics.grids import Region, find_points, require_same_grid
from hpcjax.metrics.means import member_moments, weighted_sums, widen

DIMS = ("number", "time", "lead_time", "level", "latitude", "longitude")
BY = ("lead_time", "level")
# Bytes of members that are scored at once.
_PIECE = 1 << 26


class Conventions(NamedTuple):
    """What the figures of a paper differ by although forecasts and truth are the same.

    Attributes:
      weights: of latitudes, "cell_area" or "cos", see `latitude_weights`; "none".
      order: of the RMSE's root and its mean over times, see `rmse`.
      estimator: of an ensemble's CRPS, see `crps_ensemble`.
      finite_correction: whether the ratio of spread and skill has √((M + 1)/M).
      ddof: what is taken from M in the variance of `crps_gaussian`.
    """

    weights: Literal["cell_area", "cos", "none"] = "cell_area"
    order: Literal["sqrt_last", "sqrt_per_time"] = "sqrt_last"
    estimator: crps.Estimator = "fair"
    finite_correction: bool = True
    ddof: int = 0


_NEEDS: Mapping[str, tuple[str, ...]] = {
    "crps": ("crps",),
    "crps_gaussian": ("crps_gaussian",),
    "bias": ("error",),
    "mae": ("size",),
    "rmse": ("square",),
    "spread": ("variance",),
    "spread_skill_ratio": ("variance", "square"),
    "acc": ("both", "forecast", "truth"),
}
SCORES = tuple(_NEEDS)
DEFAULTS = Conventions()
_LEAST = {"crps": 2, "spread": 2, "spread_skill_ratio": 2, "crps_gaussian": 2}


def evaluate(
    forecasts: xr.Dataset,
    truth: xr.Dataset,
    scores: Sequence[str] = ("crps", "rmse", "bias", "spread_skill_ratio"),
    *,
    by: Sequence[str] = BY,
    conventions: Conventions = DEFAULTS,
    mask: xr.DataArray | None = None,
    climatology: xr.Dataset | None = None,
    skipna: bool = False,
    region: Region | None = None,
    dates: slice | None = None,
) -> xr.Dataset:
    """Scores the variables that forecasts and truth have in common.

    Both have canonical names, as from `data.open_fields`; their order of dimensions
    does not matter, coordinates are matched by value. Times are read one after another,
    so that a store may be larger than memory.

    Args:
      forecasts: variables of `DIMS`; all but latitude and longitude may be absent.
      truth: without `number`, at the times for which forecasts are valid, or with
        their `time` and `lead_time`.
      scores: of "crps", "crps_gaussian", "bias", "mae", "rmse", "spread",
        "spread_skill_ratio" and "acc"; but for the first two, of the members' mean.
      by: which of "lead_time" and "level" the result has; over others it is one score.
      conventions: those of the figures; the result's attributes state them.
      mask: weights of points [latitude, longitude] besides, such as 0 in the sea.
      climatology: of "acc": variables like the truth's without `time`.
      skipna: whether points whose forecast or truth is NaN are left out; otherwise they
        are an error unless the mask leaves them out.
      region: northern, southern, western and eastern bound in degrees, within which
        points are scored; each has the area of its cell in the whole grid.
      dates: of the forecasts' starts, both ends included.

    Returns:
      For each variable `[score, lead_time, level]`, as far as `by` names these and
      forecasts have them, float64, in its own unit. Attributes: the
      conventions, the number of members and of forecasts, the share of points skipped,
      and region and dates that were asked for.

    Raises:
      DataFormatError: no variable or time in common, other coordinates, NaN, or a
        region without points.
      ValueError: an unknown score, one that needs more members or a climatology, or
        bounds that are none.
    """
    _check_scores(scores, by, forecasts.sizes.get("number", 1), conventions)
    if "acc" in scores and climatology is None:
        raise ValueError("acc needs a climatology")
    names = [name for name in forecasts.data_vars if name in truth.data_vars]
    if not names:
        raise DataFormatError(
            f"forecasts and truth have no variable in common: {_list(forecasts)} and "
            f"{_list(truth)}"
        )
    for name in names:
        check_pair(forecasts[name], truth[name])
        if climatology is not None:
            if name not in climatology.data_vars:
                raise DataFormatError(f"the climatology has no {name}")
            check_pair(forecasts[name], climatology[name], "the climatology")
    weight = _weigh(forecasts, conventions, mask)
    asked = {"region": region, "dates": dates}
    if region is not None:
        at = find_points(forecasts, region)
        weight = weight[np.ix_(at["latitude"], at["longitude"])]
        forecasts, truth = forecasts.isel(at), truth.isel(at)
        climatology = None if climatology is None else climatology.isel(at)
    if dates is not None:
        forecasts = _choose_dates(forecasts, dates)
    parts = {}
    skipped, seen = 0.0, 0.0
    for name in names:
        usual = None if climatology is None else climatology[name]
        pair = forecasts[name], truth[name]
        sums = _add_up(*pair, usual, weight, tuple(scores), conventions, skipna)
        parts[name] = _finish(sums, tuple(scores), by, pair[0], conventions)
        skipped, seen = skipped + sums["skipped"], seen + sums["seen"]
    facts = {each: str(value) for each, value in conventions._asdict().items()}
    facts["members"] = str(forecasts.sizes.get("number", 1))
    facts["forecasts"] = str(forecasts.sizes.get("time", 1))
    facts["skipped"] = f"{skipped / seen:.6g}"
    facts |= {name: str(each) for name, each in asked.items() if each is not None}
    return xr.Dataset(parts, attrs=facts)


def _choose_dates(forecasts: xr.Dataset, dates: slice) -> xr.Dataset:
    if not isinstance(dates, slice) or "time" not in forecasts.dims:
        raise ValueError(
            f"dates must be a slice of the forecasts' times: got {dates!r}, forecasts "
            f"of {', '.join(map(str, forecasts.dims))}"
        )
    return forecasts.sel(time=dates)


def _check_scores(
    scores: Sequence[str], by: Sequence[str], members: int, how: Conventions
) -> None:
    if how.order not in ("sqrt_last", "sqrt_per_time"):
        raise ValueError(f"order must be sqrt_last or sqrt_per_time: got {how.order!r}")
    for name in scores:
        if name not in SCORES:
            raise ValueError(f"unknown score {name!r}{nearest(name, SCORES)}")
        least = _LEAST.get(name, 1)
        if name == "crps" and how.estimator == "unfair":
            least = 1
        if members < least:
            raise ValueError(f"{name} needs at least {least} members, got {members}")
    for dim in by:
        if dim not in BY:
            raise ValueError(f"by must be of {BY}: got {dim!r}")


def check_pair(field: xr.DataArray, other: xr.DataArray, name: str = "truth") -> None:
    """Raises DataFormatError unless two fields are numbers of one grid and unit."""
    for each in (field, other):
        if each.dtype.kind not in "biuf":
            raise DataFormatError(f"{each.name} must be numbers: got {each.dtype}")
    require_same_grid(field, other, ("forecasts", name))
    units = [each.attrs.get("units") or "no unit" for each in (field, other)]
    if units[0] != units[1]:
        raise DataFormatError(
            f"{field.name} of forecasts is in {units[0]}, the other in {units[1]}: "
            "give both assign_attrs(units=…)"
        )


def _list(fields: xr.Dataset) -> str:
    return ", ".join(map(str, fields.data_vars)) or "none"


def _weigh(
    fields: xr.Dataset, how: Conventions, mask: xr.DataArray | None
) -> np.ndarray:
    """Returns the weights of points [latitude, longitude]."""
    shape = fields.sizes["latitude"], fields.sizes["longitude"]
    weights = np.ones(shape)
    if how.weights != "none":
        latitude = fields["latitude"].to_numpy()
        weights *= forecast.latitude_weights(latitude, how.weights)[:, None]
    if mask is not None:
        require_same_grid(fields, mask, ("forecasts", "the mask"), DIMS[4:])
        factors = mask.transpose("latitude", "longitude").to_numpy()
        if not (factors >= 0).all():
            raise DataFormatError("mask must be of numbers that are not negative")
        weights *= factors
    return weights


def _add_up(
    members: xr.DataArray,
    truth: xr.DataArray,
    usual: xr.DataArray | None,
    weight: np.ndarray,
    scores: tuple[str, ...],
    how: Conventions,
    skipna: bool,
) -> dict[str, Any]:
    """Returns sums over times of what the scores need, each [lead_time, level]."""
    if "time" not in members.dims:
        members = members.expand_dims("time")
    climate = 0.0 if usual is None else _complete(usual, DIMS[3:]).to_numpy()
    times = members.sizes["time"]
    if not times:
        raise DataFormatError(f"{members.name}: no time is selected")
    count = max(1, _PIECE * times // members.nbytes)
    total: dict[str, Any] = {"skipped": 0.0, "seen": 0.0}
    for first in range(0, times, count):
        # Dimensions are added to what was read: xarray reads for that.
        piece = _complete(members.isel(time=slice(first, first + count)), DIMS)
        x, y = piece.to_numpy(), _match_truth(truth, piece)
        bad = (np.isnan(x).any(0) | np.isnan(y) | np.isnan(climate)) & (weight > 0)
        if bad.any() and not skipna:
            at = piece["time"].to_numpy()[np.nonzero(bad.any((1, 2, 3, 4)))[0][0]]
            raise DataFormatError(
                f"{members.name} is NaN in {int(bad.sum())} points from {at} on: give "
                "a mask that leaves them out, or skipna=True"
            )
        sums = _score(x, y, climate, np.where(bad, 0.0, weight), scores, how)
        for name, value in sums.items():
            total[name] = total.get(name, 0) + value.sum(0)
        total["skipped"] += float(bad.sum())
        total["seen"] += float(bad.size)
    return total


def _complete(array: xr.DataArray, dims: Sequence[str]) -> xr.DataArray:
    """Returns an array with exactly these dimensions, in this order."""
    odd = [dim for dim in array.dims if dim not in dims]
    if odd:
        raise DataFormatError(f"{array.name} has dimensions {odd}, not of {dims}")
    scalars = [dim for dim in dims if dim not in array.dims]
    return array.expand_dims(scalars).transpose(*dims)


def find_truth(
    truth: xr.DataArray, times: np.ndarray, lead: np.timedelta64
) -> xr.DataArray:
    """Returns the truth that forecasts of these start times, and a lead time, are of.

    Args:
      truth: with dimensions `time` and `lead_time`, those of forecasts; or `time`
        alone or a lead time of zero, when it is valid; or none, if it is always the
        same.
      times: when forecasts start.
      lead: how much later they are valid.

    Returns:
      The truth, not read yet, with `times` as its `time`.

    Raises:
      DataFormatError: a forecast whose truth is not there; names the first.
    """
    # A single time or lead time is one all the same.
    for dim in ("time", "lead_time"):
        if dim in truth.coords and not truth[dim].ndim:
            truth = truth.expand_dims(dim)
    if "lead_time" in truth.dims and not truth["lead_time"].any():
        # Analyses are valid when they start.
        truth = truth.isel(lead_time=0, drop=True)
    if "time" not in truth.dims:
        return truth
    if "lead_time" in truth.dims:
        if lead not in truth["lead_time"].to_numpy():
            raise DataFormatError(f"truth of {truth.name} lacks lead time {lead}")
        truth, wanted = truth.sel(lead_time=lead, drop=True), times
    else:
        # Dates of other calendars, cftime's, take lead times of Python alone.
        later = pd.Timedelta(lead).to_pytimedelta() if times.dtype == object else lead
        truth, wanted = truth.drop_vars("lead_time", errors="ignore"), times + later
    known = truth.get_index("time")
    if known.has_duplicates:
        raise DataFormatError(f"truth of {truth.name} has a time twice")
    at = known.get_indexer(pd.Index(wanted))
    if (at < 0).any():
        raise DataFormatError(
            f"truth of {truth.name} lacks {wanted[at < 0][0]}, "
            f"{int((at < 0).sum())} of {wanted.size} times; it has {known[0]} to "
            f"{known[-1]}"
        )
    return truth.isel(time=at).assign_coords(time=times)


def _match_truth(truth: xr.DataArray, members: xr.DataArray) -> np.ndarray:
    """Returns the truth of forecasts with `DIMS`, but for `number`."""
    times, leads = (members[dim].to_numpy() for dim in ("time", "lead_time"))
    if "lead_time" not in members.coords:
        leads = np.zeros(len(leads), "timedelta64[ns]")
    elif not np.issubdtype(leads.dtype, np.timedelta64):
        raise DataFormatError(
            f"lead times must have a unit, such as hours: got {leads}"
        )
    found = [find_truth(truth, times, lead) for lead in leads]
    rows = [_complete(each, (DIMS[1], *DIMS[3:])).to_numpy() for each in found]
    return np.stack(np.broadcast_arrays(*rows), axis=1)


def _values(
    x: jax.Array, y: jax.Array, usual: Any, how: Conventions
) -> dict[str, Callable[[], jax.Array]]:
    """Returns what computes each value that scores need, by point.

    Means are those of differences: of members near 54 000 m²/s² a mean in float32 is
    wrong by a thousandth of their error.
    """
    x, y = widen(x, y)
    error, anomaly = x - y, jnp.mean(x - usual, 0)
    mean, variance = member_moments(error, 0, how.ddof)
    count = len(x)
    return {
        "crps": lambda: crps.crps_ensemble(x, y, axis=0, estimator=how.estimator),
        "crps_gaussian": lambda: crps.crps_gaussian(
            mean, jnp.sqrt(variance), jnp.zeros_like(mean)
        ),
        "error": lambda: mean,
        "size": lambda: jnp.abs(mean),
        "square": lambda: mean**2,
        "variance": lambda: variance * (count - how.ddof) / (count - 1),
        "both": lambda: anomaly * (y - usual),
        "forecast": lambda: anomaly**2,
        "truth": lambda: (y - usual) ** 2,
    }


@functools.partial(jax.jit, static_argnames=("wanted", "how"))
def _add_up_rows(
    x: jax.Array,
    y: jax.Array,
    usual: Any,
    weight: jax.Array,
    wanted: tuple[str, ...],
    how: Conventions,
) -> dict[str, jax.Array]:
    """Returns sums over longitudes, [time, lead_time, level, latitude]."""
    values = _values(x, y, usual, how)
    sums = {}
    for name in wanted:
        sums[name], sums["weight"] = weighted_sums(values[name](), weight, -1)
    return sums


def _score(
    x: np.ndarray,
    y: np.ndarray,
    usual: Any,
    weight: np.ndarray,
    scores: tuple[str, ...],
    how: Conventions,
) -> dict[str, np.ndarray]:
    """Returns sums over points, [time, lead_time, level], of all that scores need."""
    wanted = tuple(dict.fromkeys(each for name in scores for each in _NEEDS[name]))
    rows = _add_up_rows(x, y, usual, weight, wanted, how)
    # Of a million points float32 would lose a digit or two.
    sums: dict[str, np.ndarray] = {
        name: np.asarray(row, np.float64).sum(-1) for name, row in rows.items()
    }
    # A time all of which is left out counts nowhere.
    some = sums["weight"] > 0
    with np.errstate(invalid="ignore", divide="ignore"):
        if how.order == "sqrt_per_time" and "square" in sums:
            root = np.sqrt(sums["square"] / sums["weight"])
            sums["root"] = np.where(some, root, 0.0)
        if "acc" in scores:
            ratio = sums["both"] / np.sqrt(sums["forecast"] * sums["truth"])
            sums["ratio"] = np.where(some, ratio, 0.0)
    return sums | {"times": some.astype(np.float64)}


def _finish(
    sums: dict[str, Any],
    scores: tuple[str, ...],
    by: Sequence[str],
    members: xr.DataArray,
    how: Conventions,
) -> xr.DataArray:
    """Returns the scores [score, *by] that follow from the sums."""
    kept = [dim for dim in BY if dim in by and dim in members.dims]
    axes = tuple(at for at, dim in enumerate(BY) if dim not in kept)
    total = {
        name: value.sum(axes) if isinstance(value, np.ndarray) else value
        for name, value in sums.items()
    }
    count = members.sizes.get("number", 1)
    mean = {name: value / total["weight"] for name, value in total.items()}
    finite = math.sqrt((count + 1) / count) if how.finite_correction else 1.0
    with np.errstate(invalid="ignore", divide="ignore"):
        values = [_finish_one(name, total, mean, finite) for name in scores]
    coords = {dim: members[dim] for dim in kept if dim in members.coords}
    attrs = {"units": members.attrs["units"]} if "units" in members.attrs else {}
    return xr.DataArray(
        np.stack(values),
        dims=("score", *kept),
        coords={"score": list(scores), **coords},
        attrs=attrs,
    )


def _finish_one(
    name: str, total: dict[str, Any], mean: dict[str, Any], finite: float
) -> Any:
    if name == "rmse":
        per_time = total["root"] / total["times"] if "root" in total else None
        return np.sqrt(mean["square"]) if per_time is None else per_time
    if name == "spread":
        return np.sqrt(mean["variance"])
    if name == "spread_skill_ratio":
        return finite * np.sqrt(mean["variance"] / mean["square"])
    if name == "acc":
        return total["ratio"] / total["times"]
    return mean[_NEEDS[name][0]]
