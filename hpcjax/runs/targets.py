"""Steps and time that methods need to reach the target of a tuned baseline.

The target is the median of the baseline seeds' best validations, of an even number the
worse of the middle ones: half of them reach it, and one that fails does not set it. The
baseline's steps are counted to the same target. A run that misses it counts as
infinitely slow, not as missing. Validations that are NaN, or that a diverged run did
not come to, reach no target.

A baseline seed without any finite validation does not count for the target. With a seed
under which the baseline misses the target, other rows are compared with the last step
at which it was validated. The baseline would have needed more, so that the true ratio
under this seed is at most the one that is shown.

Single validations of noisy training fall below a target by luck, the sooner the more
often one looks: `smooth` of them are averaged first.
"""

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcjax.core.errors import Diverged
from hpcjax.perf.intervals import bootstrap_median, median
from hpcjax.runs import results

if TYPE_CHECKING:
    import xarray as xr


def time_to_target(
    rows: Mapping[str, "xr.Dataset"],
    baseline: str,
    metric: str = "val_loss",
    target: float | None = None,
    smooth: int = 1,
) -> "xr.Dataset":
    """Compares methods by the number of steps to a target.

    Args:
      rows: `{row: history with dimension seed}`; the baseline has every seed.
      baseline: the row with which others are compared.
      metric: validation metric, less is better.
      target: a value of the metric; None for the median of the baseline seeds' best.
      smooth: the metric is the mean of so many validations, the last ones at a step.

    Returns:
      With dimension `row`: `steps` (median over seeds) and `ratio`, the median over
      seeds of steps divided by the baseline's steps under the same seed, both with
      95 % bootstrap intervals `_low` and `_high`; `best`, the median best value;
      `seconds`, the median training time to the target; `compile_seconds`, the longest
      compilation, as later seeds find the program in the cache; and `target`. With
      dimensions `row` and `seed`, `steps_by_seed` has the steps of single runs.

    Raises:
      Diverged: no seed of the baseline has a finite value of the metric.
    """
    import xarray as xr

    scored = {name: _fill_missing(row, metric, smooth) for name, row in rows.items()}
    best = scored[baseline][metric].min("eval_step").values
    if not np.isfinite(best).any():
        raise Diverged(f"no seed of {baseline!r}, the baseline, has a finite {metric}")
    if target is None:
        target = float(np.quantile(best[np.isfinite(best)], 0.5, method="higher"))
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


def time_to_targets(
    rows: Mapping[str, "xr.Dataset"], baselines: Mapping[str, str], **options: Any
) -> "xr.Dataset":
    """Compares the methods of each of several tasks with that task's baseline.

    Args:
      rows: by `task/method`.
      baselines: by task, the method that the others are compared with.
      **options: of `time_to_target`.

    Returns:
      What `time_to_target` says of each task, joined; `target` too has dimension `row`.
    """
    import xarray as xr

    compared = []
    for task, baseline in baselines.items():
        own = {name: row for name, row in rows.items() if name.startswith(f"{task}/")}
        table = time_to_target(own, f"{task}/{baseline}", **options)
        compared.append(table.assign(target=table["target"].expand_dims(row=table.row)))
    return xr.concat(compared, dim="row", join="outer")


def _fill_missing(row: "xr.Dataset", metric: str, smooth: int) -> "xr.Dataset":
    """Returns a row with the smoothed metric, infinite where it has no value."""
    import xarray as xr

    # None of its runs came to a validation.
    if metric not in row:
        nothing = xr.full_like(row["seed"], np.inf, float).expand_dims(eval_step=[0])
        row = row.drop_dims("eval_step")
        row = row.assign({metric: nothing, "eval_seconds": nothing})
    values = results.smoothed(row[metric], smooth)
    return row.assign({metric: values.fillna(np.inf)})


def _row(
    row: "xr.Dataset", steps: "xr.DataArray", base: "xr.DataArray", metric: str
) -> "xr.Dataset":
    import xarray as xr

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
    values: "xr.DataArray", target: "float | xr.DataArray", dim: str
) -> "xr.DataArray":
    """Returns the first coordinate along `dim` where `values <= target`, else inf."""
    reached = values <= target
    first = values[dim].where(reached).min(dim)
    return first.where(reached.any(dim), np.inf)
