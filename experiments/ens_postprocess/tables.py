"""What each stage of post-processing gains: mean, spread, and CRPS of both."""

import functools
from typing import TYPE_CHECKING, Any

from hpcjax.runs import reduce
from hpcjax.runs.claims import Trivial
from hpcjax.runs.pictures import Bars
from hpcjax.runs.reduce import cell, over
from hpcjax.runs.tables import Runs, Table, on_cpu

if TYPE_CHECKING:
    import xarray as xr

SEEDS = (0, 1, 2)
E5, E10, POINT = "E5, raw", "E10, raw", "EMOS5, each point"
BIAS, BARE, OTHERS = "B5", "B5, no head", "B5, other dates"
STAGED, FINAL = "B5U5", "B5U5C"
SEEN, SEEN_FINAL = "B5U5, one fold", "B5U5C, one fold"
CLIMATE, CLIMATE_FINAL = "B5, spread of places", "B5 + C, spread of places"
NAMES = ("crps", "rmse", "ratio", "inside")
OTHER = ", z500"


@reduce.by_row
def _stages(run: "xr.Dataset") -> reduce.Cells:
    last = run.isel(eval_step=-1)
    square = last["val_square"]
    found = {
        "crps": last["val_crps"],
        "rmse": square**0.5,
        "ratio": (last["val_variance"] / square) ** 0.5,
        "inside": 100 * last["val_inside"],
    }
    return {
        name: value
        for column in NAMES
        for name, value in reduce.interval(found[column], column).items()
    }


def circle(rows: reduce.Rows) -> "xr.Dataset":
    """Returns scores of each row, medians over seeds, and the CRPS beside E10's.

    Of a row of another target, which its name ends with, it is that target's E10.
    """
    table = _stages(rows)
    names = table["row"].values.tolist()
    bases = [E10 + (OTHER if name.endswith(OTHER) else "") for name in names]
    table["part"] = 100 * table["crps"] / table["crps"].sel(row=bases).values
    return table


def _row(
    variant: str,
    *,
    seeds: int = 1,
    after: str = "",
    base: str = "circle",
    **overrides: str,
) -> Runs:
    given = {key.replace("__", "."): text for key, text in overrides.items()}
    config = f"ens_postprocess/{base}:{variant}"
    return Runs(config=config, seeds=SEEDS[:seeds], overrides=given, after=after)


CIRCLE = Table(
    id="ens_postprocess/circle",
    title="A better forecast from five members of ten, stage by stage, on a circle",
    paper=(
        "Grönquist et al. 2021, abstract: more than 13 % better than ten members; its "
        "figures are not known here"
    ),
    caption=(
        "Lorenz's two-scale model of 1996 whose forcing differs by place, 300 dates of "
        "training, 100 of test, two days ahead. E: raw. B: the mean corrected by a "
        "network with a head by place. U: the spread of all twenty members learnt. C: "
        "then CRPS of that spread around means that have not learnt the date. Medians "
        "of three seeds [95 % interval] from B5U5 on, and of B5; else one. Steps, "
        "widths and strengths were set before any run, but for the rate of C, spread "
        "of places, which starts from a row whose spread has not come far."
    ),
    shows=(
        "Forecasts of five members on a circle were corrected stage by stage. Shorter "
        "is better: the line is ten members as they are, the peer is four numbers for "
        "each place, by EMOS."
    ),
    picture=Bars("part", bound=100),
    columns={
        "crps": "CRPS",
        "part": "% of E10",
        "rmse": "RMSE of the mean",
        "ratio": "spread / skill",
        "inside": "% in the 80 % interval",
    },
    reduce=circle,
    tiers=on_cpu(
        minutes=9.0,
        runs={
            E5: _row("raw"),
            E10: _row("raw", dataset__members="10"),
            "EMOS5": _row("emos"),
            POINT: _row("emos_point"),
            "network, end to end": _row("cnn"),
            BIAS: _row("bias", seeds=3),
            "B5, not regularised": _row("bias", seeds=3, model__lcn__alpha="0"),
            BARE: _row("bias", model__lcn="none"),
            "B5, no head, coordinates": _row(
                "bias", model__lcn="none", model__coordinates="true"
            ),
            OTHERS: _row("bias", dataset__shuffled="true"),
            "U5": _row("spread"),
            STAGED: _row("staged", seeds=3),
            FINAL: _row("joint", seeds=3, after=STAGED),
            CLIMATE: _row("climate", seeds=3),
            CLIMATE_FINAL: _row("climate_joint", seeds=3, after=CLIMATE),
            SEEN: _row("staged", seeds=3, dataset__folds="1"),
            SEEN_FINAL: _row("joint", seeds=3, after=SEEN, dataset__folds="1"),
        },
        trivial=Trivial(rows=(E5,), by="crps", peers=(POINT, CLIMATE_FINAL)),
        claims={
            "members": over("crps", FINAL, E10)
            .at_most(0.70, "the CRPS of all stages over that of ten raw members")
            .fails({FINAL: OTHERS}),
            "places": over("crps", FINAL, POINT)
            .at_most(0.85, "the CRPS of all stages over that of EMOS of each point")
            .fails({FINAL: "U5"}),
            "head": over("rmse", BIAS, E5)
            .at_most(0.85, "the RMSE of the corrected mean over the raw one")
            .fails({BIAS: BARE}),
            "flow": over("crps", FINAL, CLIMATE_FINAL)
            .at_most(0.985, "the CRPS over that with a spread of places alone")
            .fails({FINAL: CLIMATE_FINAL}, {FINAL: STAGED}),
            "interval": abs(cell("inside", FINAL) - 80)
            .at_most(6, "points from 80 % in the 80 % interval")
            .fails({FINAL: STAGED}),
            "ratio": abs(cell("ratio", FINAL) - 1.05)
            .at_most(0.15, "from 1.05, the ratio of spread and skill")
            .fails({FINAL: SEEN_FINAL}),
        },
    ),
)


def _stages_of(end: str, **given: str) -> dict[str, Runs]:
    """Returns what is made of each target, with an end of its rows' names."""
    made = functools.partial(_row, base="light", **given)
    return {
        f"{E5}{end}": made("raw"),
        f"{E10}{end}": made("raw", dataset__members="10"),
        f"{POINT}{end}": made("emos_point"),
        f"{BIAS}{end}": made("bias", seeds=3),
        f"{STAGED}{end}": made("staged", seeds=3),
        f"{FINAL}{end}": made("joint", seeds=3, after=f"{STAGED}{end}"),
    }


_SEEN: dict[str, Any] = {"base": "light", "dataset__folds": "1"}
LIGHT = Table(
    id="ens_postprocess/light",
    title="A better forecast from five members of ten, on a simulated globe",
    paper=CIRCLE.paper,
    caption=(
        "Temperature at 850 hPa, and where it is said geopotential at 500 hPa, after "
        "48 hours of a simulated dry atmosphere (T21): 84 dates of training, 40 of "
        "test; scores are weighted by the cosine. Stages as in ens_postprocess/circle. "
        "Medians of three seeds [95 % interval] of B5, B5U5 and B5U5C; else one. "
        "Steps, widths and strengths were set before any run."
    ),
    shows=(
        "Forecasts of the globe by five members were corrected stage by stage. Shorter "
        "is better: the line is ten members as they are, the peer is four numbers for "
        "each place, by EMOS."
    ),
    picture=Bars("part", bound=100),
    columns=CIRCLE.columns,
    reduce=circle,
    tiers=on_cpu(
        minutes=15.0,
        runs={
            **_stages_of(""),
            "EMOS5": _row("emos", base="light"),
            BARE: _row("bias", base="light", model__lcn="none"),
            "U5": _row("spread", base="light"),
            SEEN: _row("staged", **_SEEN),
            SEEN_FINAL: _row("joint", after=SEEN, **_SEEN),
            **_stages_of(OTHER, dataset__target="z500"),
        },
        trivial=Trivial(rows=(E5,), by="crps", peers=(POINT,)),
        claims={
            "head": over("rmse", BIAS, E5)
            .at_most(0.85, "the RMSE of the corrected mean over the raw one")
            .fails({BIAS: E10}),
            "places": over("crps", FINAL, POINT)
            .at_most(1.0, "the CRPS of all stages over that of EMOS of each point")
            .fails({FINAL: "EMOS5"}),
            "members": over("crps", FINAL, E10)
            .at_most(0.87, "the CRPS of all stages over that of ten raw members")
            .fails({FINAL: "U5"}),
            "interval": abs(cell("inside", FINAL) - 80)
            .at_most(6, "points from 80 % in the 80 % interval")
            .fails({FINAL: E5}),
        },
    ),
)
