"""How pruned networks compare: what a weight brings, and pairs of methods by seed."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from hpcjax.optim import sparsify
from hpcjax.runs import reduce

if TYPE_CHECKING:
    import xarray as xr

# Methods that others are compared with, at the same sparsity.
BASES = {"static": "over_static", "SET": "over_set", "one shot": "over_one_shot"}


def compare(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns the table of runs of `experiments.sparsity.digits`.

    Rows are called "method, sparsity"; one without a sparsity is alone. Accuracies and
    differences are in points; weights are counted in thousands.
    """
    dense = float(rows["dense"]["accuracy"].mean(skipna=False))
    cells = {}
    for row, run in rows.items():
        accuracy = float(run["accuracy"].mean(skipna=False))
        kept = int(run["kept"].mean())
        cells[row] = {
            **reduce.extent(100 * run["accuracy"], "accuracy"),
            "sparsity": 100 * run["sparsity"].mean(skipna=False),
            "efficiency": 1e3 * sparsify.efficiency(accuracy, kept),
            "hard_efficiency": 1e3
            * sparsify.efficiency(_below_one(accuracy), kept, hard=True),
            **_find_slack(rows, row, dense),
            **_differences(rows, row),
        }
    return reduce.from_cells(cells)


def chance(differences: np.ndarray) -> float:
    """Returns p of the one-sided paired t-test that the mean is above zero.

    1 where all differences are zero, or there are not two.

    Examples:
      >>> chance(np.array([0.0, 0.0])), round(chance(np.array([1.0, 3.0])), 4)
      (1.0, 0.1476)
    """
    from scipy import stats

    count = len(differences)
    if count < 2 or not np.any(differences):
        return 1.0
    error = np.std(differences, ddof=1) / np.sqrt(count)
    with np.errstate(divide="ignore"):  # of differences that are all the same
        return float(stats.t.sf(differences.mean() / error, count - 1))


def _below_one(accuracy: float, images: int = 359) -> float:
    """Returns an accuracy of which 1 − it is not zero: half an error is left."""
    return min(accuracy, 1 - 0.5 / images)


def _find_slack(
    rows: Mapping[str, "xr.Dataset"], row: str, dense: float
) -> dict[str, float]:
    """Returns the largest compressions of a row's method that lose little."""
    method = row.partition(", ")[0]
    found = {
        float(run["size"].mean() / run["kept"].mean()): float(
            run["accuracy"].mean(skipna=False)
        )
        for name, run in rows.items()
        if name.partition(", ")[0] == method
    }
    return {
        f"slack_{column}": sparsify.slack(found, dense, tolerance)
        for column, tolerance in (("0", 0.0), ("half", 0.005), ("1", 0.01))
    }


def _differences(rows: Mapping[str, "xr.Dataset"], row: str) -> dict[str, float]:
    """Returns mean differences from the bases, seed by seed, and their chances."""
    _, comma, level = row.partition(", ")
    found = {}
    for base, column in BASES.items():
        other = rows.get(f"{base}{comma}{level}")
        if other is not None:
            # Of the seeds that both have.
            above = 100 * (rows[row]["accuracy"] - other["accuracy"]).values
            found[column] = above.mean()
            found[f"{column}_chance"] = chance(above)
    return found
