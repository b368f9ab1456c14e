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


def _safety(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    run = rows["all"].isel(seed=0, drop=True)
    parts = [("check", "step", "unchecked"), ("save", "loop", "steps")]
    tables = [
        perf.ratio_table(
            run[name]
            .rename({dim: "candidate"})
            .to_dataset(name="seconds")
            .assign_attrs(baseline=baseline)
        )
        for name, dim, baseline in parts
    ]
    return xr.concat(tables, dim="row")


SAFETY = Table(
    id="loop/safety",
    title="Time of a step with the check for finite numbers, and with checkpoints",
    paper="no paper: the bars that this project sets itself",
    caption=(
        "ResNet-20, 32x32, batch 128, SGD. checked: relative to the same step without "
        "the check; check alone: a program of nothing else, relative to that step. "
        "saving: a checkpoint every 100 steps, written in the background; what one "
        "save and its writing add is spread over 100 steps."
    ),
    benchmark=True,
    columns={"milliseconds": "ms per step", "ratio": "ratio"},
    reduce=_safety,
    tiers={
        "cpu": Tier(
            minutes=4.0,
            runs={"all": Runs(config="loop/safety")},
            claims={
                "check": Claim(
                    relation="the check costs at most 1 % of a step",
                    ours=lambda table: table["ratio"].sel(row="check alone").item(),
                    at_most=0.01,
                ),
                "save": Claim(
                    relation="a checkpoint every 100 steps costs at most 2 %",
                    ours=lambda table: table["ratio"].sel(row="saving").item(),
                    at_most=1.02,
                ),
            },
        )
    },
)
