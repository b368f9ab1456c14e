"""What the training loop costs."""

from typing import TYPE_CHECKING

from hpcjax.runs import reduce
from hpcjax.runs.pictures import Dots
from hpcjax.runs.tables import Runs, Table, on_cpu

if TYPE_CHECKING:
    import xarray as xr


def _overhead(rows: reduce.Rows) -> "xr.Dataset":
    return reduce.ratios(reduce.single(rows)["seconds"], "bare")


OVERHEAD = Table(
    id="loop/overhead",
    title="Time of a step inside the training loop and bare",
    paper="no paper: the bar that this project sets itself",
    caption=(
        "ResNet-20, 32x32, batch 128, SGD. Bare: jax.jit of gradient and update, one "
        "batch on the device. Loop: batches from the pipeline, metrics of every step "
        "fetched and recorded, the check for non-finite gradients. Larger batch: 136 "
        "images, the negative control."
    ),
    benchmark=True,
    shows=(
        "The same step was timed inside the training loop and bare. Left of the line "
        "the loop costs at most 3 %."
    ),
    picture=Dots("ratio", bound="overhead", label="time of a step / bare"),
    columns={"milliseconds": "ms per step", "ratio": "ratio"},
    reduce=_overhead,
    tiers=on_cpu(
        minutes=6.0,
        runs={"all": Runs(config="loop/overhead")},
        claims={
            "overhead": reduce.cell("ratio", "loop")
            .at_most(1.03, "the loop costs at most 3 % of a bare step")
            .fails({"loop": "bare, larger batch"})
        },
    ),
)


def _safety(rows: reduce.Rows) -> "xr.Dataset":
    import xarray as xr

    run = reduce.single(rows)
    baselines = {"check": "unchecked", "save": "steps"}
    tables = [reduce.ratios(run[name], base) for name, base in baselines.items()]
    return xr.concat(tables, dim="row")


SAFETY = Table(
    id="loop/safety",
    title="Time of a step with the check for finite numbers, and with checkpoints",
    paper="no paper: the bars that this project sets itself",
    caption=(
        "ResNet-20, 32x32, batch 128, SGD. checked: relative to the same step without "
        "the check; check alone: a program of nothing else, relative to that step; "
        "larger batch: 136 images without the check, the negative control. "
        "saving: a checkpoint every 100 steps, written in the background; what one "
        "save and its writing add is spread over 100 steps."
    ),
    benchmark=True,
    shows=(
        "Steps were timed with a check for finite numbers, and with checkpoints. Left "
        "of the line the check costs at most 3 %."
    ),
    picture=Dots(
        "ratio",
        rows=("checked", "steps", "saving"),
        bound="check",
        label="time of a step / without",
    ),
    columns={"milliseconds": "ms per step", "ratio": "ratio"},
    reduce=_safety,
    tiers=on_cpu(
        minutes=4.0,
        runs={"all": Runs(config="loop/safety")},
        claims={
            "check": reduce.cell("ratio", "checked")
            .at_most(1.03, "a step with the check takes at most 3 % longer")
            .fails({"checked": "unchecked, larger batch"}),
            "alone": reduce.cell("ratio", "check alone")
            .at_most(0.01, "the check alone takes at most 1 % of a step")
            .fails({"check alone": "unchecked"}),
            "save": reduce.cell("ratio", "saving")
            .at_most(1.02, "a checkpoint every 100 steps costs at most 2 %")
            .fails({"saving": "unchecked, larger batch"}),
        },
    ),
)
