"""Shapeshifter Networks' tables: error by budget, groups and upsampling."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from hpcjax.runs import reduce
from hpcjax.runs.claims import Trivial
from hpcjax.runs.pictures import Dots, Scatter
from hpcjax.runs.tables import Runs, Table, on_cpu

if TYPE_CHECKING:
    import xarray as xr

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


def _errors(run: "xr.Dataset") -> "xr.DataArray":
    return 100 * run["val_error"].isel(eval_step=-1).drop_vars(
        "eval_step", errors="ignore"
    )


def _by_budget(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns errors in points, and how far they are from others, paired by seed."""
    errors = {row: _errors(run) for row, run in rows.items()}
    cells = {}
    for row, own in errors.items():
        narrow = errors.get(f"narrow, {row.removeprefix('narrow, ')}")
        cells[row] = {
            **reduce.extent(own, "error"),
            "above": (own - errors["unshared"]).mean(skipna=False),
        }
        if narrow is not None:
            gained = narrow - own
            cells[row]["gained"] = gained.mean(skipna=False)
            cells[row]["surely_gained"] = _lower_bound(gained.values)
    return reduce.from_cells(cells)


def _lower_bound(differences: np.ndarray) -> float:
    """Returns the one-sided 90 % lower bound of a mean, by Student's t."""
    from scipy import stats

    count = len(differences)
    spread = np.std(differences, ddof=1) / np.sqrt(count) if count > 1 else 0.0
    return float(differences.mean() - stats.t.ppf(0.9, max(1, count - 1)) * spread)


@reduce.Number
def _gain(table: "xr.Dataset") -> float:
    """Returns the sure gain at the better budget, unless the other loses a point."""
    own = table.sel(row=list(NARROW))
    if float(own["gained"].min()) < -1:
        return -np.inf
    return float(own["surely_gained"].max())


def _digits(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns accuracies, and points gained on other rows, paired by seed."""
    cells: dict[str, reduce.Cells] = {}
    for row, run in rows.items():
        own = run["accuracy"]
        cells[row] = {
            **reduce.extent(own, "accuracy"),
            "below": (rows["unshared"]["accuracy"] - own).mean(skipna=False),
            **_gains(row, rows),
            **{
                name: run[name].mean(skipna=False)
                for name in ("weights", "others", "mflop", "groups")
            },
        }
    return reduce.from_cells(cells)


def _gains(row: str, rows: Mapping[str, "xr.Dataset"]) -> reduce.Cells:
    """Returns points gained on the trivial row of as many weights, if there is one."""
    share = row.removeprefix("narrow, ").partition(",")[0]
    trivial = rows.get(f"narrow, {share}", rows.get(f"{share}, drawn"))
    if trivial is None:
        return {}
    gained = rows[row]["accuracy"] - trivial["accuracy"]
    return {"gained": gained.mean(skipna=False), "sure": _lower_bound(gained.values)}


# Weights of ResNet-8 of width 4 and of width 2 over those of width 16.
EQUAL = {"6.4 %": "0.06447", "1.7 %": "0.01677"}
NARROWER = {"6.4 %": "4", "1.7 %": "2"}
_DIGITS = {
    "accuracy": "accuracy, %",
    "below": "below unshared",
    "gained": "gained on narrow",
    "weights": "weights",
    "others": "other parameters",
    "mflop": "MFLOP a digit",
    "groups": "stores",
}
_FROZEN = "1.7 %, frozen"


def _digit_runs(
    budget: str,
    *,
    variant: str = "shared",
    seeds: tuple[int, ...] = (0, 1, 2),
    **more: str,
) -> Runs:
    overrides = {"sharing.budget": budget} if variant == "shared" else {}
    return Runs(config=f"ssn/digits:{variant}", overrides=overrides | more, seeds=seeds)


def _narrow(share: str) -> Runs:
    """Returns the runs of a narrow network of as many weights."""
    return _digit_runs("", variant="unshared", **{"model.width": NARROWER[share]})


BUDGET = Table(
    id="ssn/budgets",
    title="Accuracy of ResNet-8 on digits by the share of its weights",
    paper=PAPER,
    caption=(
        "8x8 digits, 200 steps of 64, means of three seeds, [least, most]; 359 held "
        "out, one is 0.28 points. Shares are of the 74,512 weights of kernels, which "
        "one store makes; narrow: networks of width 4 and 2, of as many weights. Other "
        "parameters: norms, biases and coefficients. MFLOP: of a forward pass, made "
        "weights included. frozen: the store stays as it is drawn. below: points below "
        "unshared; gained: points above the narrow network, pairs by seed."
    ),
    shows=(
        "A network made all its weights from a smaller store. Towards the upper left "
        "is better: more accuracy from fewer weights than narrow networks have."
    ),
    picture=Scatter("weights", "accuracy", log_x=True),
    columns=_DIGITS,
    reduce=_digits,
    tiers=on_cpu(
        minutes=6.0,
        runs={
            "unshared": _digit_runs("", variant="unshared"),
            "200 %": _digit_runs("2.0"),
            "25 %": _digit_runs("0.25"),
            **{share: _digit_runs(budget) for share, budget in EQUAL.items()},
            **{f"narrow, {share}": _narrow(share) for share in NARROWER},
            _FROZEN: _digit_runs(EQUAL["1.7 %"], frozen="true"),
        },
        claims={
            "quarter": reduce.cell("below", "25 %")
            .at_most(2.0, "points that a quarter of the weights costs")
            .fails({"25 %": _FROZEN}),
            "double": reduce.cell("below", "200 %")
            .at_most(1.0, "points below unshared with twice the weights")
            .fails({"200 %": _FROZEN}),
            "few": reduce.cell("gained", "6.4 %")
            .at_least(-1.0, "points above a narrow network of 6.4 % of the weights")
            .fails({"6.4 %": _FROZEN}),
            "fewest": reduce.cell("gained", "1.7 %")
            .at_least(1.0, "points above a narrow network of 1.7 % of the weights")
            .fails({"1.7 %": _FROZEN}),
        },
    ),
)

_FEASIBLE = (0, 1, 2, 4, 5)  # those of seed 3 need more than a quarter of the weights
_WAYS = tuple(f"1.7 %, {way}" for way in ("inter", "repeat", "mask", "wavg"))
_THIN, _DRAWN, _LEARNED = "narrow, 1.7 %", "25 %, drawn", "25 %, learned"
CHOICES = Table(
    id="ssn/choices",
    title="Ways to make weights, and groups of layers that share",
    paper=PAPER,
    caption=(
        "As ssn/budgets. At 1.7 % all layers are larger than the store, which is "
        "interpolated, repeated, masked or mixed. At 25 % three groups, drawn, or "
        "learned in a tenth of the steps, five seeds whose drawn groups need no more, "
        "against one for all. A layer alone in its group has a kernel and no store. "
        "Groups by shape would need 94 % of weights. gained: points above what is "
        "trivial, narrow or drawn, pairs by seed; sure: lower end of the mean's "
        "one-sided 90 % interval."
    ),
    shows=(
        "Ways to make weights from a smaller store were compared. Further left loses "
        "less accuracy; a narrow network of as many weights is the control."
    ),
    picture=Dots("below"),
    columns=_DIGITS | {"gained": "gained on trivial", "sure": "sure"},
    reduce=_digits,
    tiers=on_cpu(
        minutes=7.0,
        runs={
            "unshared": _digit_runs("", variant="unshared"),
            **{
                way: _digit_runs(
                    EQUAL["1.7 %"], **{"sharing.upsample": way.removeprefix("1.7 %, ")}
                )
                for way in _WAYS
            },
            _THIN: _narrow("1.7 %"),
            "25 %, one group": _digit_runs("0.25"),
            _DRAWN: _digit_runs(
                "0.25",
                seeds=_FEASIBLE,
                **{"sharing.groups": "random", "sharing.count": "3"},
            ),
            _LEARNED: _digit_runs("0.25", seeds=_FEASIBLE, learned="3"),
            _FROZEN: _digit_runs(EQUAL["1.7 %"], frozen="true"),
        },
        trivial=Trivial(rows=(_THIN, _DRAWN), by="accuracy", largest=True),
        claims={
            "learned": reduce.cell("sure", _LEARNED)
            .at_least(0.01, "points that learned groups gain for sure on drawn ones")
            .fails({_LEARNED: _DRAWN}, {_LEARNED: _FROZEN}),
            "every way": reduce.least("gained", *_WAYS)
            .at_least(1.0, "points above a narrow network, of any way to make weights")
            .fails(dict.fromkeys(_WAYS, _THIN), {_WAYS[0]: _FROZEN}),
        },
    ),
)


FASHION = Table(
    id="ssn/fashion",
    title="Error of ResNet-8 on Fashion-MNIST by the share of its weights",
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
