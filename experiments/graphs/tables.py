"""Tables of graph networks on Cora, sums over edges, and sampled neighbourhoods."""

from typing import TYPE_CHECKING

import numpy as np

from hpcjax.runs import reduce
from hpcjax.runs.pictures import Dots, Lines
from hpcjax.runs.reduce import Cells, above, cell, over
from hpcjax.runs.tables import Runs, Table, on_cpu

if TYPE_CHECKING:
    import xarray as xr

_SEEDS = (0, 1, 2, 3, 4)
_RECALLED = {"gcn": 81.5, "gat": 83.0, "sgc": 81.0}
_BLOCK = 256  # targets of a step of configs/graphs/minibatches.py
_TEN, _ONE, _WHOLE = "10 + 10 neighbours", "1 + 1", "whole graph"
_REGRESSION, _REWIRED = "regression of S²X", "gcn, rewired"


def _accuracy(run: "xr.Dataset") -> Cells:
    """Returns the accuracy in percent at the end, mean and range over seeds."""
    wrong = run["val_error"]
    last = wrong.isel(eval_step=-1) if "eval_step" in wrong.dims else wrong
    return reduce.extent(100 * (1 - last), "accuracy")


def cora(rows: reduce.Rows) -> "xr.Dataset":
    """Returns accuracies beside those that are recalled of the papers."""
    return reduce.from_cells(
        {
            name: {"recalled": _RECALLED.get(name, float("nan")), **_accuracy(run)}
            for name, run in rows.items()
        }
    )


def spread(rows: reduce.Rows) -> "xr.Dataset":
    """Returns times, ratios and distances of the candidates."""
    run = reduce.single(rows)
    table = reduce.ratios(run["seconds"], "BCOO")
    return table.assign(
        distance=("row", run["distance"].sel(candidate=table["row"].values).values)
    )


def sampled(rows: reduce.Rows) -> "xr.Dataset":
    """Returns edges and seconds of both samplers by depth and batch."""
    run = reduce.single(rows)
    found = {}
    for layers in run["layers"].values:
        for batch in run["batch"].values:
            own = run.sel(layers=layers, batch=batch)
            edges = own["edges"].mean("repetition")
            seconds = own["seconds"].median("repetition")
            dense, other = (edges.sel(sampler=s) for s in ("dense", "layerwise"))
            times = [seconds.sel(sampler=s) for s in ("dense", "layerwise")]
            found[_edges(layers, batch)] = {
                "dense": dense,
                "layerwise": other,
                "ratio": other / dense,
                "milliseconds": 1e3 * times[0],
                "slower": times[1] / times[0],
                "rate": batch / times[0],
            }
    return reduce.from_cells(found)


def minibatches(rows: reduce.Rows) -> "xr.Dataset":
    """Returns accuracy and time of a step, and memory where a program was read."""
    found = {}
    for name, row in rows.items():
        run = reduce.first(row)
        if "val_error" not in run:
            continue
        took = float(np.median(np.diff(run["seconds"].values)))
        found[name] = {
            **_accuracy(row),
            "milliseconds": 1e3 * took,
            "rate": _BLOCK / took,
            "shapes": run.get("shapes", np.nan),
        }
        if program := rows.get(f"{name}, program"):
            found[name]["megabytes"] = reduce.first(program)["temporaries"] / 1e6
    return reduce.from_cells(found)


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


def _edges(layers: int, batch: int) -> str:
    return f"{layers} layer{'' if layers == 1 else 's'}, batch {batch}"


SAMPLED = Table(
    id="graphs/sampled",
    title="Edges sampled for a batch: layer-wise over DENSE",
    paper="Waleffe et al., MariusGNN, EuroSys 2023: a vertex is sampled once",
    caption=(
        "WordNet, 117,659 sets of synonyms and 570,696 directed edges, pointers in "
        "both directions, at most 20 neighbours of a vertex. Mean edges of five "
        "batches of random targets, the same for both samplers, median times. "
        "Layer-wise: each layer samples all that it computes anew, as loaders commonly "
        "do. rate: targets a second of DENSE, sampling alone, in one thread."
    ),
    shows=(
        "Neighbours of a batch were sampled for three layers, with and without sharing "
        "them between layers. Compare the lines: fewer edges are less work."
    ),
    picture=Lines(
        "batch {}", ("dense", "layerwise"), log=True, label="edges", x_label="targets"
    ),
    columns={
        "dense": "edges, DENSE",
        "layerwise": "edges, layer-wise",
        "ratio": "over DENSE's edges",
        "milliseconds": "DENSE, ms",
        "slower": "over DENSE's time",
        "rate": "targets/s",
    },
    reduce=sampled,
    tiers=on_cpu(
        minutes=2.0,
        runs={"WordNet": Runs(config="graphs/sampled")},
        claims={
            f"fewer edges, {batch} targets": cell("ratio", _edges(3, batch))
            .at_least(bound, f"edges of three layers over DENSE's, {batch} targets")
            .fails({_edges(3, batch): _edges(1, batch)})
            for batch, bound in ((1000, 1.28), (5000, 1.40))
        }
        | {
            "the deeper the more": above("ratio", _edges(3, 1000), _edges(2, 1000))
            .at_least(0.05, "that ratio of three layers above that of two")
            .fails({_edges(3, 1000): _edges(2, 1000)})
        },
    ),
)


MINIBATCHES = Table(
    id="graphs/minibatches",
    title="GraphSAGE on sampled neighbourhoods and on the whole graph",
    paper="no paper's table",
    caption=(
        "A drawn graph, 10,000 vertices of ten classes with a long tail of degrees, 25 "
        "in the mean; two layers, width 64, 120 steps of 256 targets, accuracy on the "
        "test part with neighbourhoods of as many neighbours. Features alone: a "
        "network that sees no edge. ms: median of a step, sampling in a thread "
        "beside it. Megabytes: the compiled step's temporaries."
    ),
    shows=(
        "A graph network was trained on sampled neighbourhoods and on the whole graph. "
        "On the left further right is more accurate, on the right further left faster."
    ),
    picture=Dots(("accuracy", "milliseconds")),
    columns={
        "accuracy": "test accuracy, %",
        "milliseconds": "step, ms",
        "rate": "targets/s",
        "megabytes": "temporaries, MB",
        "shapes": "shapes compiled",
    },
    reduce=minibatches,
    tiers=on_cpu(
        minutes=4.0,
        runs={
            _TEN: Runs(config="graphs/minibatches:dense"),
            f"{_TEN}, layer-wise": Runs(config="graphs/minibatches:layerwise"),
            _ONE: Runs(config="graphs/minibatches:single"),
            _WHOLE: Runs(config="graphs/minibatches:whole"),
            "features alone": Runs(config="graphs/minibatches:alone"),
            f"{_TEN}, program": Runs(config="graphs/memory"),
            f"{_WHOLE}, program": Runs(config="graphs/memory:whole"),
        },
        claims={
            "as the whole graph": above("accuracy", _WHOLE, _TEN)
            .at_most(1.0, "points of the whole graph above sampled neighbourhoods")
            .fails({_TEN: _ONE}),
            "in less time": over("milliseconds", _TEN, _WHOLE)
            .at_most(0.5, "a step's time over that of the whole graph")
            .fails({_TEN: _WHOLE}),
            "in less memory": over("megabytes", _TEN, _WHOLE)
            .at_most(0.5, "a step's temporaries over those of the whole graph")
            .fails({_TEN: _WHOLE}),
        },
    ),
)
