"""Made-up runs for tests of tables, and what a table says of them."""

import pathlib
import zlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from hpcjax.runs import discover
from hpcjax.runs.tables import Runs, Table, judge


def run(
    coords: Mapping[str, Sequence] | None = None,
    *,
    seeds: Sequence[int] = (0,),
    key: str = "",
    **columns: Any,
) -> xr.Dataset:
    """Returns what a table gets for a row: a run's figures under each seed.

    Args:
      coords: labels by dimension.
      seeds: of the row.
      key: chooses the values of columns without, between 0.5 and 1.5.
      **columns: a figure, or dimensions and values, `("mode step", values)`, the same
        under each seed; or the dimensions alone, for values that are drawn.
    """
    coords = {**(coords or {}), "seed": seeds}
    found = {}
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
    return xr.Dataset(found, {dim: list(labels) for dim, labels in coords.items()})


def check_reduction(table: Table, tier: str, root: pathlib.Path) -> None:
    """Reduces drawn runs; there must be all columns, and a number for each claim."""
    drawn = {
        name: draw(runs, f"{table.id} {name}", root)
        for name, runs in table.tier(tier).runs.items()
    }
    made = table.reduce(drawn)
    assert set(table.columns) <= set(made.data_vars)
    assert made.indexes["row"].is_unique
    for name in table.columns:
        assert made[name].dims in [("row",), ()]
        if f"{name}_low" in made:
            assert (made[f"{name}_low"] <= made[f"{name}_high"]).any()
    for verdict in judge(table.tier(tier), made):
        assert not np.isnan(verdict.ours), verdict
        assert not np.isnan(verdict.broken).any(), verdict


def draw(runs: Runs, key: str, root: pathlib.Path) -> xr.Dataset:
    """Returns results of a row under each of its seeds, as its config outlines them."""
    loaded = discover.load(runs.config, runs.overrides, root)
    columns, given = discover.outline_of(loaded.config)
    labels = {dim: range(n) if isinstance(n, int) else n for dim, n in given.items()}
    return run(labels, seeds=runs.seeds, key=key, **columns)


class Judged(NamedTuple):
    """A claim's number, and whether it is within the bound.

    That negative controls are not is tested on the records.
    """

    ours: float
    holds: bool


def verdicts(
    table: Table, dataset: xr.Dataset, tier: str | None = None
) -> dict[str, Judged]:
    """Returns what claims say of a table that was made, by name; of the first tier."""
    chosen = table.tier(tier or next(iter(table.tiers)))
    return {
        it.name: Judged(it.ours, chosen.claims[it.name].holds(it.ours))
        for it in judge(chosen, dataset)
    }
