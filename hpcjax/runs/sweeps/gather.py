"""The results of a sweep as one labelled dataset."""

import contextlib
import pathlib
from collections.abc import Collection, Hashable, Sequence
from typing import Any

import numpy as np
import pandas as pd
import xarray as xr

from hpcjax.core.errors import ConfigError, HpcjaxError
from hpcjax.runs import directory, discover, execute, overrides, results
from hpcjax.runs.sweeps.axes import Constraint, Value
from hpcjax.runs.sweeps.study import Study
from hpcjax.runs.sweeps.sweep import Sweep, Trial


def gather(study: Study, root: pathlib.Path) -> xr.Dataset:
    """Returns the results of a sweep.

    Args:
      study: the sweep.
      root: folder that holds `runs/`.

    Returns:
      For a grid a dataset with the swept axes as dimensions, otherwise with dimension
      `trial` and the axes as coordinates. Variables are `value`, by which trials are
      judged, NaN if there is none; `status` (`done`, `diverged`, `failed`, `running` or
      `waiting`), `run` and `error` as text; with a constraint `feasible`, 1 where the
      trial keeps it; and all variables of the runs' results. Attributes are `source`,
      the least real of the runs'; `config`, `by`, `axes`, the swept keys separated by
      spaces, `logarithmic`, those that were given so, `units`, `key=unit` of those
      whose help begins with one, a line each, and `subject_to`, the constraint or
      nothing.
    """
    trials, sweep = study.trials(), study.sweep
    cells = xr.Dataset(
        {
            "value": ("trial", [_value(each) for each in trials]),
            "status": ("trial", _texts([each.status for each in trials])),
            "run": ("trial", _texts([each.run for each in trials])),
            "error": ("trial", _texts([each.error for each in trials])),
        },
        coords={
            "trial": [each.cell for each in trials],
            **{
                axis.key: (
                    "trial",
                    _column([each.point[axis.key] for each in trials]),
                )
                for axis in sweep.axes
            },
        },
        attrs={
            "config": sweep.config,
            "by": sweep.by,
            "axes": " ".join(axis.key for axis in sweep.axes),
            "logarithmic": " ".join(
                axis.key for axis in sweep.axes if axis.logarithmic
            ),
            "units": _units(sweep, root),
            "subject_to": str(sweep.subject_to or ""),
        },
    )
    if sweep.subject_to is not None:
        kept = [float(_keeps(each, sweep.subject_to)) for each in trials]
        cells = cells.assign(feasible=("trial", kept))
    taken = {*cells.variables}
    whole = xr.merge(
        [cells, _histories(trials, root, taken)],
        combine_attrs="no_conflicts",
        join="outer",
    )
    if sweep.sampler != "grid":
        return whole
    # By index and not by value: two texts may mean the same number, or none.
    places = {axis.key: range(len(axis.values)) for axis in sweep.axes}
    index = pd.MultiIndex.from_product([*places.values()], names=[*places])
    bare = whole.reindex(trial=range(len(index))).drop_vars(["trial", *places])
    coordinates = xr.Coordinates.from_pandas_multiindex(index, "trial")
    cells = bare.assign_coords(coordinates).unstack("trial")
    return cells.assign_coords({axis.key: _column(axis.values) for axis in sweep.axes})


def _units(sweep: Sweep, root: pathlib.Path) -> str:
    first = {axis.key: axis.ends[0] for axis in sweep.axes}
    with contextlib.suppress(ConfigError):  # of a sweep whose config is gone
        loaded = discover.load(sweep.config, {**sweep.overrides, **first}, root)
        known = overrides.keys(loaded.config)
        units = {key: known[key].unit for key in first}
        return "\n".join(f"{key}={unit}" for key, unit in units.items() if unit)
    return ""


def _histories(
    trials: Sequence[Trial], root: pathlib.Path, taken: Collection[Hashable]
) -> xr.Dataset:
    """Returns the results of the runs along `trial`; what is `taken` is renamed."""
    by_cell, sources = {}, {results.SOURCES[0]}
    for trial in trials:
        if trial.run:
            try:
                run = directory.open_run(root, trial.run)
                result = execute.read_result(run)
                sources.add(result.attrs["source"])
                result = result.drop_attrs()
                names = {*result.variables, *result.dims} & {*taken}
                renamed = {name: f"result_{name}" for name in names}
                by_cell[trial.cell] = result.rename(renamed)
            except HpcjaxError:
                continue  # deleted since, or diverged: the status says so
    source = max(sources, key=results.SOURCES.index)
    if not by_cell:
        return xr.Dataset(attrs={"source": source})
    numbered = map(_number, by_cell.values())
    joined = xr.concat(list(numbered), dim="trial", join="outer")
    return joined.assign_coords(trial=list(by_cell)).assign_attrs(source=source)


def _number(result: xr.Dataset) -> xr.Dataset:
    """Gives each dimension coordinates, by which results of other lengths join it."""
    bare = {*result.dims} - {*result.coords}
    return result.assign_coords({dim: range(result.sizes[dim]) for dim in bare})


def _value(trial: Trial) -> float:
    return np.nan if trial.value is None else trial.value


def _keeps(trial: Trial, constraint: Constraint) -> bool:
    return trial.constraint is not None and trial.constraint <= constraint.bound


def _texts(texts: Sequence[str]) -> np.ndarray:
    return np.array(texts, dtype=object)


def _column(values: Sequence[Value]) -> Any:
    """Returns the values of an axis: numbers where all of them are."""
    try:
        numbers = np.array([float(value) for value in values])
    except ValueError:
        return _texts([str(value) for value in values])
    whole = all(str(value).lstrip("-").isdecimal() for value in values)
    return numbers.astype(int) if whole else numbers
