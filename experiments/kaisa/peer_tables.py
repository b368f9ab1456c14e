"""The table that compares our K-FAC with kfac-jax."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpcjax.runs import reduce
from hpcjax.runs.tables import Claim, Table, grid, on_cpu

if TYPE_CHECKING:
    import xarray as xr

_RUNS = grid(
    "kaisa/kfac_jax:{0}",
    {"mlp": {}, "conv": {}},
    {method: {"method": method} for method in ("eigen", "inverse")},
    {fisher: {"fisher": fisher} for fisher in ("empirical", "exact")},
)


def _table(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns differences, and our step's time over kfac-jax's, a row for each run."""
    import xarray as xr

    made = []
    for row in map(reduce.first, rows.values()):
        timed = reduce.ratios(row["seconds"], "kfac-jax")
        plain = timed.sel(row="hpcjax", drop=True)
        checked = timed.sel(row="hpcjax, checked", drop=True).drop_vars("milliseconds")
        checked = checked.rename({name: f"checked_{name}" for name in checked})
        difference = row["difference"].to_dataset("quantity")
        peer = timed["ratio"].sel(row="kfac-jax", drop=True).rename("peer")
        made.append(xr.merge([difference, plain, checked, peer]))
    return xr.concat(made, dim="row").assign_coords(row=list(rows))


def _faster(problem: str, what: str) -> Claim:
    claim = reduce.most("ratio", problem).at_most(
        0.8, f"our step on {what} takes at most 0.8 of kfac-jax's, in every row"
    )
    return claim.fails(columns={"ratio": "peer"})


KFAC_JAX = Table(
    id="kaisa/kfac-jax",
    title="Our K-FAC beside kfac-jax 0.0.8: the same matrices, and a step's time",
    paper="no paper: the peer and the bars that this project sets itself",
    caption=(
        "784-256-128-10, and three 3x3 convolutions of stride 2 with a dense layer, "
        "tanh, batch 128, float32; kfac-jax with jax 0.9.0 in a process of its own "
        "(`make .cache/peers/kfac-jax`). Differences are relative in norm, the largest "
        "of all layers, after kfac-jax's conventions are taken out: T outside a "
        "convolution's A, 1/N in an empirical G. change: of the parameters by 100 "
        "steps, momentum 0.9, factors every 10, one inversion. Ratios: blocks of 100 "
        "such steps in turns; checked: with the loop's check for finite numbers, which "
        "kfac-jax does not make."
    ),
    benchmark=True,
    columns={
        "a": "A",
        "g": "G",
        "preconditioned": "preconditioned",
        "change": "change",
        "milliseconds": "our ms",
        "ratio": "ours / kfac-jax's",
        "checked_ratio": "checked / kfac-jax's",
    },
    reduce=_table,
    tiers=on_cpu(
        minutes=25.0,
        runs=_RUNS,
        claims={
            "agree": reduce.most("preconditioned")
            .at_most(1e-4, "preconditioned gradients differ by at most 1e-4")
            .fails(columns={"preconditioned": "raw"}),
            "same_steps": reduce.most("change")
            .at_most(1e-4, "100 steps change parameters by the same, to 1e-4")
            .fails(columns={"change": "one_more"}),
            "mlp": _faster("mlp", "the MLP"),
            "conv": _faster("conv", "the convolutions"),
        },
    ),
)
