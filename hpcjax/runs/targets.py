"""How long each method needs to reach what a tuned baseline reaches.

The target is the worst of the baseline seeds' best validations, so every baseline run
reaches it; the baseline's own steps are counted to that same target. A run that misses
it counts as infinitely slow, not as missing. A validation that is NaN, or that a run
which diverged never came to, reaches nothing; a baseline seed with none but those has
no say in the target. It misses it, as it may one that is given: other rows are then
compared with the last step at which the baseline was validated. It would have needed
more, so that their ratio under this seed is at most the one shown.
"""

from collections.abc import Mapping

import numpy as np
import xarray as xr

from hpcjax.core.errors import Diverged
from hpcjax.perf.intervals import bootstrap_median, median


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

    Raises:
      Diverged: no seed of the baseline has a finite value of the metric.
    """
    scored = {name: _scored(row, metric) for name, row in rows.items()}
    best = scored[baseline][metric].min("eval_step").values
    if not np.isfinite(best).any():
        raise Diverged(f"no seed of {baseline!r}, the baseline, has a finite {metric}")
    if target is None:
        target = float(best[np.isfinite(best)].max())
    reached = {
        name: first_at_most(row[metric], target, "eval_step")
        for name, row in scored.items()
    }
    last = float(scored[baseline]["eval_step"].max())
    base = reached[baseline].clip(max=last)
    compared = [
        _row(scored[name], steps, base, metric) for name, steps in reached.items()
    ]
    table = xr.concat(compared, dim="row", join="outer").assign_coords(row=list(rows))
    return table.assign(target=target)


def _scored(row: xr.Dataset, metric: str) -> xr.Dataset:
    """Returns a row in which the metric is infinite wherever there is no value."""
    if metric not in row:  # each of its runs ended before the first validation
        nothing = xr.full_like(row["seed"], np.inf, float).expand_dims(eval_step=[0])
        row = row.drop_dims("eval_step")
        row = row.assign({metric: nothing, "eval_seconds": nothing})
    return row.assign({metric: row[metric].fillna(np.inf)})


def _row(
    row: xr.Dataset, steps: xr.DataArray, base: xr.DataArray, metric: str
) -> xr.Dataset:
    ratio = steps.values / base.sel(seed=steps["seed"]).values
    best = row[metric].min("eval_step")
    seconds = row["eval_seconds"].where(row["eval_step"] == steps).max("eval_step")
    figures = {
        "steps": float(median(steps.values[None])[0]),
        "ratio": float(median(ratio[None])[0]),
        "best": float(median(best.values[None])[0]),
        "seconds": float(median(seconds.fillna(np.inf).values[None])[0]),
        "compile_seconds": float(row["compile_seconds"].max()),
    }
    for name, sample in (("steps", steps.values), ("ratio", ratio)):
        figures[f"{name}_low"], figures[f"{name}_high"] = bootstrap_median(sample)
    return xr.Dataset(figures).assign(steps_by_seed=steps)


def first_at_most(
    values: xr.DataArray, target: float | xr.DataArray, dim: str
) -> xr.DataArray:
    """Returns the first coordinate along `dim` where `values <= target`, else inf."""
    reached = values <= target
    first = values[dim].where(reached).min(dim)
    return first.where(reached.any(dim), np.inf)
