"""A sweep's outcomes as one labelled dataset."""

import pathlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from hpcjax.core.errors import HpcjaxError
from hpcjax.runs import directory, execute
from hpcjax.runs.sweeps.axes import Axis
from hpcjax.runs.sweeps.study import Outcome, Study


def gather(study: Study, root: pathlib.Path) -> xr.Dataset:
    """Returns what came out of a sweep.

    Args:
      study: the sweep.
      root: folder that holds `runs/`.

    Returns:
      With the swept axes as dimensions for a grid, and else `trial` with the axes as
      coordinates: `value`, what trials are judged by, NaN where there is none; `status`
      (`done`, `diverged`, `failed`, `running` or `waiting`), `run` and `error` as text;
      and every variable of the runs' results, missing values where there are none.
      Attributes: `config`, `by`, and `axes`, the swept keys with spaces between.
    """
    outcomes, sweep = study.outcomes(), study.sweep
    cells = xr.Dataset(
        {
            "value": ("trial", [_value(each) for each in outcomes]),
            "status": ("trial", _texts([each.status for each in outcomes])),
            "run": ("trial", _texts([each.run for each in outcomes])),
            "error": ("trial", _texts([each.error for each in outcomes])),
        },
        coords={
            "trial": [each.cell for each in outcomes],
            **{axis.key: ("trial", _column(axis, outcomes)) for axis in sweep.axes},
        },
        attrs={
            "source": "measured",
            "config": sweep.config,
            "by": sweep.by,
            "axes": " ".join(axis.key for axis in sweep.axes),
        },
    )
    whole = xr.merge(
        [cells, _histories(outcomes, root)], combine_attrs="override", join="outer"
    )
    if sweep.sampler != "grid":
        return whole
    keys = [axis.key for axis in sweep.axes]
    index = pd.MultiIndex.from_arrays([whole[key].values for key in keys], names=keys)
    bare = whole.drop_vars(["trial", *keys])
    coordinates = xr.Coordinates.from_pandas_multiindex(index, "trial")
    return bare.assign_coords(coordinates).unstack("trial")


def _histories(outcomes: Sequence[Outcome], root: pathlib.Path) -> xr.Dataset:
    """Returns the results of the runs along `trial`."""
    found = {}
    for outcome in outcomes:
        if outcome.run:
            try:
                run = directory.open_run(root, outcome.run)
                found[outcome.cell] = execute.read_result(run).drop_attrs()
            except HpcjaxError:
                continue  # deleted since, or diverged: the status says so
    if not found:
        return xr.Dataset()
    joined = xr.concat(list(found.values()), dim="trial", join="outer")
    joined = joined.assign_coords(trial=list(found))
    taken = {"value", "status", "run", "error"} & set(joined)
    return joined.rename({name: f"result_{name}" for name in taken})


def _value(outcome: Outcome) -> float:
    return np.nan if outcome.value is None else outcome.value


def _texts(texts: Sequence[str]) -> np.ndarray:
    return np.array(texts, dtype=object)


def _column(axis: Axis, outcomes: Sequence[Outcome]) -> Any:
    """Returns an axis's values: numbers where all of them are."""
    values = [outcome.point[axis.key] for outcome in outcomes]
    try:
        numbers = np.array([float(value) for value in values])
    except ValueError:
        return _texts([str(value) for value in values])
    whole = all(str(value).lstrip("-").isdecimal() for value in values)
    return numbers.astype(int) if whole else numbers
