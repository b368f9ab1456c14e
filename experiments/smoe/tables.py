"""Spatial Mixture-of-Experts' table: heat on a plate of three materials."""

import functools
from typing import TYPE_CHECKING

from hpcjax.runs import reduce
from hpcjax.runs.claims import Claim, Trivial
from hpcjax.runs.pictures import Bars
from hpcjax.runs.reduce import Cells, cell, over
from hpcjax.runs.tables import Runs, Table, on_cpu

if TYPE_CHECKING:
    import xarray as xr

SEEDS = (0, 1, 2, 3, 4)
MATERIALS = ("slow", "middle", "fast")
_OURS, _END, _UNDAMPED = "SMoE", "SMoE, end to end", "SMoE, undamped"
_LOCAL, _PLACES, _CNN = "locally connected", "CoordConv", "CNN"


_TRIVIAL = _STILL, _STENCIL = "persistence", "one stencil"
_NETWORK = ("agreement", "filter_error", "parameters", "kept")


def _of_network(figure: str, run: "xr.Dataset") -> "xr.DataArray":
    """Returns a figure of a network, which other forecasts lack."""
    if run["forecast"].item() != "trained":
        raise KeyError(figure)
    return run[figure]


def _of_material(number: int, run: "xr.Dataset") -> "xr.DataArray":
    return run["close_by_material"].isel(material=number)


def _name(row: str) -> str:
    """Returns a network's name, or that of a forecast that is the same beside each."""
    network, _, forecast = row.rpartition(", ")
    return network if forecast == "trained" else forecast


def _medians(seeds: "xr.DataArray", column: str) -> Cells:
    """Returns the median over seeds, of all points with the least and largest."""
    spread = reduce.extent(seeds, column) if column == "close" else {}
    return spread | {column: float(seeds.median(skipna=False))}


def _tuned(variant: str, *rates: str) -> Runs:
    """Returns a row whose rate is chosen by trials with other seeds."""
    return Runs(
        config=f"smoe/heat:{variant}",
        seeds=SEEDS,
        tune={"optimizer.lr": rates},
        tune_seeds=(1000, 1001, 1002),
    )


def _error_over_ours(row: str, relation: str) -> Claim:
    """Claims that SMoE has a third of a row's error, as no trivial forecast has."""
    rows = dict.fromkeys((row, *_TRIVIAL))
    claim = over("left", row, _OURS).at_least(3.0, relation)
    return claim.fails(*({_OURS: each} for each in rows))


HEAT = Table(
    id="smoe/heat",
    title="Heat on a plate of three materials: the next field",
    paper="NeurIPS 2022, heat diffusion",
    recalled={
        "SMoE": "about 100 %",
        "CNN": "fails where heat is slow",
        "locally connected": "between",
    },
    caption=(
        "The paper's plate and draws, on 32x32 cells and the first 20 steps of each "
        "run: 50 runs train, 20 tune, 20 test; 2,000 steps of 8, of the CNNs, which "
        "have 16 channels and give a field's change, 6,000; medians of five seeds, "
        "[least, most]. Points within 1 % of the truth, in all and by material (d = "
        "0.0025, 0.025, 0.25). left: squared error over that of persistence. map: "
        "places with the right expert. filters: largest error of a weight. kept: "
        "numbers that inference needs. Rates are the best of three, by other seeds "
        "and the part that tunes, those of the last two 0.05. end to end: gates by "
        "the task's gradient; one stencil: of least squares."
    ),
    shows=(
        "Networks foretold heat on a plate of three materials. Longer is better: at "
        "the line nearly all places of every material are within 1 %."
    ),
    picture=Bars(
        ("slow", "middle", "fast"), label="places within 1 %, %", bound="every material"
    ),
    columns={
        "close": "within 1 %, %",
        **{
            name: (f"{name}, %", functools.partial(_of_material, number))
            for number, name in enumerate(MATERIALS)
        },
        "worst": "",
        "left": "left",
        **{
            name: (heading, functools.partial(_of_network, name))
            for name, heading in zip(
                _NETWORK, ("map", "filters", "parameters", "kept"), strict=True
            )
        },
    },
    along="forecast",
    named=_name,
    over=_medians,
    tiers=on_cpu(
        minutes=20.0,
        runs={
            _OURS: _tuned("smoe", "0.02", "0.05", "0.1"),
            _LOCAL: _tuned("locally_connected", "0.03", "0.1", "0.3"),
            _PLACES: _tuned("coord_conv", "0.001", "0.003", "0.01"),
            _CNN: _tuned("cnn", "0.001", "0.003", "0.01"),
            _END: Runs(config="smoe/heat:end_to_end", seeds=SEEDS),
            _UNDAMPED: Runs(config="smoe/heat:undamped", seeds=SEEDS),
        },
        trivial=Trivial(rows=_TRIVIAL, by="left", peers=(_LOCAL, _PLACES, _CNN)),
        claims={
            "every material": cell("worst", _OURS)
            .at_least(99.5, "% within 1 %, of the material with the fewest")
            .fails(*({_OURS: row} for row in _TRIVIAL)),
            "map": cell("agreement", _OURS)
            .at_least(0.99, "of the places get the right expert")
            .fails({_OURS: _UNDAMPED}),
            "filters": cell("filter_error", _OURS)
            .at_most(0.01, "largest error of a weight of the stencils")
            .fails({_OURS: _END}),
            "CNN": _error_over_ours(_CNN, "squared error of a CNN over SMoE's"),
            "CoordConv": _error_over_ours(
                _PLACES, "squared error of a CNN with coordinates over SMoE's"
            ),
            "locally connected": _error_over_ours(
                _LOCAL, "squared error of a filter for each place over SMoE's"
            ),
            "routing loss": _error_over_ours(
                _END, "squared error with gates trained end to end over SMoE's"
            ),
            "damping": _error_over_ours(
                _UNDAMPED, "squared error without damping over SMoE's"
            ),
        },
    ),
)
