"""The spread of twenty members from a few: baselines and networks on a circle."""

from typing import TYPE_CHECKING

from experiments.weather_uncertainty import baselines
from experiments.weather_uncertainty.baselines import BLEND, FLOOR, RAW
from hpcjax.runs import reduce
from hpcjax.runs.pictures import Dots
from hpcjax.runs.reduce import Cells, over
from hpcjax.runs.tables import Runs, Table, on_cpu

if TYPE_CHECKING:
    import xarray as xr

SEEDS = (0, 1, 2)
MEMBERS = {
    "2 members": {"dataset.members": "2"},
    "5 members": {},
    "8 members": {"dataset.members": "8"},
}
CNN, OTHERS = "network", "network, spread of other dates"


def circle(rows: reduce.Rows) -> "xr.Dataset":
    """Returns the RMSE of each baseline, and of networks the median over seeds."""
    cells: dict[str, Cells] = {}
    for name, run in rows.items():
        if "rmse" in run:
            for method in run["method"].values.tolist():
                value = run["rmse"].sel({"method": method}).isel(seed=0)
                cells[f"{method}, {name}"] = {"rmse": value}
        else:
            last = run["val_spread"].isel(eval_step=-1) ** 0.5
            cells[name] = reduce.interval(last, "rmse")
    table = reduce.from_cells(cells)
    bases = [f"{RAW}, {_members(name)}" for name in table["row"].values.tolist()]
    table["part"] = 100 * table["rmse"] / table["rmse"].sel(row=bases).values
    return table


def _members(name: str) -> str:
    return next((each for each in MEMBERS if name.endswith(each)), "5 members")


def _runs() -> dict[str, Runs]:
    runs = {
        name: Runs(config="weather_uncertainty/baselines", overrides=given)
        for name, given in MEMBERS.items()
    }
    for name, variant in ((CNN, "field_cnn"), (OTHERS, "shuffled")):
        config = f"weather_uncertainty/circle:{variant}"
        seeds = SEEDS if name == CNN else (0,)
        runs[f"{name}, 5 members"] = Runs(config=config, seeds=seeds)
    return runs


_NETWORK, _BLEND = f"{CNN}, 5 members", f"{BLEND}, 5 members"
_RAW, _FLOOR = f"{RAW}, 2 members", f"{FLOOR}, 5 members"
_SHUFFLED = f"{OTHERS}, 5 members"
CIRCLE = Table(
    id="weather_uncertainty/circle",
    title="The spread of twenty members from a few, on a circle",
    paper=(
        "Grönquist et al., NeurIPS 2019 workshop: networks on a few members estimate "
        "the spread of all; its figures are not known here"
    ),
    caption=(
        "Lorenz's two-scale model of 1996 with places, 300 dates of training, 100 of "
        "test, two days ahead; RMSE of the deviation of all twenty members. The "
        "network: median of three seeds [95 % interval]; steps and rate by seed 0. "
        "Blends are fitted by least squares: 1, the raw spread, the climate of each "
        "point, and the raw spread around it. floor: of Gaussian members of known "
        "deviations."
    ),
    shows=(
        "The spread of twenty forecasts was foretold from five of them, on a circle. "
        "Further left errs less: the line is the raw spread, the network's peer the "
        "blend."
    ),
    picture=Dots("part", rows=("5 members",), bound=100, sort=True),
    columns={"rmse": "RMSE of the spread", "part": "% of raw"},
    reduce=circle,
    tiers=on_cpu(
        minutes=3.0,
        runs=_runs(),
        claims={
            "blend": over("rmse", _NETWORK, _BLEND)
            .at_most(1.0, "the network's RMSE over the blend's, of five members")
            .fails({_NETWORK: _SHUFFLED}),
            "raw": over("rmse", f"{BLEND}, 2 members", _RAW)
            .at_most(0.85, "the blend's RMSE over the raw spread's, of two members")
            .fails({f"{BLEND}, 2 members": f"{baselines.SECOND}, 2 members"}),
            "floor": over("rmse", _NETWORK, _FLOOR)
            .at_least(1.0, "the network's RMSE over the floor, below which is a leak")
            .fails({_NETWORK: f"{FLOOR}, 8 members"}),
        },
    ),
)
