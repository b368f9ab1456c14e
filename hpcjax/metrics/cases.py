"""Scores of a region at some dates, beside those of everywhere."""

from collections.abc import Mapping, Sequence
from typing import Any

import xarray as xr

from hpcjax.metrics.fields import DEFAULTS, evaluate
from hpcjax.metrics.grids import Region

# What mean and deviation tell, whatever the members.
_OF_TWO = ("crps_gaussian", "rmse", "bias", "mae")


def case_study(
    forecasts: Mapping[str, xr.Dataset],
    truth: xr.Dataset,
    scores: Sequence[str] = _OF_TWO[:2],
    *,
    region: Region | None = None,
    dates: slice | None = None,
    **options: Any,
) -> xr.Dataset:
    """Scores forecasts in a case, and everywhere.

    What a forecast gains in a case that was chosen after the fact says nothing of
    others: beside it is what it gains over all points and dates.

    Args:
      forecasts: by name, of which the first is what others are compared with; members,
        or `mean` and `std`, as `runs.Trained.predict` returns them.
      truth: as for `evaluate`.
      scores: likewise; of `mean` and `std` only crps_gaussian, rmse, bias and mae.
      region: of the case, or None for all points.
      dates: of the case, or None for all.
      **options: others of `evaluate`, but for `by`.

    Returns:
      Of each variable `[forecast, where, score]`, "case" and "everywhere"; and of each
      `<variable>_gain`, percent by which a score is below the first forecast's.

    Raises:
      ValueError: no case, or a score that mean and deviation do not have; and what
        `evaluate` raises.
    """
    if region is None and dates is None:
        raise ValueError("a case must have a region or dates")
    cases: list[dict[str, Any]] = [{"region": region, "dates": dates}, {}]
    found = []
    for each in forecasts.values():
        members = _as_members(each, scores, options)
        told = [
            evaluate(members, truth, scores, by=(), **case, **options) for case in cases
        ]
        found.append(xr.concat(told, xr.Variable("where", ["case", "everywhere"])))
    table = xr.concat(found, xr.Variable("forecast", list(forecasts)))
    gains = 100 * (1 - table / table.isel(forecast=0, drop=True))
    return table.assign({f"{name}_gain": gain for name, gain in gains.items()})


def _as_members(
    fields: xr.Dataset, scores: Sequence[str], options: Mapping[str, Any]
) -> xr.Dataset:
    """Returns two members whose mean and deviation, of M, are those of a Gaussian."""
    if not {"mean", "std"} <= set(fields.data_vars):
        return fields
    ddof, mean = options.get("conventions", DEFAULTS).ddof, fields["mean"]
    if set(scores) - {*_OF_TWO} or ddof or "short_name" not in mean.attrs:
        raise ValueError(
            f"mean and std must have the attribute short_name, ddof=0 and scores of "
            f"{', '.join(_OF_TWO)}: got {mean.attrs}, ddof={ddof}, {list(scores)}"
        )
    pair = [mean - fields["std"], mean + fields["std"]]
    both = xr.concat(pair, "number").assign_attrs(mean.attrs)
    return both.to_dataset(name=mean.attrs["short_name"])
