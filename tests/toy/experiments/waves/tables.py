"""A stencil learns to move waves if it sees their neighbours."""

from hpcjax.runs import reduce
from hpcjax.runs.tables import Runs, Table, on_cpu


@reduce.by_row
def errors(run):
    """Returns the last validation's loss."""
    return reduce.extent(run["val_loss"].isel(eval_step=-1), "loss")


STENCILS = Table(
    id="waves/stencils",
    title="Error of a forecast",
    paper="none: a toy",
    columns={"loss": "squared error"},
    reduce=errors,
    tiers=on_cpu(
        minutes=0.2,
        runs={
            "three": Runs(config="waves/move:three"),
            "one": Runs(config="waves/move:one"),
        },
        claims={
            "sees": reduce.cell("loss", "three")
            .at_most(0.05, "error of a stencil of three")
            .fails({"three": "one"})
        },
    ),
)
