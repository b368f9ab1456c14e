"""What the training loop costs."""

from collections.abc import Mapping

import xarray as xr

from hpcjax import perf
from hpcjax.runs.tables import Claim, Runs, Table, Tier


def _overhead(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    run = rows["all"].isel(seed=0, drop=True)
    return perf.ratio_table(run.assign_attrs(baseline="bare"))


OVERHEAD = Table(
    id="loop/overhead",
    title="Time of a step inside the training loop and bare",
    paper="no paper: the bar that this project sets itself",
    caption=(
        "ResNet-20, 32x32, batch 128, SGD. Bare: jax.jit of gradient and update, one "
        "batch on the device. Loop: batches from the pipeline, metrics of every step "
        "fetched and recorded, the check for non-finite gradients."
    ),
    benchmark=True,
    columns={"milliseconds": "ms per step", "ratio": "ratio"},
    reduce=_overhead,
    tiers={
        "cpu": Tier(
            minutes=6.0,
            runs={"all": Runs(config="loop/overhead")},
            claims={
                "overhead": Claim(
                    relation="the loop costs at most 3 % of a bare step",
                    ours=lambda table: table["ratio"].sel(row="loop").item(),
                    at_most=1.03,
                )
            },
        )
    },
)
