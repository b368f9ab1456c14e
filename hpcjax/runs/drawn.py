"""Runs that are drawn, on which a table is tried before its first run is made."""

import functools
import pathlib
import re
import warnings
import zlib
from collections.abc import (
    Callable,
    Collection,
    Iterable,
    Mapping,
    Sequence,
)
from typing import Any

import numpy as np
import xarray as xr

from hpcjax.core.errors import ConfigError, HpcjaxError, nearest
from hpcjax.runs import discover, outlines
from hpcjax.runs.tables import Table


def draw_run(
    columns: Mapping[str, Any],
    labels: Mapping[str, Collection[Any]],
    seeds: Sequence[int] = (0,),
    key: str = "",
) -> xr.Dataset:
    """Returns what a table gets for a row: a run's figures under each seed.

    Args:
      columns: a figure, or dimensions and values, `("mode step", values)`, the same
        under each seed; or the dimensions alone, for values that are drawn.
      labels: those of each dimension.
      seeds: of the row.
      key: chooses the values of columns without, between 0.5 and 1.5.
    """
    coords = {**labels, "seed": seeds}
    found: dict[str, Any] = {}
    for name, given in columns.items():
        if isinstance(given, str):
            dims = ["seed", *given.split()]
            draws = np.random.default_rng(zlib.crc32(f"{key} {name}".encode()))
            values = draws.uniform(0.5, 1.5, [len(coords[dim]) for dim in dims])
            found[name] = dims, values
        else:
            dims, values = given if isinstance(given, tuple) else ("", given)
            same = xr.DataArray(values, dims=dims.split())
            found[name] = same.expand_dims(seed=list(seeds))
    return xr.Dataset(found, {dim: list(each) for dim, each in coords.items()})


def try_table(table: Table, tier: str, root: pathlib.Path) -> xr.Dataset | None:
    """Returns the table of drawn runs; None if a config says not what a run holds.

    Raises:
      ConfigError: the table, or one of its claims or their controls, asks for a figure,
        column or row that there is not; names the nearest. Or a row's config cannot be
        used.
    """
    rows = {}
    for name, runs in table.tier(tier).runs.items():
        config = discover.load(runs.config, runs.overrides, root).config
        try:
            columns, given = outlines.of_config(config)
        except HpcjaxError:
            return None
        labels = {d: range(n) if isinstance(n, int) else n for d, n in given.items()}
        rows[name] = draw_run(columns, labels, runs.seeds, f"{table.id} {name}")
    made = _try(lambda: reduce_rows(table, rows))
    if made is not None:
        check_names(table, tier, made)
    return made


def reduce_rows(table: Table, rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Returns a table of its rows' runs.

    Raises:
      ConfigError: it asks for a figure or a row that there is not; names the nearest.
    """
    figures = {str(name) for row in rows.values() for name in row.variables}
    return _ask(f"{table.id}, reduced", {*rows, *figures}, table.reduce, rows)


def check_names(table: Table, tier: str, made: xr.Dataset) -> None:
    """Raises ConfigError if columns or claims ask for what a table does not have."""
    known = {*map(str, made.variables), *made["row"].values.tolist()}
    _check(f"{table.id} has no column", table.columns, known)
    for name, claim in table.tier(tier).claims.items():
        about = f"claim {name!r} of {table.id}"
        _try(functools.partial(_ask, about, known, claim.ours, made))
        for each in claim.controls:
            names = [*each.rows, *each.rows.values(), *each.columns.values()]
            _check(f"{about} has a control of what there is not,", names, known)


def _check(told: str, names: Iterable[Any], known: Collection[Any]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"{told} {name!r}{nearest(str(name), map(str, known))}")


def _try(compute: Callable[[], Any]) -> Any:
    """Returns what is computed, None where that fails, but not for want of a name."""
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return compute()
    except ConfigError:
        raise
    except Exception:
        return None


def _ask(
    what: str, known: Collection[Any], compute: Callable[..., Any], of: Any
) -> Any:
    """Returns what is computed of something.

    Raises:
      ConfigError: it asks for a name that is not known.
    """
    try:
        return compute(of)
    except (KeyError, AttributeError) as error:
        asked = (error.__cause__ or error).args[0]
        name = (re.findall(r"'([^']*)'", str(asked).partition(". ")[0]) or [asked])[-1]
        if isinstance(name, str):
            _check(f"{what}: there is no", [name], known)
        raise
