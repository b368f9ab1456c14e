"""Tables of post-processing: baselines on simulated forecasts, EMOS of real rain."""

import math
from typing import TYPE_CHECKING

from hpcjax.runs import reduce
from hpcjax.runs.pictures import Dots
from hpcjax.runs.reduce import Cells, above, cell, over
from hpcjax.runs.tables import Runs, Table, on_cpu

if TYPE_CHECKING:
    import xarray as xr

PAPER = "ENS-10, NeurIPS 2022"
ROWS = {
    "raw": "raw",
    **{"EMOS": "emos", "EMOS, per point": "emos_point", "MLP": "mlp"},
    **{"LeNet-like": "lenet", "U-Net": "unet"},
}
SEEDS = (0, 1, 2)


def _cells(run: "xr.Dataset", members: int, *, raw: bool) -> Cells:
    """Returns the scores of the last validation, over seeds."""
    last = run.isel(eval_step=-1)
    ratio = (last["val_variance"] / last["val_square"]) ** 0.5
    if raw:
        # From M to M − 1, and what a mean of M members is wrong by of its own.
        ratio = ratio * math.sqrt((members + 1) / (members - 1))
    return {
        **reduce.interval(last["val_loss"], "crps"),
        **reduce.interval(last["val_eecrps"], "eecrps"),
        "ssr": ratio.median(skipna=False),
    }


def baselines(rows: reduce.Rows) -> "xr.Dataset":
    """Returns CRPS and EECRPS, medians over seeds, and what part of raw they are."""
    cells = {
        name: _cells(run, 5 if name.endswith("5 members") else 10, raw="raw" in name)
        for name, run in rows.items()
    }
    table = reduce.from_cells(cells)
    bases = [
        "raw, 5 members" if name.endswith("5 members") else "raw, 10 members"
        for name in table["row"].values.tolist()
    ]
    for column in ("crps", "eecrps"):
        raw = table[column].sel(row=bases).values
        table[f"{column}_part"] = 100 * table[column] / raw
    return table


def _runs() -> dict[str, Runs]:
    runs = {}
    for members in (5, 10):
        for row, variant in ROWS.items():
            runs[f"{row}, {members} members"] = Runs(
                config=f"ens10/baselines:{variant}",
                overrides={"dataset.members": str(members)},
                seeds=(0,) if variant == "raw" else SEEDS,
            )
    for row, variant in (("Transformer", "transformer"), ("shuffled", "shuffled")):
        config = f"ens10/baselines:{variant}"
        name = "U-Net, truth of other dates" if variant == "shuffled" else row
        runs[f"{name}, 10 members"] = Runs(config=config, seeds=SEEDS)
    return runs


_RUNS = _runs()
_TRAINED = [name for name in _RUNS if "raw" not in name and "truth" not in name]
_RAW, _EMOS = "raw, 10 members", "EMOS, 10 members"
_POINT, _UNET = "EMOS, per point, 10 members", "U-Net, 10 members"
_SHUFFLED = "U-Net, truth of other dates, 10 members"
BASELINES = Table(
    id="ens10/baselines",
    title="Post-processing of five and ten members: CRPS on test dates",
    paper=f"{PAPER}, the table of global means: T850",
    recalled={
        "raw, 10 members": "0.719",
        "EMOS, 10 members": "0.756",
        "MLP, 10 members": "0.684",
        "LeNet-like, 10 members": "0.674",
        "U-Net, 10 members": "0.669",
        "Transformer, 10 members": "0.686",
    },
    caption=(
        "Temperature at 850 hPa of a simulated dry atmosphere (T21, 72 hours), not of "
        "the 5 TB of ENS-10. 84 dates train; 40 test, on which rates and steps were "
        "set with seed 0. CRPS of the predicted Gaussian in K, a plain mean over "
        "points, as in the paper; EECRPS with the exact EFI. Medians of three seeds "
        "[90 % interval]; networks are narrower than the paper's. SSR: predicted "
        "deviation over the mean's RMSE."
    ),
    shows=(
        "Ensemble forecasts of temperature were corrected by regression and by "
        "networks. Further left is better: left of the line the error is less than 98 "
        "% of the raw ensemble's."
    ),
    picture=Dots(
        "crps_part",
        rows=("raw", "EMOS", "MLP", "LeNet", "Net, 5", "Net, 10", "Transformer"),
        bound="trained",
        sort=True,
    ),
    columns={
        "crps": "CRPS, K",
        "crps_part": "CRPS, % of raw",
        "eecrps": "EECRPS, K",
        "eecrps_part": "EECRPS, % of raw",
        "ssr": "SSR",
    },
    reduce=baselines,
    tiers=on_cpu(
        minutes=10.0,
        runs=_RUNS,
        claims={
            "trained": reduce.most("crps_part", *_TRAINED)
            .at_most(98.0, "percent of raw's CRPS, the worst of the trained rows")
            .fails({_UNET: _SHUFFLED}, {_UNET: _RAW}),
            "MLP": cell("crps_part", "MLP, 10 members")
            .at_most(85.0, "percent of raw's CRPS, the MLP's")
            .fails({"MLP, 10 members": _EMOS}),
            "places": over("crps", _POINT, _EMOS)
            .at_most(0.97, "EMOS of each point over that of all")
            .fails({_POINT: _EMOS}),
            "space": over("crps", _UNET, _POINT)
            .at_most(0.999, "the U-Net's CRPS over that of EMOS of each point")
            .fails({_UNET: "MLP, 10 members"}),
            "extremes": cell("eecrps_part", _UNET)
            .at_most(95.0, "percent of raw's EECRPS, the U-Net's")
            .fails({_UNET: _SHUFFLED}, {_UNET: _RAW}),
            "members": above("crps", _UNET, "U-Net, 5 members")
            .at_most(0.005, "K by which the U-Net's CRPS of ten is above that of five")
            .fails({_UNET: _EMOS}),
            "raw's spread": cell("ssr", _RAW)
            .at_most(0.6, "spread over skill of the raw ensemble")
            .fails({_RAW: _EMOS}),
            "spread": abs(reduce.least("ssr", *_TRAINED) - 1.0)
            .at_most(0.15, "distance of 1 from the least SSR of the trained rows")
            .fails({_EMOS: _RAW}),
        },
    ),
)


@reduce.by_row
def rain(run: "xr.Dataset") -> Cells:
    """Returns the CRPS of test days, over seeds."""
    last = run.isel(eval_step=-1)
    return reduce.extent(last["val_loss"], "crps")


RAIN = Table(
    id="ens10/rain",
    title="EMOS of rain at Innsbruck, 2010 to 2013",
    paper="Gneiting et al. 2005, the method; no figure of these data is known",
    caption=(
        "Real: sums of 3 days, reforecasts of 11 members (crch's RainIbk), √mm; fit to "
        "2000 to 2009 by CRPS, 1,347 days of test. Means of three starts, drawn around "
        "the raw ensemble, [least, most]."
    ),
    shows=(
        "Forecasts of rain at Innsbruck were corrected by EMOS, a regression. Further "
        "left is better: EMOS should lie left of the climate, and the climate left of "
        "the raw forecasts."
    ),
    picture=Dots("crps", sort=True),
    columns={"crps": "CRPS, √mm"},
    reduce=rain,
    tiers=on_cpu(
        minutes=1.0,
        runs={
            "raw": Runs(config="ens10/rain:raw"),
            "climatology": Runs(config="ens10/rain:climatology", seeds=SEEDS),
            "EMOS": Runs(config="ens10/rain:emos", seeds=SEEDS),
            "EMOS, 20 steps": Runs(config="ens10/rain:brief", seeds=SEEDS),
        },
        claims={
            "EMOS": abs(cell("crps", "EMOS") - 0.93)
            .at_most(0.01, "√mm from 0.93, the CRPS of EMOS")
            .fails({"EMOS": "climatology"}),
            "starts": (cell("crps_high", "EMOS") - cell("crps_low", "EMOS"))
            .at_most(0.002, "√mm between the best and the worst of three starts")
            .fails({"EMOS": "EMOS, 20 steps"}),
            "climatology": over("crps", "EMOS", "climatology")
            .at_most(0.9, "EMOS over the climate")
            .fails({"EMOS": "raw"}),
            "raw": over("crps", "climatology", "raw")
            .at_most(0.9, "the climate over the raw ensemble")
            .fails({"climatology": "raw"}),
        },
    ),
)
