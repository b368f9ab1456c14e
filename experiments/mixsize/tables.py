"""Tables of training with mixed image sizes."""

from typing import TYPE_CHECKING, Any

import numpy as np

from experiments.mixsize.sizes import STATISTICS
from hpcjax.runs import reduce
from hpcjax.runs.pictures import Bars, Scatter
from hpcjax.runs.reduce import Cells, cell, figure, of_columns, over
from hpcjax.runs.tables import Runs, Table, by_model, on_cpu

if TYPE_CHECKING:
    import xarray as xr

PAPER = "Hoffer et al., Mix & Match, 2019 (arXiv 1908.08986)"
SEEDS = (0, 1, 2)
BASE = 16
FIXED, B, D, HALF = "fixed", "B+", "D+", "half"


def fashion(rows: reduce.Rows) -> "xr.Dataset":
    """Returns accuracies by test size and statistics, mean and range over seeds."""
    found: dict[str, dict] = {}
    for name, run in rows.items():
        for size in run["test_size"].values.tolist():
            own = run.sel(test_size=size)
            cells: dict[str, Any] = {
                "megaflops": own["flops"].isel(seed=0) / 1e6,
                "work": own["work"].isel(seed=0),
            }
            for each in STATISTICS:
                accuracy = own["accuracy"].sel(statistics=each)
                cells |= reduce.extent(accuracy, each)
            peer = rows[FIXED]["accuracy"].sel(test_size=size, statistics="calibrated")
            cells["fixed"] = float(peer.mean(skipna=False))
            if size == BASE:
                cells |= _pair(own["right"], rows[FIXED]["right"])
            found[f"{name}, {size} px"] = cells
    return reduce.from_cells(found)


def _pair(right: "xr.DataArray", other: "xr.DataArray") -> Cells:
    """Returns points above the other on the same images, with a 95 % interval."""
    apart = 100 * (right.values - other.values).ravel()
    mean, reach = apart.mean(), 1.96 * apart.std() / np.sqrt(apart.size)
    return {"paired": mean, "paired_low": mean - reach, "paired_high": mean + reach}


def _gain(row: str) -> reduce.Number:
    return cell("calibrated", row) - cell("trained", row)


def _runs(variant: str) -> Runs:
    return Runs(config=f"mixsize/fashion:{variant}", seeds=SEEDS)


_AS_TRAINED, _ELSEWHERE = {"calibrated": "trained"}, {"calibrated": "elsewhere"}
_SMALL = f"{B}, 8 px"

FASHION = Table(
    id="mixsize/fashion",
    title="Accuracy by test size, trained on one size and on several",
    paper=f"{PAPER}: accuracy of ResNet-44 and ResNet-50 by test size",
    caption=(
        "Fashion-MNIST, 4,000 images to train, 2,000 to test, ResNet-8 of width 8, 20 "
        "epochs, batch 64 at 16 px; mean [range] of three seeds. fixed: 16 px; B+, D+: "
        "16 and 12 px 30 %, 8 and 24 px 20 %; half: 16 px 20 %, 12 px 50 %, 8 px 30 %, "
        "B+. calibrated: batch norms have statistics of ten training batches at the "
        "test size, at 16 px: of 16 px. paired: points above fixed at 16 px, on the "
        "same images, with its 95 % interval."
    ),
    shows=(
        "Networks were trained on 16 px or on several sizes, and tested on five. "
        "Further left is cheaper, further up more accurate."
    ),
    picture=Scatter("megaflops", "calibrated", by=", ", front=("least", "most")),
    columns={
        "trained": "as trained, %",
        "calibrated": "calibrated, %",
        "elsewhere": "calibrated at 16 px, %",
        "paired": "above fixed, points",
        "megaflops": "MFLOP an image",
        "work": "pixels of an epoch / fixed's",
    },
    reduce=fashion,
    tiers=on_cpu(
        minutes=8.0,
        runs={
            FIXED: _runs("fixed"),
            B: _runs("bplus"),
            D: _runs("dplus"),
            HALF: _runs("half"),
        },
        claims={
            "small images": (cell("calibrated", _SMALL) - cell("fixed", _SMALL))
            .at_least(15.0, "points of B+ above fixed at 8 px, both calibrated")
            .fails(columns=_AS_TRAINED)
            .fails(columns=_ELSEWHERE),
            "calibration": _gain(_SMALL)
            .at_least(20.0, "points that calibration adds to B+ at 8 px")
            .fails(columns=_ELSEWHERE),
            "calibration of fixed": _gain(f"{FIXED}, 24 px")
            .at_least(2.0, "points that calibration adds to fixed at 24 px")
            .fails(columns=_ELSEWHERE),
            "own size": abs(_gain(f"{FIXED}, {BASE} px"))
            .at_most(1.0, "points that calibration changes of fixed at its own size")
            .fails({f"{FIXED}, {BASE} px": f"{FIXED}, 8 px"}),
            "work": abs(over("work", _SMALL, f"{FIXED}, 8 px") - 1)
            .at_most(0.06, "how far the pixels of B+'s epoch are from fixed's, a share")
            .fails({_SMALL: f"{D}, 8 px"}),
        },
    ),
)


def _counted(mode: str, steps: int, pixels: float, other: str) -> dict:
    row, wrong = f"CIFAR, {mode}", {f"CIFAR, {mode}": f"CIFAR, {other}"}
    return {
        f"steps of {mode}": abs(cell("steps", row) - float(steps))
        .at_most(0.0, f"steps of an epoch of {mode}, away from {steps}")
        .fails(wrong),
        f"pixels of {mode}": abs(cell("pixels", row) - pixels)
        .at_most(0.0006, f"pixels of {mode} over the base's, away from {pixels}")
        .fails(wrong),
    }


WORK = Table(
    id="mixsize/work",
    title="Steps and pixels of an epoch of the paper's regimes",
    paper=f"{PAPER}: the regimes of its published code",
    caption=(
        "CIFAR: 50,000 images, batch 64 at 32 px, also 48, 24 and 16. ImageNet: "
        "1,281,167, batch 256 at 224 px, 128 to 320; small: 96 to 256. pixels: of an "
        "epoch over those of the base size. apart: the most that a step's pixels are "
        "from the base's; of B+ they are rounded, of D+ and B+D+ the rule itself."
    ),
    shows=(
        "Pixels of an epoch of mixed sizes were counted, over those of the base size. "
        "B+ keeps the work of a step, D+ does more of it."
    ),
    picture=Bars("pixels", by=", "),
    columns={
        "steps": "steps",
        "pixels": "pixels / base's",
        "apart": "a step apart, share",
    },
    reduce=of_columns(
        {name: figure(name) for name in ("steps", "pixels", "apart")}, dim="mode"
    ),
    tiers=by_model(
        minutes=0.2,
        runs={
            "CIFAR": Runs(config="mixsize/work:cifar"),
            "ImageNet": Runs(config="mixsize/work:imagenet"),
            "ImageNet small": Runs(config="mixsize/work:small"),
        },
        claims={
            **_counted("B+", 761, 0.968, "D+"),
            **_counted("D+", 981, 1.286, "B+"),
            **{
                f"a step of B+, {name}": cell("apart", f"{name}, B+")
                .at_most(
                    0.02, f"a step of {name} in B+ from the base's pixels, a share"
                )
                .fails({f"{name}, B+": f"{name}, D+"})
                for name in ("CIFAR", "ImageNet")
            },
        },
    ),
)
