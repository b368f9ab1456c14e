"""The spread of all members from a few: baselines, networks, and what these cost."""

from typing import TYPE_CHECKING

import numpy as np

from experiments.weather_uncertainty import baselines
from experiments.weather_uncertainty.baselines import BLEND, FLOOR, RAW, SECOND
from hpcjax.runs import packing, reduce
from hpcjax.runs.pictures import Dots, Map
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
# Steps and rate of the network were set on draw 0, which is in none of these.
DRAWS = {f"draw {number}": number for number in range(1, 9)}


def circle(rows: reduce.Rows) -> "xr.Dataset":
    """Returns the RMSE of each baseline, and of networks the median over seeds."""
    cells: dict[str, Cells] = {}
    for name, run in rows.items():
        if "rmse" not in run:
            cells[name] = reduce.interval(_errors(run), "rmse")
            continue
        for method in run["method"].values.tolist():
            value = run["rmse"].sel({"method": method}).isel(seed=0)
            cells[f"{method}, {name}"] = {"rmse": value}
    table = reduce.from_cells(cells)
    bases = [f"{RAW}, {_members(name)}" for name in table["row"].values.tolist()]
    table["part"] = 100 * table["rmse"] / table["rmse"].sel(row=bases).values
    return table


def _errors(network: "xr.Dataset") -> "xr.DataArray":
    """Returns a network's RMSE of the spread after training, by seed."""
    return network["val_spread"].isel(eval_step=-1) ** 0.5


def draws(rows: reduce.Rows) -> "xr.Dataset":
    """Returns the table of a circle, with a row for each draw: a network's gain."""
    table = circle({name: run for name, run in rows.items() if "draw" not in name})
    pairs = {draw: (f"{CNN}, {draw}", f"blend, {draw}") for draw in DRAWS}
    pairs |= {name: (name, "5 members") for name in (_NETWORK, _SHUFFLED)}
    cells: dict[str, Cells] = {
        name: {"gain": _errors(rows[network]).median() / _blend(rows[base])}
        for name, (network, base) in pairs.items()
    }
    return table.merge(reduce.from_cells(cells), join="outer")


def _blend(run: "xr.Dataset") -> "xr.DataArray":
    """Returns the RMSE of the blend."""
    return run["rmse"].sel({"method": BLEND}).isel(seed=0)


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


def _drawn() -> dict[str, Runs]:
    runs = _runs()
    for draw, number in DRAWS.items():
        given = {"dataset.draw_seed": str(number)}
        for name, variant in (("blend", "baselines"), (CNN, "circle:field_cnn")):
            config = f"weather_uncertainty/{variant}"
            runs[f"{name}, {draw}"] = Runs(config=config, overrides=given)
    return runs


_NETWORK = f"{CNN}, 5 members"
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
        "network: median of three seeds [95 % interval]; steps and rate by draw 0. "
        "Blends are fitted by least squares: 1, the raw spread, the climate of each "
        "point, and the raw spread around it. floor: of Gaussian members of known "
        "deviations. Draws are worlds of their own: network / blend, of five members."
    ),
    shows=(
        "The spread of twenty forecasts was foretold from five of them, on a circle. "
        "Further left errs less: the line is the raw spread, the network's peer the "
        "blend."
    ),
    picture=Dots("part", rows=("5 members",), bound=100, sort=True),
    columns={
        "rmse": "RMSE of the spread",
        "part": "% of raw",
        "gain": "network / blend",
    },
    reduce=draws,
    tiers=on_cpu(
        minutes=6.0,
        runs=_drawn(),
        claims={
            "blend": reduce.of("gain", *DRAWS)
            .median()
            .at_most(1.0, "the network's RMSE over the blend's, median of eight draws")
            .fails(dict.fromkeys(DRAWS, _SHUFFLED)),
            "raw": over("rmse", f"{BLEND}, 2 members", _RAW)
            .at_most(0.85, "the blend's RMSE over the raw spread's, of two members")
            .fails({f"{BLEND}, 2 members": f"{baselines.SECOND}, 2 members"}),
            "floor": over("rmse", _NETWORK, _FLOOR)
            .at_least(1.0, "the network's RMSE over the floor, below which is a leak")
            .fails({_NETWORK: f"{FLOOR}, 8 members"}),
        },
    ),
)


_ALL = "0, 24, 48 h"
_LEADS = {"48 h": "[]", "0, 48 h": "[0]", _ALL: "[0,24]"}
_TRIED = {f"unet3d, {name}": ("unet3d", leads) for name, leads in _LEADS.items()}
_TRIED |= {f"{n}, {_ALL}": (n, _LEADS[_ALL]) for n in ("field_unet", "conv_lstm")}
_NEAR = f"{baselines.NEAR[1]}, 5 members"


def _light() -> dict[str, Runs]:
    base, config = "weather_uncertainty/baselines:light", "weather_uncertainty/light"
    runs = {
        name: Runs(config=base, overrides=MEMBERS[name])
        for name in ("5 members", "8 members")
    }
    for name, (variant, leads) in _TRIED.items():
        given = {"dataset.leads": leads}
        runs[name] = Runs(config=f"{config}:{variant}", seeds=SEEDS, overrides=given)
    runs[OTHERS] = Runs(config=config, overrides={"dataset.shuffled": "true"})
    return runs


LIGHT = Table(
    id="weather_uncertainty/light",
    title="The spread of ten members from five, on a simulated globe",
    paper=CIRCLE.paper,
    caption=(
        "Temperature at 850 hPa after 48 hours of a simulated dry atmosphere (T21), 84 "
        "dates of training, 40 of test; RMSE in K of the deviation of ten members, "
        "weighted by the cosine. Networks see both levels, of the leads that are "
        "named: medians of three seeds [95 % interval]. Steps, widths and rate were "
        "set before any run. Baselines as in weather_uncertainty/circle."
    ),
    shows=(
        "The spread of ten forecasts of the globe was foretold from five of them. "
        "Further left errs less: the line is the raw spread, the networks' peer the "
        "blend with what is around."
    ),
    picture=Dots("part", bound=100, sort=True),
    columns={"rmse": "RMSE of the spread, K", "part": "% of raw"},
    reduce=circle,
    tiers=on_cpu(
        minutes=10.0,
        runs=_light(),
        claims={
            "blend": over("rmse", f"{BLEND}, 5 members", f"{SECOND}, 5 members")
            .at_most(0.97, "the blend's RMSE over that of the corrected variance")
            .fails({f"{BLEND}, 5 members": f"{RAW}, 5 members"}),
            "network": (reduce.least("rmse", *_TRIED) / reduce.cell("rmse", _NEAR))
            .at_most(1.0, "the best network's RMSE over that of the blend around")
            .fails(dict.fromkeys(_TRIED, OTHERS)),
            "floor": (
                reduce.least("rmse", *_TRIED)
                / reduce.cell("rmse", f"{FLOOR}, 5 members")
            )
            .at_least(1.0, "the least RMSE over the floor, below which is a leak")
            .fails({"unet3d, 48 h": f"{FLOOR}, 8 members"}),
        },
    ),
)


TRUTH, WORTH, TIMES = "truth", "worth", ("member", "network", "train")


def cost(rows: reduce.Rows) -> "xr.Dataset":
    """Returns errors, how many raw members have them, and what members would cost."""
    import xarray as xr

    known = {name: reduce.first(run) for name, run in rows.items()}
    counts = {int(name.split()[0]): known[name] for name in MEMBERS}
    raw = {n: float(run["rmse"].sel({"method": RAW})) for n, run in counts.items()}
    errors, numbers = np.array(sorted((each, n) for n, each in raw.items())).T
    cells: dict[str, Cells] = {TRUTH: {"rmse": 0.0}}
    for n, each in raw.items():
        cells[f"raw, {n} members"] = {"rmse": each, WORTH: n, "part": 5 * n}
    fields = {TRUTH: known[CNN]["truth"], "raw, 5 members": known[CNN]["raw"]}
    for name in (CNN, OTHERS):
        square = known[name]["val_spread"].isel(eval_step=-1)
        rmse = float(square) ** 0.5
        cells[name] = {"rmse": rmse, WORTH: np.interp(rmse, errors, numbers)}
        fields[name] = known[name]["predicted"]
    for world in known[CNN]["world"].values.tolist():
        own = known[CNN].sel(world=world)
        ratio = (own["network"] / own["member"]).median()
        cells[f"network on a {world}"] = {
            "ratio": ratio,
            "part": 5 * (5 + ratio),
            **{name: 1e3 * own[name].median() for name in TIMES},
        }
    table = reduce.from_cells(cells)
    held = xr.concat(fields.values(), xr.Variable("row", list(fields)))
    thin = held.isel(y=slice(None, None, 2)).reset_coords(drop=True)
    shown = thin.reindex(row=table["row"].values)
    return table.assign(field=packing.pack(shown))


COST = Table(
    id="weather_uncertainty/cost",
    title="What a network costs beside the members that it spares",
    paper=(
        "Grönquist et al., abstract: the spread at a much lower cost; its figures are "
        "not known here"
    ),
    caption=(
        "The circle of weather_uncertainty/circle, one seed. worth: how many raw "
        "members have the same RMSE, of a line between 2, 5 and 8. % of all: the time "
        "of five members and a network in that of twenty members' simulation. A "
        "network pays if its time, in members', is below its worth less the five that "
        "it sees. circle: the convolutions of the table; globe: a 3-D U-Net (base 8, "
        "three halvings) of 32x64 points, two levels and three leads, beside two days "
        "of the model that makes ens10-light. Steps are of eight dates. Times are of "
        "one core of this machine."
    ),
    shows=(
        "The spread of twenty forecasts on a circle, a row of points for every second "
        "date held out. Below are the errors: the network's should be paler than those "
        "of the raw spread of five."
    ),
    picture=Map("field", TRUTH, rows=(TRUTH, "raw, 5 members", CNN), label="spread"),
    columns={
        "rmse": "RMSE of the spread",
        WORTH: "worth in members",
        "part": "% of all members' time",
        "ratio": "network / member",
        "member": "ms a member",
        "network": "ms a prediction",
        "train": "ms a step",
    },
    reduce=cost,
    tiers=on_cpu(
        minutes=3.0,
        runs={
            **{name: _runs()[name] for name in MEMBERS},
            CNN: Runs(config="weather_uncertainty/cost"),
            OTHERS: Runs(config="weather_uncertainty/cost:shuffled"),
        },
        claims={
            "worth": reduce.cell(WORTH, CNN)
            .at_least(5.5, "raw members that err as a network of five does")
            .fails({CNN: OTHERS}, {CNN: "raw, 5 members"}),
            "eight": reduce.cell(WORTH, CNN)
            .at_most(7.5, "likewise: not the eight that the paper's relation asks")
            .fails({CNN: "raw, 8 members"}),
        },
    ),
)
