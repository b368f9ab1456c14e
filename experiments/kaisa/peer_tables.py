"""The table that compares our K-FAC with kfac-jax."""

import itertools
from collections.abc import Mapping

import numpy as np
import xarray as xr

from hpcjax import perf
from hpcjax.runs.tables import Claim, Runs, Table, Tier

_WAYS = (("mlp", "conv"), ("eigen", "inverse"), ("empirical", "exact"))
_RUNS = {
    f"{problem}, {method}, {fisher}": Runs(
        config=f"kaisa/kfac_jax:{problem}",
        overrides={"method": method, "fisher": fisher},
    )
    for problem, method, fisher in itertools.product(*_WAYS)
}


def _table(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Returns differences, and our step's time over kfac-jax's, a row for each run."""
    made = []
    for row in rows.values():
        run = row.isel(seed=0, drop=True)
        timed = run[["seconds"]].assign_attrs(baseline="kfac-jax")
        ratio = perf.ratio_table(timed).sel(row="hpcjax", drop=True)
        made.append(xr.merge([run["difference"].to_dataset("quantity"), ratio]))
    return xr.concat(made, dim="row").assign_coords(row=list(rows))


def _worst(column: str, table: xr.Dataset) -> float:
    return float(np.max(table[column].values))  # NaN stays NaN


KFAC_JAX = Table(
    id="kaisa/kfac-jax",
    title="Our K-FAC beside kfac-jax 0.0.8: the same matrices, and a step's time",
    paper="no paper: the peer and the bars that this project sets itself",
    caption=(
        "784-256-128-10 and three 3x3 convolutions of stride 2 with a dense layer, "
        "batch 128, float32; kfac-jax in a process of its own with jax 0.9.0, from "
        "`make .cache/peers/kfac-jax`. Differences relative in norm, the largest of "
        "all layers, after its conventions are taken out: T outside a convolution's A, "
        "1/N in an empirical G. change: of the parameters over 100 steps of momentum "
        "0.9, factors every 10, one inversion. ratio: ours over theirs, blocks of 100 "
        "such steps in turns."
    ),
    benchmark=True,
    columns={
        "a": "A",
        "g": "G",
        "preconditioned": "preconditioned",
        "change": "change",
        "milliseconds": "our ms",
        "ratio": "step / kfac-jax's",
    },
    reduce=_table,
    tiers={
        "cpu": Tier(
            minutes=10.0,
            runs=_RUNS,
            claims={
                "agree": Claim(
                    relation="preconditioned gradients differ by at most 1e-4",
                    ours=lambda table: _worst("preconditioned", table),
                    at_most=1e-4,
                ),
                "faster": Claim(
                    relation="our step takes at most 0.8 of kfac-jax's, in every row",
                    ours=lambda table: _worst("ratio", table),
                    at_most=0.8,
                ),
            },
        )
    },
)
