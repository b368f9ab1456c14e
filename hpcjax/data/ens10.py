"""ENS-10 and data sets in its form: ensembles of forecasts to be post-processed."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

import numpy as np

from hpcjax.core import checks, files
from hpcjax.core.config import (
    AtLeast,
    Config,
    Count,
    FileName,
    NotNegative,
    Share,
    Size,
)
from hpcjax.core.errors import ConfigError, DataFormatError
from hpcjax.core.objective import Objective
from hpcjax.data import catalog
from hpcjax.data.objectives import POSTPROCESSING
from hpcjax.data.source import Dataset
from hpcjax.data.target import choose, list_hours

if TYPE_CHECKING:
    from hpcjax.data.postprocessing import Forecasts

STORE = "ens10.zarr"


@dataclasses.dataclass(frozen=True, kw_only=True)
class MembersConfig(Config):
    """Base of data sets of forecasts with members, whose truth is known.

    Attributes:
      members: the first so many are used.
      leads: further ones whose fields are inputs, in hours.
      levels: whose fields are inputs, the target's or all.
      control: whether the first member's own fields are inputs.
      analysis: whether the truth when forecasts start is.
      standardise: inputs by mean and deviation over dates at a point, or over an area.
      window: points of the area's side.
      years: whether statistics of an area are those of a year, averaged ("paper"), or
        of all dates.
      smoothing: of what an area's statistics say, a Gaussian's deviation in points.
      learn: "truth" by CRPS; "spread", that of all members, or "both", the mean by the
        truth, each by its squared error; "joint", CRPS of the spread around a mean that
        a run before has learnt by "both" (`--resume ID --fork`).
      folds: parts of the dates of "both" and "joint", each unknown to a further mean,
        around which "joint" learns from its dates; 1 for none, the paper's.
      fold_dates: dates on end of a part; then comes the next.
      target_members: whose deviation is learnt: of all, or of those that are no inputs.
      structure: if not zero, spread is learnt by 16 % mean distance and 84 % of one
        minus MS-SSIM of this range, in the target's unit, not by squared error. The
        paper's is 4.3.
      roll: whether training dates are turned about the axis, or also mirrored.
      holdout: what is held out: dates to choose by, or those that decide in the end.
      weights: of latitudes in losses and scores; ENS-10's tables have none.
      shuffled: whether training forecasts get the truths of other dates, a control.
    """

    objective: ClassVar[Objective] = POSTPROCESSING

    members: Annotated[int, AtLeast(2)] = 10
    leads: tuple[Count, ...] = ()
    levels: Literal["target", "all"] = "target"
    control: bool = False
    analysis: bool = False
    standardise: Literal["point", "area"] = "point"
    window: Size = 7
    years: Literal["paper", "pooled"] = "paper"
    smoothing: NotNegative = 10.0
    learn: Literal["truth", "spread", "both", "joint"] = "truth"
    folds: Size = 4
    fold_dates: Size = 25
    target_members: Literal["all", "others"] = "all"
    structure: NotNegative = 0.0
    roll: Literal["none", "turn", "mirror"] = "none"
    holdout: Literal["validation", "test"] = "validation"
    weights: Literal["none", "cos", "cell_area"] = "none"
    shuffled: bool = False

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "window must be odd, to have a middle"
        checks.require(self.window % 2 == 1, rule, window=self.window)
        checks.require(
            self.learn == "spread" or not self.structure,
            "structure must be zero but for learn=spread",
            learn=self.learn,
            structure=self.structure,
        )
        checks.require(
            self.learn in ("spread", "both") or self.target_members == "all",
            "target_members must be all but for learn=spread or both",
            target_members=self.target_members,
        )

    @property
    def goes_on(self) -> str:
        """What a run before must have learnt; nothing if it is empty."""
        return "the mean, by learn=both" if self.learn == "joint" else ""

    def check_before(self, other: Mapping[str, Any]) -> None:
        """Raises ConfigError unless the run before has learnt means of these folds.

        Of other dates or folds a mean would know the dates that it is not to know.

        Args:
          other: values of that run's data set that differ from this one's.
        """
        if not self.goes_on:
            return
        learnt = other.get("learn", self.learn) in ("both", "joint")
        free = {"holdout"} | ({"learn"} if learnt else set())
        wrong = {name: value for name, value in other.items() if name not in free}
        rule = "the run before must have had this dataset and learn=both"
        checks.require(not wrong, rule, **wrong)

    def load(self, root: pathlib.Path) -> Dataset:
        """Opens the forecasts; dates are read when a batch needs them.

        Raises:
          DataMissing: they are not below `root`, or a package that reads them is not
            installed.
          DataFormatError: they are not what the config says; see `make_dataset`.
        """
        from hpcjax.data.postprocessing import make_dataset

        return make_dataset(self.open(root), self)

    def open(self, root: pathlib.Path) -> "Forecasts":
        """Returns forecasts and truth."""
        raise NotImplementedError


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ens10Config(MembersConfig):
    """Ten-member forecasts and analyses in one zarr store, as ENS-10's, made smaller.

    The store `<root>/<name>/ens10.zarr` has the groups `forecast` and `truth` with any
    names that `data.open_fields` knows. Without a coordinate `part` of dates, forecasts
    valid in the years below are for validation and test.

    Attributes:
      name: the folder of the data set.
      target: variable and pressure level, such as "t850", or a variable of the surface,
        such as "t2m"; inputs are all variables of that level.
      lead_hours: how long before the time for which they are valid forecasts started.
      validation_years: for choosing.
      test_years: for deciding.
    """

    smoke: ClassVar[Mapping[str, str]] = {
        "name": "ens10-tiny",
        "lead_hours": "72",
    }

    name: FileName = "ens10-light"
    target: str = "t850"
    lead_hours: Size = 72
    validation_years: tuple[int, ...] = (2014, 2015)
    test_years: tuple[int, ...] = (2016, 2017)

    def open(self, root: pathlib.Path) -> "Forecasts":
        """Opens the store."""
        from hpcjax.data import forecast_inputs, postprocessing, weather

        if self.name in catalog.CATALOG:
            store = catalog.locate(self.name, root)[STORE]
        else:
            store = files.inside(root, self.name, STORE)
        forecast, truth = (
            weather.open_fields(store, group=group) for group in ("forecast", "truth")
        )
        lead = np.timedelta64(self.lead_hours, "h")
        members, true = choose(forecast, truth, self.target, lead, str(store))
        if "part" in forecast.coords:
            parts = postprocessing.split_by_part(forecast, str(store))
        else:
            valid = forecast["time"].to_numpy() + lead
            years = self.validation_years, self.test_years
            parts = postprocessing.split_by_year(valid, *years)
        found = forecast_inputs.find_blocks(forecast, truth, members, lead, self)
        return postprocessing.Forecasts(members, true, parts, *found)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WeatherFileConfig(MembersConfig):
    """Your own forecasts with members, in GRIB, netCDF or zarr.

    Attributes:
      path: forecasts with the dimensions number and time; names may be those of any
        convention that `data.open_fields` knows.
      truth: a file of what came true, at the times for which forecasts are valid.
      target: variable and pressure level, such as "z500", or variable alone.
      lead_hours: of several lead times the one to learn; if there is one, it is that.
      validation: share of the dates, the last, that is held out.
    """

    path: str = ""
    truth: str = ""
    target: str = "t2m"
    lead_hours: Size | None = None
    validation: Share = 0.2

    def __post_init__(self) -> None:
        super().__post_init__()
        rule = "holdout must be 'validation' for files of one's own"
        checks.require(self.holdout == "validation", rule, holdout=self.holdout)

    def open(self, root: pathlib.Path) -> "Forecasts":
        """Opens both files; relative paths are below `root`, or as they are."""
        from hpcjax.data import forecast_inputs, postprocessing, weather

        for key in ("path", "truth"):
            if not getattr(self, key):
                raise ConfigError(f"dataset.{key} must name a file: got ''")
        forecast, truth = (
            weather.open_fields(_find(root, each)) for each in (self.path, self.truth)
        )
        lead = _choose_lead(forecast, self.lead_hours, self.path)
        members, true = choose(forecast, truth, self.target, lead, self.path)
        times = members["time"].to_numpy()
        if len(times) < 2:
            raise DataFormatError(f"{self.path}: expected two dates or more, found one")
        parts = postprocessing.split_in_time(times, lead, self.validation)
        found = forecast_inputs.find_blocks(forecast, truth, members, lead, self)
        return postprocessing.Forecasts(members, true, parts, *found)


def _find(root: pathlib.Path, path: str) -> pathlib.Path:
    below, own = root / path, pathlib.Path(path)
    if not below.exists() and not own.exists():
        raise catalog.missing_error(catalog.entry("weather-file"), below)
    return below if below.exists() else own


def _choose_lead(forecast: Any, hours: int | None, source: str) -> np.timedelta64:
    if hours is not None:
        return np.timedelta64(hours, "h")
    if "lead_time" not in forecast.coords:
        return np.timedelta64(0, "h")
    if forecast["lead_time"].size > 1:
        raise ConfigError(
            f"dataset.lead_hours must choose a lead time of {source}: it has "
            f"{list_hours(forecast['lead_time'].to_numpy())}"
        )
    return np.atleast_1d(forecast["lead_time"].to_numpy())[0]


def start_dates(year: int = 2018) -> list[np.datetime64]:
    """Returns every Monday and Thursday of a year: ENS-10's start dates, of 2018.

    Each of its files has forecasts of that day in all of its twenty years.

    Examples:
      >>> dates = start_dates()
      >>> len(dates), str(dates[0]), str(dates[-1])
      (105, '2018-01-01', '2018-12-31')
    """
    first, last = np.datetime64(f"{year}-01-01"), np.datetime64(f"{year + 1}-01-01")
    return [day for day in np.arange(first, last) if day.item().weekday() in (0, 3)]
