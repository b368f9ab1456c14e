"""How long each method needs to reach what a tuned baseline reaches.

The target is the worst of the baseline seeds' best validations, so every baseline run
reaches it; the baseline's own steps are counted to that same target. A run that misses
it counts as infinitely slow, not as missing.
"""

from collections.abc import Mapping

import numpy as np
import xarray as xr

DRAWS = 2000


def time_to_target(
    rows: Mapping[str, xr.Dataset],
    baseline: str,
    metric: str = "val_loss",
    target: float | None = None,
) -> xr.Dataset:
    """Compares methods by the steps to a target.

    Args:
      rows: `{row: history with dimension seed}`; the baseline has every seed.
      baseline: the row that others are compared with.
      metric: validation metric, less is better.
      target: a value of the metric; None takes what the baseline reaches, see above.

    Returns:
      With dimension `row`: `steps` (median over seeds) and `ratio`, the median over
      seeds of steps divided by the baseline's steps under the same seed, both with
      95 % bootstrap intervals `_low` and `_high`; `best`, the median best value;
      `seconds`, the median training time to the target; `compile_seconds`, the longest
      (later seeds find the program in the cache); and `target`. `steps_by_seed` keeps
      the single runs, dimensions `row`, `seed`.
    """
    if target is None:
        target = float(rows[baseline][metric].min("eval_step").max())
    reached = {
        name: first_at_most(row[metric], target, "eval_step")
        for name, row in rows.items()
    }
    compared = [
        _row(rows[name], steps, reached[baseline], metric)
        for name, steps in reached.items()
    ]
    table = xr.concat(compared, dim="row", join="outer").assign_coords(row=list(rows))
    return table.assign(target=target)


def _row(
    row: xr.Dataset, steps: xr.DataArray, base: xr.DataArray, metric: str
) -> xr.Dataset:
    ratio = steps.values / base.sel(seed=steps["seed"]).values
    seconds = row["eval_seconds"].where(row["eval_step"] == steps).max("eval_step")
    figures = {
        "steps": float(median(steps.values[None])[0]),
        "ratio": float(median(ratio[None])[0]),
        "best": float(row[metric].min("eval_step").median()),
        "seconds": float(median(seconds.fillna(np.inf).values[None])[0]),
        "compile_seconds": float(row["compile_seconds"].max()),
    }
    for name, sample in (("steps", steps.values), ("ratio", ratio)):
        figures[f"{name}_low"], figures[f"{name}_high"] = bootstrap_median(sample)
    return xr.Dataset(figures).assign(steps_by_seed=steps)


def first_at_most(values: xr.DataArray, target: float, dim: str) -> xr.DataArray:
    """Returns the first coordinate along `dim` where `values <= target`, else inf."""
    reached = values <= target
    first = values[dim].where(reached).min(dim)
    return first.where(reached.any(dim), np.inf)


def bootstrap_median(
    sample: np.ndarray, *, confidence: float = 0.95, seed: int = 0
) -> tuple[float, float]:
    """Returns the percentile bootstrap interval of the median of a 1-D sample.

    scipy's bootstrap makes NaN of infinite values; here a missed target keeps its place
    at the slow end.
    """
    rng = np.random.Generator(np.random.Philox(seed))
    medians = np.sort(median(rng.choice(sample, size=(DRAWS, len(sample)))))
    tail = (1 - confidence) / 2
    last = DRAWS - 1
    return float(medians[int(tail * last)]), float(medians[int((1 - tail) * last)])


def median(rows: np.ndarray) -> np.ndarray:
    """Returns the median of each row; infinite when a middle value is."""
    ordered = np.sort(rows, axis=1)
    count = ordered.shape[1]
    return (ordered[:, (count - 1) // 2] + ordered[:, count // 2]) / 2
