"""Runs that are drawn, on which a table is tried before its first run is made."""

import functools
import pathlib
import re
import warnings
import zlib
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any

import numpy as np
import xarray as xr

from hpcjax.core.errors import ConfigError, HpcjaxError, nearest
from hpcjax.runs import discover
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
            columns, given = discover.outline_of(config)
        except HpcjaxError:
            return None
        labels = {d: range(n) if isinstance(n, int) else n for d, n in given.items()}
        rows[name] = draw_run(columns, labels, runs.seeds, f"{table.id} {name}")
    figures = {str(name) for row in rows.values() for name in row.variables}
    made = _ask(f"{table.id}, reduced", {*rows, *figures}, lambda: table.reduce(rows))
    if made is None:
        return None
    known = {*map(str, made.variables), *made["row"].values.tolist()}
    told = f"{table.id} has no column"
    _check(told, table.columns, known)
    for name, claim in table.tier(tier).claims.items():
        about = f"claim {name!r} of {table.id}"
        _ask(about, known, functools.partial(claim.ours, made))
        for each in claim.controls:
            names = [*each.rows, *each.rows.values(), *each.columns.values()]
            _check(f"{about} has a control of what there is not,", names, known)
    return made


def _check(told: str, names: Iterable[Any], known: Collection[Any]) -> None:
    for name in names:
        if name not in known:
            raise ConfigError(f"{told} {name!r}{nearest(str(name), map(str, known))}")


def _ask(what: str, known: Collection[Any], compute: Callable[[], Any]) -> Any:
    """Returns what is computed of draws, None where that fails for their values.

    Raises:
      ConfigError: it asks for a name that is not known.
    """
    try:
        with np.errstate(all="ignore"), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return compute()
    except ConfigError:
        raise
    except (KeyError, AttributeError) as error:
        asked = (error.__cause__ or error).args[0]
        name = (re.findall(r"'([^']*)'", str(asked).partition(". ")[0]) or [asked])[-1]
        if isinstance(name, str):
            _check(f"{what}: there is no", [name], known)
    except Exception:
        return None
    return None
