"""The target of forecasts with members: its fields, and its truth."""

import re
from typing import Any

import numpy as np

from hpcjax.core.errors import DataFormatError


def list_hours(leads: np.ndarray) -> list[float]:
    """Returns lead times in hours."""
    return (leads / np.timedelta64(1, "h")).tolist()


def choose_members(
    forecast: Any, target: str, lead: np.timedelta64 | None, source: str
) -> Any:
    """Returns members of the target's level, the target first.

    Args:
      forecast: with canonical names.
      target: such as "t850" or "t2m".
      lead: of the forecasts; None for such as have none.
      source: a name for messages.

    Raises:
      DataFormatError: no such target, level or lead time, or no members.
    """
    if "number" not in forecast.dims or "time" not in forecast.dims:
        raise DataFormatError(
            f"{source}: expected the dimensions number and time, found "
            f"{', '.join(map(str, forecast.sizes))}"
        )
    if lead is not None and "lead_time" in forecast.coords:
        leads = np.atleast_1d(forecast["lead_time"].to_numpy())
        if lead not in leads:
            raise DataFormatError(
                f"{source}: file holds lead times {list_hours(leads)} hours, not "
                f"{list_hours(np.array([lead]))}"
            )
    if lead is not None and "lead_time" in forecast.dims:
        forecast = forecast.sel(lead_time=lead, drop=True)
    name, level = _split_target(target, forecast, source)
    # A zarr store lists its variables in any order.
    chosen = [name, *sorted(set(forecast) - {name})]
    like = [
        each for each in chosen if _has_level(forecast, each) == (level is not None)
    ]
    members = _at_level(forecast[like], level, source)
    # What does not change by member or time, such as a mask, is no forecast.
    axes = {"number", "time", "latitude", "longitude"}
    members = members[[each for each in members if set(members[each].dims) == axes]]
    if name not in members:
        raise DataFormatError(
            f"{source}: expected {name} of {', '.join(sorted(axes))}, found "
            f"{', '.join(map(str, forecast[name].dims))}"
        )
    return members


def choose(
    forecast: Any, truth: Any, target: str, lead: np.timedelta64, source: str
) -> tuple[Any, Any]:
    """Returns members as `choose_members`, and the target's truth.

    Args:
      forecast: with canonical names.
      truth: likewise.
      target: such as "t850" or "t2m".
      lead: of the forecasts.
      source: a name for messages.

    Raises:
      DataFormatError: as `choose_members`; other grids; or no truth for a forecast.
    """
    from hpcjax.metrics.fields import check_pair, find_truth

    members = choose_members(forecast, target, lead, source)
    name, level = _split_target(target, forecast, source)
    if name not in truth.data_vars:
        raise DataFormatError(f"{source}: the truth has no {name}")
    true = _at_level(truth[[name]], level, "the truth")[name]
    if "number" in true.dims:
        if true.sizes["number"] > 1:
            raise DataFormatError(
                f"{source}: the truth has {true.sizes['number']} members"
            )
        true = true.isel(number=0, drop=True)
    check_pair(members[name], true)
    return members, find_truth(true, members["time"].to_numpy(), lead)


def _has_level(fields: Any, name: Any) -> bool:
    return "level" in fields[name].coords


def _at_level(fields: Any, level: float | None, source: str) -> Any:
    if level is None or "level" not in fields.dims:
        return fields
    if level not in fields["level"].to_numpy():
        raise DataFormatError(
            f"{source}: no level {level:g} hPa among {fields['level'].to_numpy()}"
        )
    return fields.sel(level=level)


def _split_target(target: str, forecast: Any, source: str) -> tuple[str, float | None]:
    """Returns variable and level, None for a variable of the surface."""
    if target in forecast.data_vars and not _has_level(forecast, target):
        return target, None
    found = re.fullmatch(r"(.*?)(\d+)", target)
    known = "level" in forecast.coords
    levels = np.atleast_1d(forecast["level"].to_numpy()).tolist() if known else []
    if found and found[1] in forecast.data_vars and float(found[2]) in levels:
        return found[1], float(found[2])
    allowed = sorted(
        f"{name}{level:g}" if level is not None else str(name)
        for name in forecast.data_vars
        for level in (levels if _has_level(forecast, name) else [None])
    )
    raise DataFormatError(
        f"{source}: no target {target!r}: expected one of {', '.join(allowed)}"
    )
