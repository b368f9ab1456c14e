"""Tables of graph networks on Cora, and of sums over edges."""

import xarray as xr

from hpcjax.runs import reduce
from hpcjax.runs.pictures import Dots
from hpcjax.runs.reduce import Cells, above, cell
from hpcjax.runs.tables import Runs, Table, on_cpu

_SEEDS = (0, 1, 2, 3, 4)
_RECALLED = {"gcn": 81.5, "gat": 83.0, "sgc": 81.0}
_REGRESSION, _REWIRED = "regression of S²X", "gcn, rewired"


def _accuracy(run: xr.Dataset) -> Cells:
    """Returns the accuracy in percent at the end, mean and range over seeds."""
    wrong = run["val_error"]
    last = wrong.isel(eval_step=-1) if "eval_step" in wrong.dims else wrong
    return reduce.extent(100 * (1 - last), "accuracy")


def cora(rows: reduce.Rows) -> xr.Dataset:
    """Returns accuracies beside those that are recalled of the papers."""
    return reduce.from_cells(
        {
            name: {"recalled": _RECALLED.get(name, float("nan")), **_accuracy(run)}
            for name, run in rows.items()
        }
    )


def spread(rows: reduce.Rows) -> xr.Dataset:
    """Returns times, ratios and distances of the candidates."""
    run = reduce.single(rows)
    table = reduce.ratios(run["seconds"], "BCOO")
    return table.assign(
        distance=("row", run["distance"].sel(candidate=table["row"].values).values)
    )


def _runs(name: str) -> Runs:
    own = {"dataset.holdout": "test"}
    return Runs(config=f"graphs/{name}", overrides=own, seeds=_SEEDS)


def _peer(name: str) -> Runs:
    own = {"dataset.holdout": "test"}
    return Runs(config=f"graphs/peers:{name}", overrides=own)


CORA = Table(
    id="graphs/cora",
    title="Graph networks on Cora's public split: test accuracy",
    paper=(
        "Kipf and Welling 2017, Veličković et al. 2018, Wu et al. 2019; their figures "
        "are recalled"
    ),
    caption=(
        "140 papers with labels, 1,000 of test, after 200 steps, mean and range of "
        "five seeds. Rates and penalties are the papers' or the best of a few on the "
        "validation part, with other seeds. mlp sees words and no citation; rewired: "
        "who is cited is shuffled, all degrees kept. Peers: "
        "label propagation, and scikit-learn's logistic regression of S²X, which is "
        "what SGC is."
    ),
    shows=(
        "Graph networks learnt the subjects of Cora's papers. Right of the line is "
        "what is claimed of GCN; networks of words alone, or of rewired citations, are "
        "the controls."
    ),
    picture=Dots("accuracy", bound="gcn", sort=True),
    columns={
        "accuracy": "test accuracy, %",
        "recalled": "of the paper, % (recalled)",
    },
    reduce=cora,
    tiers=on_cpu(
        minutes=7.0,
        runs={
            **{
                name: _runs(f"cora:{name}")
                for name in ("gcn", "gat", "sage", "gin", "sgc", "mlp")
            },
            "label propagation": _peer("propagation"),
            _REGRESSION: _peer("base"),
            _REWIRED: _runs("cora:rewired"),
        },
        claims={
            "gcn": cell("accuracy", "gcn")
            .at_least(80.0, "test accuracy of GCN, %")
            .fails({"gcn": "mlp"}),
            "gat": cell("accuracy", "gat")
            .at_least(80.5, "test accuracy of GAT, %")
            .fails({"gat": "mlp"}),
            "sgc": cell("accuracy", "sgc")
            .at_least(79.5, "test accuracy of SGC, %")
            .fails({"sgc": "mlp"}),
            "citations help": above("accuracy", "gcn", "mlp")
            .at_least(15.0, "points of GCN above a network of words alone")
            .fails({"gcn": _REWIRED}),
            "sgc is a regression": abs(above("accuracy", "sgc", _REGRESSION))
            .at_most(1.5, "points between SGC and the regression of S²X")
            .fails({"sgc": "mlp"}),
            "which, not how many": above("accuracy", _REWIRED, "mlp")
            .at_most(5.0, "points of GCN on rewired citations above words alone")
            .fails({_REWIRED: "gcn"}),
        },
    ),
)


SPREAD = Table(
    id="graphs/spread",
    title="Sums of what vertices receive: seconds over those of a sparse matrix",
    paper="no paper's table",
    caption=(
        "60,000 vertices, 300,000 edges, a long tail of in-degrees, 64 features, "
        "float32. segments: graphs.spread, sums over sorted receivers; BCOO: the "
        "product of jax.experimental.sparse; shuffled edges: sums over receivers in no "
        "order; cumulative sums: their differences. Distance: from float64, over the "
        "largest sum. Ratio: to BCOO in the same round, median with its 95 % interval."
    ),
    shows=(
        "Sums over a graph's neighbours were computed by segments and by a sparse "
        "matrix. Left of the line is about as fast; on the right, how far from exact."
    ),
    picture=Dots(("ratio", "distance"), bound="as fast as a matrix"),
    columns={
        "milliseconds": "ms",
        "ratio": "over BCOO's time",
        "distance": "largest relative distance",
    },
    reduce=spread,
    benchmark=True,
    tiers=on_cpu(
        minutes=0.5,
        runs={"graphs": Runs(config="graphs/spread")},
        claims={
            "as fast as a matrix": cell("ratio", "segments")
            .at_most(1.2, "segments' time over BCOO's")
            .fails({"segments": "cumulative sums"}),
            "exact": cell("distance", "segments")
            .at_most(1e-6, "segments' distance from float64")
            .fails({"segments": "cumulative sums"}),
        },
    ),
)
