"""Forecasts with members and what came true, as examples for networks."""

import math
import warnings
from typing import Any, Literal, NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float, Int

from hpcjax.core.errors import DataFormatError
from hpcjax.data.objectives import POSTPROCESSING
from hpcjax.data.source import Batch, Dataset, check_indices

Holdout = Literal["validation", "test"]
WeightKind = Literal["none", "cos", "cell_area"]
# All dates are kept in memory if they are less than this many bytes.
_KEPT = 2 << 30
# Dates whose members are the climate of the index of extremes.
_CLIMATE_DATES = 100
# Added to standard deviations over time, in a variable's standard unit.
_EPS = 1e-3


class Forecasts(NamedTuple):
    """Forecasts for one lead time, with the truth.

    Attributes:
      members: variables [number, time, latitude, longitude], the target first.
      truth: the target [time, latitude, longitude].
      parts: of each time, "train", "validation", "test" or "" for none.
    """

    members: xr.Dataset
    truth: xr.DataArray
    parts: np.ndarray


class Statistics(NamedTuple):
    """What standardises forecasts; from training dates alone.

    Attributes:
      level: mean of each variable, over members, points and dates.
      unit: its standard deviation likewise: the standard unit.
      mean: of each input over dates, in standard units [latitude, longitude, 2 V].
      std: likewise.
      climate: quantiles of the target's members [latitude, longitude, 21].
    """

    level: np.ndarray
    unit: np.ndarray
    mean: np.ndarray
    std: np.ndarray
    climate: np.ndarray


def split_by_part(fields: xr.Dataset, source: str) -> np.ndarray:
    """Returns the part of each time, as a coordinate `part` with CF's flags says it."""
    attributes, numbers = fields["part"].attrs, fields["part"].to_numpy()
    names = str(attributes.get("flag_meanings", "")).split()
    values = np.atleast_1d(attributes.get("flag_values", range(len(names)))).tolist()
    known = dict(zip(values, names, strict=False))
    if not set(numbers.tolist()) <= set(known):
        raise DataFormatError(f"{source}: part has no flag_meanings of its numbers")
    return np.array([known[number] for number in numbers.tolist()])


def split_by_year(
    valid: np.ndarray, validation: tuple[int, ...], test: tuple[int, ...]
) -> np.ndarray:
    """Returns the part of each date by the year for which its forecast is valid.

    Years of no list are for training, but none after the first of a list.

    Args:
      valid: times for which forecasts are valid, datetime64.
      validation: years.
      test: years.

    Examples:
      >>> days = np.array(["2013-12-29", "2014-01-02", "2016-07-01"], "datetime64[D]")
      >>> split_by_year(days, (2014, 2015), (2016, 2017)).tolist()
      ['train', 'validation', 'test']
    """
    years = valid.astype("datetime64[Y]").astype(int) + 1970
    known = np.isin(years, test), np.isin(years, validation)
    early = years < min((*validation, *test), default=10**9)
    return np.select([*known, early], ["test", "validation", "train"], "")


def split_in_time(times: np.ndarray, lead: np.timedelta64, share: float) -> np.ndarray:
    """Returns the part of each date: the last `share` of them are for validation.

    Training dates whose forecasts are valid after the first of these started are left
    out.

    Examples:
      >>> days = np.arange("2020-01-01", "2020-01-06", dtype="datetime64[D]")
      >>> split_in_time(days, np.timedelta64(2, "D"), 0.4).tolist()
      ['train', '', '', 'validation', 'validation']
    """
    count = min(max(1, round(share * len(times))), len(times) - 1)
    first = times[len(times) - count]
    return np.select(
        [times >= first, times + lead < first], ["validation", "train"], ""
    )


def make_dataset(
    forecasts: Forecasts,
    *,
    members: int,
    holdout: Holdout = "validation",
    weights: WeightKind = "none",
    shuffled: bool = False,
) -> Dataset:
    """Returns dates as examples, standardised by those for training.

    Args:
      forecasts: and their truth.
      members: how many of the first members are used; all statistics are of these.
      holdout: the part that is held out.
      weights: of latitudes in scores.
      shuffled: whether training forecasts get the truths of other dates, a control.

    Raises:
      DataFormatError: fewer members, no date for training or to hold out, or nothing
        that is not NaN.
    """
    have = forecasts.members.sizes["number"]
    if members > have:
        raise DataFormatError(f"expected {members} members, found {have}")
    chosen = forecasts.members.isel(number=slice(members))
    parts = {
        each: np.nonzero(forecasts.parts == each)[0] for each in ("train", holdout)
    }
    for part, dates in parts.items():
        if not dates.size:
            raise DataFormatError(f"no date is for {part}")
    reader = _Reader(forecasts._replace(members=chosen))
    statistics = fit(reader, parts["train"])
    latitude = chosen["latitude"].to_numpy()
    area = _area(latitude, chosen.sizes["longitude"], weights)
    truths = parts["train"]
    if shuffled:
        truths = np.random.Generator(np.random.Philox(0)).permutation(truths)
    made = {"train": (parts["train"], truths), holdout: (parts[holdout],) * 2}
    coordinates = place(latitude, chosen["longitude"].to_numpy())
    sources = [
        DateSource(reader, statistics, area, coordinates, *made[part])
        for part in ("train", holdout)
    ]
    first = sources[0].gather(np.zeros(1, int))["x"]
    inputs: Any = {name: each.shape[1:] for name, each in first.items()}
    return Dataset(sources[0], sources[1], inputs, 2, POSTPROCESSING)


def _area(latitude: np.ndarray, columns: int, kind: WeightKind) -> np.ndarray:
    from hpcjax import metrics

    rows = np.ones(latitude.size)
    if kind != "none":
        rows = metrics.latitude_weights(latitude, kind)
    return np.repeat(rows[:, None], columns, axis=1).astype(np.float32)


def place(
    latitude: Float[np.ndarray, " latitude"], longitude: Float[np.ndarray, " longitude"]
) -> Float[np.ndarray, "latitude longitude 3"]:
    """Returns where each point is on the sphere: sin φ, cos φ sin λ, cos φ cos λ."""
    phi, lam = np.meshgrid(np.deg2rad(latitude), np.deg2rad(longitude), indexing="ij")
    coordinates = (np.sin(phi), np.cos(phi) * np.sin(lam), np.cos(phi) * np.cos(lam))
    return np.stack(coordinates, axis=-1).astype(np.float32)


class _Reader:
    """Dates by number; all are read at once if they are small."""

    def __init__(self, forecasts: Forecasts) -> None:
        dims = ("time", "latitude", "longitude")
        self.members = forecasts.members.transpose(*dims, "number")
        self.truth = forecasts.truth.transpose(*dims)
        one = math.prod(self.members.sizes.values()) * len(self.members.data_vars)
        self.small = 4 * one < _KEPT
        if self.small:
            self.members, self.truth = self.members.load(), self.truth.load()

    def read(self, dates: Int[np.ndarray, " dates"]) -> tuple[np.ndarray, np.ndarray]:
        """Returns members [date, latitude, longitude, number, variable] and truth."""
        chosen = self.members.isel(time=dates)
        members = np.stack([each.to_numpy() for each in chosen.values()], axis=-1)
        return members, self.truth.isel(time=dates).to_numpy()


def fit(reader: _Reader, dates: Int[np.ndarray, " dates"]) -> Statistics:
    """Returns the statistics of some dates, read in pieces."""
    count = min(_CLIMATE_DATES, len(dates))
    some = dates[np.linspace(0, len(dates) - 1, count, dtype=int)]
    drawn = reader.read(some)[0].astype(np.float64)
    level = np.nanmean(drawn, axis=(0, 1, 2, 3))
    unit = np.nanstd(drawn, axis=(0, 1, 2, 3))
    if not np.all(unit > 0):
        pairs = zip(reader.members, unit, strict=True)
        names = ", ".join(str(name) for name, each in pairs if not each > 0)
        raise DataFormatError(f"{names} do not vary, or are NaN everywhere")
    target = (drawn[..., 0] - level[0]) / unit[0]
    # [dates, latitude, longitude, members] → [latitude, longitude, dates · members]
    pooled = np.moveaxis(target, 0, -2).reshape(*target.shape[1:3], -1)
    with warnings.catch_warnings():
        # Of points that are always NaN; they are not scored.
        warnings.filterwarnings("ignore", "All-NaN slice")
        climate = np.nanquantile(pooled, np.linspace(0, 1, 21), axis=-1)
    climate = np.moveaxis(climate, 0, -1)
    total = squares = count = np.zeros((*target.shape[1:3], 2 * len(level)))
    for piece in np.array_split(dates, math.ceil(len(dates) / _CLIMATE_DATES)):
        inputs = _summarise((reader.read(piece)[0] - level) / unit)
        count = count + np.isfinite(inputs).sum(0)
        inputs = np.nan_to_num(inputs, nan=0.0)
        total, squares = total + inputs.sum(0), squares + (inputs**2).sum(0)
    count = np.maximum(count, 1)
    mean = total / count
    std = np.sqrt(np.maximum(squares / count - mean**2, 0))
    return Statistics(level, unit, mean, std, climate.astype(np.float32))


def _summarise(members: np.ndarray) -> np.ndarray:
    """Returns mean and deviation of M of each variable, [..., 2 V]."""
    both = np.stack([members.mean(axis=-2), members.std(axis=-2)], axis=-1)
    return both.reshape(*both.shape[:-2], -1)


class DateSource:
    """Dates that are standardised when gathered, or at once if they are small."""

    def __init__(
        self,
        reader: _Reader,
        statistics: Statistics,
        area: np.ndarray,
        coordinates: np.ndarray,
        dates: np.ndarray,
        truths: np.ndarray,
    ) -> None:
        self.reader, self.statistics = reader, statistics
        self.area, self.coordinates = area, coordinates
        self.dates, self.truths = dates, truths
        self.kept = self._standardise(np.arange(len(self))) if reader.small else None

    def __len__(self) -> int:
        return len(self.dates)

    def gather(self, indices: Int[np.ndarray, " batch"]) -> Batch:
        """Returns dates in standard units; float32.

        "x" are `members` [batch, latitude, longitude, number, variable], the target
        the first variable, and `fields` [batch, latitude, longitude, 2 V + 3]: the
        standardised mean and deviation of each variable, and where the point is. The
        rest is what `metrics.gaussian_totals` scores by.
        """
        check_indices(indices, len(self))
        if self.kept is None:
            batch = self._standardise(indices)
        else:
            batch = {name: each[indices] for name, each in self.kept.items()}
        x = {name: batch.pop(name) for name in ("members", "fields")}
        return {"x": x, **batch}

    def _standardise(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        fitted = self.statistics
        members, _ = self.reader.read(self.dates[indices])
        _, truth = self.reader.read(self.truths[indices])
        members = (members.astype(np.float64) - fitted.level) / fitted.unit
        y = (truth.astype(np.float64) - fitted.level[0]) / fitted.unit[0]
        fields = (_summarise(members) - fitted.mean) / (fitted.std + _EPS)
        valid = np.isfinite(y) & np.isfinite(members).all((-2, -1))
        valid &= np.isfinite(fitted.climate).all(-1)
        if not valid.any((1, 2)).all():
            raise DataFormatError("a date has no point that is not NaN")
        # What is NaN, such as the sea's temperature on land, is zero and not scored.
        full = [np.nan_to_num(each, nan=0.0) for each in (members, fields, y)]
        members, fields, y = (each.astype(np.float32) for each in full)
        places = np.broadcast_to(self.coordinates, (*y.shape, 3))
        return {
            "members": members,
            "fields": np.concatenate([fields, places], axis=-1),
            "y": y,
            "area": self.area * valid,
            "efi": _find_extremes(members[..., 0], np.nan_to_num(fitted.climate)),
            "scale": np.full(len(y), fitted.unit[0], np.float32),
        }


def _find_extremes(members: np.ndarray, climate: np.ndarray) -> np.ndarray:
    """Returns the index of extremes of each point of each date; see `metrics.efi`."""
    import jax

    from hpcjax import metrics

    score = jax.jit(metrics.efi)
    return np.stack([np.asarray(score(date, climate)) for date in members])
