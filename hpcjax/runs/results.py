"""Results as labelled arrays: made from records, joined over seeds, in netCDF files."""

import hashlib
import json
import pathlib
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcjax.core.errors import DataFormatError
from hpcjax.core.files import replacing
from hpcjax.runs import outlines
from hpcjax.train.recorder import training_seconds

if TYPE_CHECKING:
    import xarray as xr

_TIMES = re.compile(r"(compile|lost|spent_[a-z]+)_seconds")
_SPENT = {
    **{
        what: f"spent_{what}_seconds"
        for what in ("compute", "data", "validation", "checkpoint", "init")
    },
    "compile": "compile_seconds",
    "lost": "lost_seconds",
}
SOURCES = ("measured", "simulated", "analytical")


def __getattr__(name: str) -> Any:
    """Returns `Dataset`, what an experiment returns, which is imported late."""
    if name != "Dataset":
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    import xarray as xr

    return xr.Dataset


def measured(figures: Any, **options: Any) -> Any:
    """Returns figures of what has really happened, as a dataset.

    Such are times, bytes that were sent or held, and the losses of a training that took
    place, on whatever devices: several that one device simulates compute the same
    losses as real ones. What depends on something that was only played is `simulated`.

    Args:
      figures: `data_vars` of a dataset. As a decorator, the `run` of an experiment,
        `run(cfg)` or `run(cfg, ctx)`, which returns `{figure: values}` of the `figures`
        that its config declares; see `outlines.declaring`.
      **options: `coords` and `attrs` of the dataset.
    """
    return _of_source("measured", figures, **options)


def simulated(figures: Any, **options: Any) -> Any:
    """Returns figures that depend on what was played: devices, delays or times.

    Such are the times, bytes and memory of devices that were not there, and losses of a
    training in which played delays decide whose model is late. See `measured`.
    """
    return _of_source("simulated", figures, **options)


def analytical(figures: Any, **options: Any) -> Any:
    """Returns figures that formulas give; see `measured`."""
    return _of_source("analytical", figures, **options)


def _of_source(source: str, figures: Any, **options: Any) -> Any:
    if callable(figures):
        return outlines.declaring(source, figures)
    import xarray as xr

    return xr.Dataset(figures, **options).assign_attrs(source=source)


def history(records: Iterable[Mapping[str, Any]], source: str | None) -> "xr.Dataset":
    """Returns a run's records as a dataset.

    Args:
      records: the records of the training loop in order,
        `{"step", "seconds", name: value}`, names starting with `val_` for validations.
      source: of the metrics, one of `SOURCES`, see `measured`; None for those of a run
        that did not come to say it.

    Returns:
      Training metrics with dimension `step` and validation metrics with
      dimension `eval_step`; `seconds` and `eval_seconds` are the training seconds at
      each of them.
      Scalars tell how the time of all sessions was spent: `compile_seconds`,
      `spent_<what>_seconds`, and `lost_seconds`, the time of steps that were taken
      again. `shapes` are those of batches, for each of which a step was compiled.
    """
    import xarray as xr

    records = list(records)
    rows: list[Mapping[str, Any]] = []
    validations: list[Mapping[str, Any]] = []
    times = dict.fromkeys(("compile_seconds", "lost_seconds", "shapes"), 0.0)
    for record in records:
        if any(_TIMES.fullmatch(name) for name in record):
            for name in set(record) - {"step"}:
                times[name] = times.get(name, 0.0) + record[name]
        elif any(name.startswith("val_") for name in record):
            validations.append(record)
        else:
            rows.append(record)
    if any(name.startswith("spent_") for name in times):
        waited = times.get("spent_data_seconds", 0.0)
        times["spent_compute_seconds"] = training_seconds(records) - waited
    trained = _columns(rows, "step", {"seconds": "seconds"})
    validated = _columns(validations, "eval_step", {"seconds": "eval_seconds"})
    joined = xr.merge([trained, validated]).assign(times)
    return joined if source is None else joined.assign_attrs(source=source)


def _columns(
    records: list[Mapping[str, Any]], dim: str, renamed: Mapping[str, str]
) -> "xr.Dataset":
    import xarray as xr

    names = list(dict.fromkeys(name for record in records for name in record))
    columns = {
        renamed.get(name, name): (dim, [record.get(name, np.nan) for record in records])
        for name in names
        if name != "step"
    }
    steps = np.array([record["step"] for record in records], np.int64)
    return xr.Dataset(columns, coords={dim: steps})


def time_split(dataset: "xr.Dataset") -> dict[str, float]:
    """Returns how the time of a run was spent, in seconds, without overlap.

    Returns:
      `compute` (training without waiting for data), `data`, `validation`, `checkpoint`,
      `init` (without compiling), `compile` and `lost` (steps that were taken again), as
      far as the dataset has them; empty for a result that is not of a training. The sum
      is the time from the start of each session to its last record.

    Examples:
      >>> import xarray as xr
      >>> timed = {"spent_compute_seconds": 6.0, "spent_init_seconds": 4.0}
      >>> time_split(xr.Dataset(timed | {"compile_seconds": 3.0}))
      {'compute': 6.0, 'init': 1.0, 'compile': 3.0}
    """
    split = {
        what: float(dataset[name])
        for what, name in _SPENT.items()
        if name in dataset and not dataset[name].dims
    }
    # `init` ends where the first step begins, and so includes compiling it.
    if "init" in split:
        split["init"] = max(0.0, split["init"] - split.get("compile", 0.0))
    return split


def least(values: "xr.DataArray") -> float:
    """Returns the least finite value, infinity where there is none.

    Examples:
      >>> import xarray as xr
      >>> least(xr.DataArray([np.nan, 2.0, 3.0, -np.inf]))
      2.0
    """
    column = np.asarray(values, float)
    return float(np.min(column[np.isfinite(column)], initial=np.inf))


def smoothed(
    values: "xr.DataArray", count: int, dim: str = "eval_step"
) -> "xr.DataArray":
    """Returns means of the last so many values at each place; NaN at the first ones.

    Examples:
      >>> import xarray as xr
      >>> losses = xr.DataArray([4.0, 2.0, 3.0], dims="eval_step")
      >>> smoothed(losses, 2).values.tolist()
      [nan, 3.0, 2.5]
    """
    return values.rolling({dim: count}).mean()


def goodput(split: Mapping[str, float]) -> float:
    """Returns the share of the time that was spent on computing, NaN if not known.

    Examples:
      >>> goodput({"compute": 6.0, "init": 1.0, "compile": 3.0})
      0.6
    """
    whole = sum(split.values())
    return split["compute"] / whole if "compute" in split and whole else np.nan


def write(
    dataset: "xr.Dataset", path: pathlib.Path, provenance: Mapping[str, Any]
) -> None:
    """Writes a result as netCDF, completely or not at all.

    Args:
      dataset: the result; its attribute `source` is one of `SOURCES`, see `measured`.
      path: the file.
      provenance: kept as the JSON attribute `provenance`.

    Raises:
      ValueError: there is no attribute `source`, or it is not one of `SOURCES`.
      DiskFull: no room for it; a result that was there stays.
    """
    source = dataset.attrs.get("source")
    if source not in SOURCES:
        raise ValueError(
            f"source must be one of {SOURCES}, as runs.measured(...) says it: "
            f"got {source!r}"
        )
    stamped = dataset.assign_attrs(provenance=json.dumps(provenance, sort_keys=True))
    with replacing(path) as temporary:
        stamped.to_netcdf(temporary, engine="h5netcdf")


def read(path: pathlib.Path) -> "xr.Dataset":
    """Reads a result written by `write`.

    Raises:
      DataFormatError: the file is damaged or not netCDF.
    """
    import xarray as xr

    try:
        return xr.load_dataset(path, engine="h5netcdf")
    except FileNotFoundError:
        raise
    except (OSError, ValueError, KeyError) as error:
        raise DataFormatError(
            f"{path} is not a readable netCDF result: {error}"
        ) from error


def digest(dataset: "xr.Dataset") -> str:
    """Returns 16 hex digits that results with the same bits in all numbers share.

    Variables whose names end in `seconds` are left out: no two runs take as long.
    """
    found = hashlib.sha256()
    for name in sorted(map(str, dataset.variables)):
        if name.endswith("seconds"):
            continue
        values = dataset.variables[name]
        numbers = np.asarray(values.values)
        plain = numbers.dtype.kind in "biufc"
        held = numbers.tobytes() if plain else repr(numbers.tolist()).encode()
        head = f"{name} {values.dims} {numbers.shape} {numbers.dtype.str} "
        found.update(head.encode() + held)
    return found.hexdigest()[:16]


def over_seeds(datasets: Mapping[int, "xr.Dataset"]) -> "xr.Dataset":
    """Joins the results of the same config under several seeds along `seed`."""
    import xarray as xr

    joined = xr.concat(
        list(datasets.values()),
        dim="seed",
        join="outer",
        combine_attrs="drop_conflicts",
    )
    return joined.assign_coords(seed=list(datasets))
