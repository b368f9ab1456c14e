"""Made-up runs for tests of tables, and what a table says of them."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import xarray as xr

from hpcjax.runs import drawn
from hpcjax.runs.tables import Table, judge


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
    return drawn.draw_run(columns, coords or {}, seeds, key)


def check_reduction(table: Table, tier: str, root: pathlib.Path) -> None:
    """Reduces drawn runs; there must be all columns, and a number for each claim."""
    made = drawn.try_table(table, tier, root)
    assert made is not None
    assert set(table.columns) <= set(made.data_vars)
    assert made.indexes["row"].is_unique
    for name in table.columns:
        assert made[name].dims in [("row",), ()]
        if f"{name}_low" in made:
            assert (made[f"{name}_low"] <= made[f"{name}_high"]).any()
    for verdict in judge(table.tier(tier), made):
        assert not np.isnan(verdict.ours), verdict
        assert not np.isnan(verdict.broken).any(), verdict


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
