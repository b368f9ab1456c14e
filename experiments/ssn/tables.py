"""Shapeshifter Networks' tables: error by budget, groups and upsampling."""

from collections.abc import Mapping

import numpy as np
import xarray as xr

from hpcjax.runs import reduce
from hpcjax.runs.tables import Runs, Table, on_cpu

PAPER = (
    "ICLR 2022 and its preprint: accuracy by budget, down to 1 % of the parameters "
    "[abstract]; its figures are not known"
)
SEEDS = (0, 1, 2, 3, 4)
RATES = ("0.05", "0.1", "0.2")
# Widths of networks with no fewer parameters in all: 4,934 for 4,229, 1,320 for 1,240.
NARROW = {"5 %": 4, "1 %": 2}
BUDGETS = {
    **{"1 %": "0.01", "5 %": "0.05", "10 %": "0.1", "25 %": "0.25"},
    **{"50 %": "0.5", "100 %": "1.0", "200 %": "2.0"},
}


def _tuned(variant: str, **overrides: str) -> Runs:
    return Runs(
        config=f"ssn/fashion:{variant}",
        overrides=overrides,
        seeds=SEEDS,
        tune={"optimizer.lr": RATES},
        tune_seeds=(1000, 1001, 1002),
    )


def _like(budget: str, key: str, value: str) -> Runs:
    """Returns a row at the rate that was best for a budget."""
    return Runs(
        config="ssn/fashion:shared",
        overrides={"sharing.budget": BUDGETS[budget], key: value},
        seeds=SEEDS,
        like=budget,
        takes=("optimizer.lr",),
    )


def _errors(run: xr.Dataset) -> xr.DataArray:
    return 100 * run["val_error"].isel(eval_step=-1).drop_vars(
        "eval_step", errors="ignore"
    )


def _by_budget(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Returns errors in points, and how far they are from others, paired by seed."""
    errors = {row: _errors(run) for row, run in rows.items()}
    cells = {}
    for row, own in errors.items():
        narrow = errors.get(f"narrow, {row.removeprefix('narrow, ')}")
        cells[row] = {
            **reduce.extent(own, "error"),
            "above": (own - errors["unshared"]).mean(),
        }
        if narrow is not None:
            gained = narrow - own
            cells[row]["gained"] = gained.mean()
            cells[row]["surely_gained"] = _lower_bound(gained.values)
    return reduce.from_cells(cells)


def _lower_bound(differences: np.ndarray) -> float:
    """Returns the one-sided 90 % lower bound of a mean, by Student's t."""
    from scipy import stats

    count = len(differences)
    spread = np.std(differences, ddof=1) / np.sqrt(count) if count > 1 else 0.0
    return float(differences.mean() - stats.t.ppf(0.9, max(1, count - 1)) * spread)


@reduce.Number
def _gain(table: xr.Dataset) -> float:
    """Returns the sure gain at the better budget, unless the other loses a point."""
    own = table.sel(row=list(NARROW))
    if float(own["gained"].min()) < -1:
        return -np.inf
    return float(own["surely_gained"].max())


BUDGET = Table(
    id="ssn/budgets",
    title="Validation error of ResNet-8 by the share of its weights that it has",
    paper=PAPER,
    caption=(
        "10,000 images of Fashion-MNIST of 14x14, 400 steps of 128; 2,000 held out, so "
        "that one is 0.05 points. Means of five seeds, [least, most], each at the best "
        "of three rates, by three seeds of their own; rows of other ways have the rate "
        "of their budget. Shares are of the 74,512 weights of "
        "kernels; norms, biases and coefficients come beside them. narrow: networks of "
        "a few more parameters in all, which need fewer operations. One store for all "
        "layers, interpolated where it is too small, unless a row says otherwise; "
        "groups by shape would need 94 % of the weights. above: points above unshared; "
        "gained: points below narrow; sure: lower end of the mean's one-sided 90 % "
        "interval, pairs by seed."
    ),
    columns={
        "error": "error, points",
        "above": "above unshared",
        "gained": "gained on narrow",
        "surely_gained": "sure",
    },
    reduce=_by_budget,
    tiers=on_cpu(
        minutes=45.0,
        runs={
            "unshared": _tuned("unshared"),
            **{
                row: _tuned("shared", **{"sharing.budget": share})
                for row, share in BUDGETS.items()
            },
            **{
                f"narrow, {budget}": _tuned("unshared", **{"model.width": str(width)})
                for budget, width in NARROW.items()
            },
            **{
                f"5 %, {way}": _like("5 %", "sharing.upsample", way)
                for way in ("repeat", "mask", "wavg")
            },
            **{
                f"{budget}, 4 groups at random": _like(
                    budget, "sharing.groups", "random"
                )
                for budget in ("25 %", "50 %")
            },
        },
        claims={
            "quarter": reduce.cell("above", "25 %")
            .at_most(2.0, "points of error that a quarter of the weights costs")
            .fails({"25 %": "1 %"}),
            "double": reduce.cell("above", "200 %")
            .at_most(1.0, "points of error above unshared with twice the weights")
            .fails({"200 %": "1 %"}),
            "narrow": _gain.at_least(
                0.01,
                "points gained for sure on a narrower network at 5 % or 1 %, if no "
                "point is lost at the other",
            ).fails({row: f"narrow, {row}" for row in NARROW}),
        },
    ),
)
