"""Columns that a record holds in few bytes: fields, curves, timelines."""

import math
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcjax.core.errors import ConfigError

if TYPE_CHECKING:
    import xarray as xr

# What a packed column has for missing values, and steps of its largest.
_GAP, _STEPS = 65535, 65534


def timeline(rows: Mapping[str, Iterable[Any]]) -> "xr.DataArray":
    """Returns timelines as a column, to be packed; see `pictures.Timeline`.

    Args:
      rows: bars as of `cost.Bar`, by row.

    Raises:
      ConfigError: no row, or one without bars.
    """
    import xarray as xr

    held = {row: list(bars) for row, bars in rows.items()}
    if not held or not all(held.values()):
        counts = {row: len(bars) for row, bars in held.items()}
        raise ConfigError(f"a timeline needs rows with bars in them: got {counts}")
    bars = [bar for each in held.values() for bar in each]
    kinds = list(dict.fromkeys(bar.kind for bar in bars))
    devices = sorted({bar.device for bar in bars})
    lists: dict[tuple[str, str, int], list[tuple[float, float]]] = {}
    for row, each in held.items():
        for bar in sorted(each, key=lambda bar: bar.start):
            line = lists.setdefault((row, bar.kind, bar.device), [])
            if line and math.isclose(line[-1][1], bar.start):
                line[-1] = line[-1][0], bar.end
            else:
                line.append((bar.start, bar.end))
    most = max(map(len, lists.values()))
    filled = np.full((len(held), len(kinds), len(devices), most, 2), np.nan)
    for (row, kind, device), line in lists.items():
        place = list(held).index(row), kinds.index(kind), devices.index(device)
        filled[place][: len(line)] = line
    labels = {"row": list(held), "kind": kinds, "device": devices, "edge": [0, 1]}
    dims = ("row", "kind", "device", "bar", "edge")
    return xr.DataArray(filled, {**labels, "bar": range(most)}, dims)


def pack(values: "xr.DataArray") -> "xr.DataArray":
    """Returns numbers in 65,535 steps from the least to the largest, NaN as missing.

    A record holds such a column in few bytes; see `unpack`.

    Raises:
      ConfigError: a number is infinite, or none is there.
    """
    numbers = values.values.astype(float)
    there = numbers[~np.isnan(numbers)]
    if not there.size or not np.isfinite(there).all():
        raise ConfigError(
            f"numbers between a least and a largest can be packed: got {there.size}, "
            f"{np.isinf(there).sum()} infinite; write NaN for what is missing"
        )
    low, high = float(there.min()), float(there.max())
    scale = (high - low) / _STEPS or 1.0
    steps = np.round((numbers - low) / scale)
    whole = np.where(np.isfinite(steps), steps, _GAP).astype(np.uint16)
    return values.copy(data=whole).assign_attrs(scale=scale, offset=low)


def is_packed(column: "xr.DataArray") -> bool:
    """Returns whether a column holds steps; see `pack`.

    Raises:
      ConfigError: it did, but rows have been joined to it, which lack it.
    """
    if "scale" in column.attrs and column.dtype != np.uint16:
        raise ConfigError(
            f"all rows of {column.name} must be there before it is packed"
        )
    return "scale" in column.attrs


def unpack(table: "xr.Dataset") -> "xr.Dataset":
    """Returns a table with the numbers of its packed columns."""
    packed = {n: v for n, v in table.data_vars.items() if is_packed(v)}
    return table.assign(
        {
            name: var.astype(float).where(var != _GAP) * var.attrs["scale"]
            + var.attrs["offset"]
            for name, var in packed.items()
        }
    )
