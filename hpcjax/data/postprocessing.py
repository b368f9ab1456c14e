"""Forecasts with members and what came true, as examples for networks."""

import math
import warnings
from typing import TYPE_CHECKING, Any, Literal, NamedTuple

import numpy as np
import xarray as xr
from jaxtyping import Float, Int

from hpcjax.core.errors import DataFormatError
from hpcjax.data.forecast_inputs import (
    Block,
    Sums,
    check_globe,
    describe_dates,
    name_statistics,
    roll,
    summarise,
)
from hpcjax.data.objectives import POSTPROCESSING
from hpcjax.data.source import Batch, Dataset, check_indices

if TYPE_CHECKING:
    from hpcjax.data.ens10 import MembersConfig

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
      blocks: fields that are inputs; none for those of the members.
      axes: how many leads and levels the blocks are of.
      lead: of the members; None where leads have no number.
    """

    members: xr.Dataset
    truth: xr.DataArray
    parts: np.ndarray
    blocks: tuple[Block, ...] = ()
    axes: tuple[int, int] = (1, 1)
    lead: np.timedelta64 | None = None


class Statistics(NamedTuple):
    """What standardises forecasts; from training dates alone.

    Attributes:
      level: mean of each variable, over members, points and dates.
      unit: its standard deviation likewise: the standard unit.
      blocks: level and unit of each block of inputs.
      mean: of each input over dates, in standard units [latitude, longitude, C].
      std: likewise.
      climate: quantiles of the target's members [latitude, longitude, 21].
    """

    level: np.ndarray
    unit: np.ndarray
    blocks: list[tuple[np.ndarray, np.ndarray]]
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


def make_dataset(forecasts: Forecasts, cfg: "MembersConfig") -> Dataset:
    """Returns dates as examples, standardised by those for training.

    Args:
      forecasts: and their truth.
      cfg: which members are used, of which all statistics are, and how.

    Raises:
      DataFormatError: too few members, no date for training or to hold out, nothing
        that is not NaN, or a grid that cannot be turned.
    """
    have = forecasts.members.sizes["number"]
    latitude = forecasts.truth["latitude"].to_numpy()
    if (np.diff(latitude) > 0).any():  # models crop at the south, which is last
        raise DataFormatError(
            "latitudes must be from north to south, as data.canonicalise has them: "
            f"found {latitude[0]:g} to {latitude[-1]:g}"
        )
    if cfg.members > have:
        raise DataFormatError(f"expected {cfg.members} members, found {have}")
    more = {"all": 1, "others": 2}[cfg.target_members]
    if cfg.learn in ("spread", "both") and have - cfg.members < more:
        raise DataFormatError(
            f"learn={cfg.learn!r} with target_members={cfg.target_members!r} needs "
            f"{more} more than members={cfg.members}: found {have}"
        )
    parts = {
        each: np.nonzero(forecasts.parts == each)[0] for each in ("train", cfg.holdout)
    }
    for part, dates in parts.items():
        if not dates.size:
            raise DataFormatError(f"no date is for {part}")
    reader = _Reader(forecasts, cfg)
    statistics = fit(reader, parts["train"])
    truths = parts["train"]
    if cfg.shuffled:
        truths = np.random.Generator(np.random.Philox(0)).permutation(truths)
    own, folds = _fold_dates(len(truths), cfg), cfg.learn in ("both", "joint")
    train = DateSource(reader, statistics, parts["train"], truths, own)
    dates = parts[cfg.holdout]
    held_out = DateSource(
        reader, statistics, dates, dates, np.full(len(dates), -1, np.int32)
    )
    first = train.gather(np.zeros(1, int))["x"]
    inputs: Any = {name: each.shape[1:] for name, each in first.items()}
    made = Dataset(
        train,
        held_out,
        inputs,
        2,
        POSTPROCESSING,
        axes=forecasts.axes,
        channels=tuple(train.channels),
        folds=cfg.folds if folds else None,
        joint=cfg.learn == "joint" or None,
    )
    if cfg.roll == "none":
        return made
    check_globe(reader.truth, mirror=cfg.roll == "mirror")
    turned = roll(
        train.channels,
        [str(name) for name in reader.members],
        mirror=cfg.roll == "mirror",
    )
    return made._replace(augment=turned)


def _fold_dates(count: int, cfg: "MembersConfig") -> np.ndarray:
    """Returns the part of each training date, one block of dates after the other."""
    parts = np.arange(count, dtype=np.int32) // cfg.fold_dates % cfg.folds
    if cfg.learn in ("both", "joint") and len(np.unique(parts)) < cfg.folds:
        raise DataFormatError(
            f"folds={cfg.folds} of fold_dates={cfg.fold_dates} need more than "
            f"{cfg.fold_dates * (cfg.folds - 1)} dates for training: found {count}"
        )
    return parts


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

    def __init__(self, forecasts: Forecasts, cfg: "MembersConfig") -> None:
        dims = ("time", "latitude", "longitude")
        self.cfg, self.lead = cfg, forecasts.lead
        everyone = forecasts.members.transpose(*dims, "number")
        self.members = everyone.isel(number=slice(cfg.members))
        chosen = {"all": slice(None), "others": slice(cfg.members, None)}[
            cfg.target_members
        ]
        self.learnt = (
            everyone.isel(number=chosen)
            if cfg.learn in ("spread", "both")
            else self.members
        )[[next(iter(everyone))]]
        self.truth = forecasts.truth.transpose(*dims)
        self.blocks = [
            block._replace(
                members=block.members.isel(number=slice(cfg.members)).transpose(
                    *dims, "number"
                ),
                start=None if block.start is None else block.start.transpose(*dims),
            )
            for block in forecasts.blocks or (Block(forecasts.members),)
        ]
        held = self.members.nbytes * (1 + len(self.blocks))
        self.small = held < _KEPT
        if self.small:
            for each in (self.members, self.learnt, self.truth):
                each.load()
            for block in self.blocks:
                block.members.load()

    def open_others(self, forecast: xr.Dataset, truth: xr.Dataset | None) -> "_Reader":
        """Returns a reader of other forecasts of these variables, leads and places.

        Raises:
          DataFormatError: they lack something of that, are too few, or are in another
            unit; or there is no truth at the start where it is an input.
        """
        from hpcjax.data import forecast_inputs, target
        from hpcjax.metrics.fields import check_pair

        own, source = self.members, "forecasts"
        name = str(next(iter(own)))
        level = f"{own['level'].item():g}" if "level" in own.coords else ""
        found = target.choose_members(forecast, f"{name}{level}", self.lead, source)
        lacking = [str(each) for each in own if each not in found]
        if lacking or found.sizes["number"] < self.cfg.members:
            raise DataFormatError(
                f"{source}: expected {self.cfg.members} members of "
                f"{', '.join(map(str, own))}, found {found.sizes['number']} of "
                f"{', '.join(map(str, found))}"
            )
        members = found[list(own)]
        for each in own:
            check_pair(members[each], own[each], "those learnt")
        blocks: tuple[Block, ...] = ()
        if self.lead is not None:
            blocks, _, _ = forecast_inputs.find_blocks(
                forecast, truth, members, self.lead, self.cfg
            )
        nothing = members[name].isel(number=0, drop=True)  # for no score is asked
        opened = Forecasts(members, nothing, np.array([]), blocks, lead=self.lead)
        return _Reader(opened, self.cfg)

    def read(self, fields: Any, dates: np.ndarray) -> np.ndarray:
        """Returns [date, latitude, longitude, (number,) variable] in float64."""
        chosen = fields.isel(time=dates)
        stacked = np.stack([each.to_numpy() for each in chosen.values()], axis=-1)
        return stacked.astype(np.float64)

    def summarise(self, dates: np.ndarray, blocks: Any) -> np.ndarray:
        """Returns inputs in standard units, [date, latitude, longitude, channels]."""
        found = []
        for block, (level, unit) in zip(self.blocks, blocks, strict=True):
            members = (self.read(block.members, dates) - level) / unit
            start = block.start
            if start is not None:
                start = (self.read(start, dates) - level) / unit
            found.append(summarise(members, start, self.cfg.control))
        return np.concatenate(found, axis=-1)


def fit(reader: _Reader, dates: Int[np.ndarray, " dates"]) -> Statistics:
    """Returns the statistics of some dates, read in pieces."""
    count = min(_CLIMATE_DATES, len(dates))
    some = dates[np.linspace(0, len(dates) - 1, count, dtype=int)]
    drawn = reader.read(reader.members, some)
    level, unit = _scale(drawn, reader)
    blocks = [_scale(reader.read(each.members, some), reader) for each in reader.blocks]
    target = (drawn[..., 0] - level[0]) / unit[0]
    # [dates, latitude, longitude, members] → [latitude, longitude, dates · members]
    pooled = np.moveaxis(target, 0, -2).reshape(*target.shape[1:3], -1)
    with warnings.catch_warnings():
        # Of points that are always NaN; they are not scored.
        warnings.filterwarnings("ignore", "All-NaN slice")
        climate = np.nanquantile(pooled, np.linspace(0, 1, 21), axis=-1)
    climate = np.moveaxis(climate, 0, -1)
    groups = [dates]
    if reader.cfg.standardise == "area" and reader.cfg.years == "paper":
        years = reader.members["time"].dt.year.to_numpy()[dates]
        groups = [dates[years == year] for year in np.unique(years)]
    sums = [_add_dates(reader, group, blocks) for group in groups]
    stacked = Sums(*(np.stack(each) for each in zip(*sums, strict=True)))
    mean, std = describe_dates(stacked, reader.cfg)
    return Statistics(level, unit, blocks, mean, std, climate.astype(np.float32))


def _scale(drawn: np.ndarray, reader: _Reader) -> tuple[np.ndarray, np.ndarray]:
    """Returns mean and deviation of each variable."""
    level = np.nanmean(drawn, axis=(0, 1, 2, 3))
    unit = np.nanstd(drawn, axis=(0, 1, 2, 3))
    if not np.all(unit > 0):
        pairs = zip(reader.members, unit, strict=True)
        names = ", ".join(str(name) for name, each in pairs if not each > 0)
        raise DataFormatError(f"{names} do not vary, or are NaN everywhere")
    return level, unit


def _add_dates(reader: _Reader, dates: np.ndarray, blocks: Any) -> Sums:
    total, squares, count = 0.0, 0.0, 0
    for piece in np.array_split(dates, math.ceil(len(dates) / _CLIMATE_DATES)):
        inputs = reader.summarise(piece, blocks)
        count = count + np.isfinite(inputs).sum(0)
        inputs = np.nan_to_num(inputs, nan=0.0)
        total, squares = total + inputs.sum(0), squares + (inputs**2).sum(0)
    return Sums(*map(np.asarray, (total, squares, count)))


class DateSource:
    """Dates that are standardised when gathered, or at once if they are small.

    Attributes:
      channels: names of the fields' channels, but for the three of the place.
    """

    def __init__(
        self,
        reader: _Reader,
        statistics: Statistics,
        dates: np.ndarray,
        truths: np.ndarray,
        folds: np.ndarray,
    ) -> None:
        self.reader, self.statistics, self.folds = reader, statistics, folds
        latitude, longitude = (
            reader.truth[each].to_numpy() for each in ("latitude", "longitude")
        )
        self.area = _area(latitude, longitude.size, reader.cfg.weights)
        self.coordinates = place(latitude, longitude)
        self.dates, self.truths = dates, truths
        self.channels = [
            f"{block.name} {statistic} {name}".strip()
            for block in reader.blocks
            for name in block.members
            for statistic in name_statistics(reader.cfg)
        ]
        self.kept = self._standardise(np.arange(len(self))) if reader.small else None

    def __len__(self) -> int:
        return len(self.dates)

    def gather(self, indices: Int[np.ndarray, " batch"]) -> Batch:
        """Returns dates in standard units; float32.

        "x" are `members` [batch, latitude, longitude, number, variable], the target
        the first variable, and `fields` [batch, latitude, longitude, C + 3]: the
        standardised mean and deviation of each variable, and what else is asked for,
        lead by lead and level by level (`channels`), and where the point is. The
        rest is what `metrics.gaussian_totals` scores by.
        """
        check_indices(indices, len(self))
        if self.kept is None:
            batch = self._standardise(indices)
        else:
            batch = {name: each[indices] for name, each in self.kept.items()}
        x = {name: batch.pop(name) for name in ("members", "fields")}
        return {"x": x, **batch}

    def describe(
        self, reader: _Reader, dates: np.ndarray
    ) -> tuple[dict[str, np.ndarray], np.ndarray]:
        """Returns what a model gets of a reader's dates, and where nothing is NaN.

        What is NaN, such as the sea's temperature on land, is zero.
        """
        fitted = self.statistics
        members = (reader.read(reader.members, dates) - fitted.level) / fitted.unit
        inputs = reader.summarise(dates, fitted.blocks)
        fields = (inputs - fitted.mean) / (fitted.std + _EPS)
        known = np.isfinite(members).all((-2, -1))
        valid = np.asarray(known & np.isfinite(fitted.climate).all(-1))
        places = np.broadcast_to(self.coordinates, (*valid.shape, 3))
        filled = np.nan_to_num(fields, nan=0.0).astype(np.float32)
        x = {
            "members": np.nan_to_num(members, nan=0.0).astype(np.float32),
            "fields": np.concatenate([filled, places], axis=-1),
        }
        return x, valid

    def _standardise(self, indices: np.ndarray) -> dict[str, np.ndarray]:
        fitted, reader = self.statistics, self.reader
        truths = self.truths[indices]
        x, valid = self.describe(reader, self.dates[indices])
        truth = reader.truth.isel(time=truths).to_numpy().astype(np.float64)
        y = (truth - fitted.level[0]) / fitted.unit[0]
        learnt = reader.read(reader.learnt, truths)[..., 0] / fitted.unit[0]
        spread = learnt.std(-1)
        valid &= np.isfinite(y) & np.isfinite(spread)
        if not valid.any((1, 2)).all():
            raise DataFormatError("a date has no point that is not NaN")
        y, spread = (
            np.nan_to_num(each, nan=0.0).astype(np.float32) for each in (y, spread)
        )
        return {
            **x,
            "y": y,
            "area": self.area * valid,
            "efi": _find_extremes(x["members"][..., 0], np.nan_to_num(fitted.climate)),
            "scale": np.full(len(y), fitted.unit[0], np.float32),
            "spread": spread,
            **_say_loss(reader.cfg, self.folds[indices]),
        }


def _say_loss(cfg: "MembersConfig", folds: np.ndarray) -> dict[str, np.ndarray]:
    """Returns the weights of CRPS and of squared errors, or the range of MS-SSIM.

    And which further mean does not know each date, −1 for none.
    """
    if cfg.structure:
        return {"structure": np.full(len(folds), cfg.structure, np.float32)}
    asked = {"spread": (0, 1, 0), "both": (0, 1, 1)}.get(cfg.learn, (1, 0, 0))
    said = {"asked": np.tile(np.array(asked, np.float32), (len(folds), 1))}
    which = {"both": "fold", "joint": "around"}.get(cfg.learn)
    return said | ({which: folds} if which else {})


def _find_extremes(members: np.ndarray, climate: np.ndarray) -> np.ndarray:
    """Returns the index of extremes of each point of each date; see `metrics.efi`."""
    import jax

    from hpcjax import metrics

    score = jax.jit(metrics.efi)
    return np.stack([np.asarray(score(date, climate)) for date in members])
