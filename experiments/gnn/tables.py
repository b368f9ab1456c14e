"""Tables of graph networks: what their layers cost, and what their parts exchange."""

import textwrap
from typing import TYPE_CHECKING, Any

from experiments.gnn.exchanges import GRAPHS, METHODS, PEERS, SCHEMES, UNTOLD
from experiments.gnn.names import (
    BY_EDGE,
    DENSE,
    HOPS,
    KERNELS,
    KINDS,
    LOCAL,
    LOGS,
    NAMES,
    NO_RETURN,
    ONCE,
    ONE_BY_ONE,
    OWN,
    POOLED,
    REPEATED,
    STEPS,
    TERMS,
    UNMOVED,
    WAYS,
    WIDER,
)
from hpcjax.runs import reduce
from hpcjax.runs.pictures import Bars, Dots
from hpcjax.runs.reduce import above, cell, least, most, of, over
from hpcjax.runs.tables import Runs, Table, by_model, on_cpu

if TYPE_CHECKING:
    import numpy as np
    import xarray as xr

_OF_EDGES = "edge_conv", POOLED
_PROJECTED = [name for name in OWN if name not in (*_OF_EDGES, *REPEATED)]


def work_depth(rows: reduce.Rows) -> "xr.Dataset":
    """Returns the fitted coefficients, and how far fits are off, by layer."""
    run = reduce.single(rows)
    found = {}
    for name in NAMES:
        own = run.sel(model=name)
        found[name] = {
            **{term: own["work"].sel(term=term).round(3) for term in TERMS},
            "off": (100 * own["work_off"]).round(3),
            **{f"steps {log}": own["depth"].sel(log=log).round(3) for log in LOGS},
            "steps": own["depth_off"].round(3),
            "backward": own["backward"],
            "compiled": own["compiled"],
        }
        if name in (*REPEATED, ONCE):
            for term in ("mk", "nk²"):
                found[name][f"each {term}"] = own["each"].sel(term=term).round(3)
            for log in LOGS[:2]:
                found[name][f"each {log}"] = own["each_depth"].sel(log=log).round(3)
    for name in run["start"].values:
        found.setdefault(str(name), {})["distance"] = run["distance"].sel(start=name)
    return reduce.from_cells(found)


WORK_DEPTH = Table(
    id="gnn/work-depth",
    title="Work and depth of graph layers, counted from their programs",
    paper=(
        "Besta and Hoefler, TPAMI 2023, its table of work and depth: O(mk + nk²) and "
        "O(log k + log d) of layers that project vertices first, O(mk²) of edge-conv"
    ),
    caption=(
        "n vertices, m edges, width k in and out, largest degree d; 30 shapes. A "
        "program's operators are counted, two operations for a multiplication and "
        "addition, one for an element that is gathered or added at its place. Work is "
        "fitted by coefficients that are not negative, depth by logarithms to base 2; "
        "worst: of the fits, the farthest. with gradients: work over a forward "
        "pass's; XLA's: over the operations of one compiled shape, which counts no "
        "gather and the body of a loop once. sgc: two hops; one head, one kernel, one "
        "stack; appnp: 10 steps. t: 1 to 4 hops, steps, layers, kernels or heads, "
        "drawn; t mk: of each. matrices: products with a sparse adjacency, two "
        "operations for an entry. from PPNP: over 0.9^t, at most."
    ),
    shows=(
        "The operations of layers of graph networks were counted in their programs. "
        "Long bars of mk² and nk² grow with the square of the width: those of mk² for "
        "every edge."
    ),
    picture=Bars(("mk", "mk²", "nk", "nk²"), label="operations", stacked=True),
    columns={
        "mk": "mk",
        "mk²": "mk²",
        "nk": "nk",
        "nk²": "nk²",
        "off": "worst, %",
        "steps log k": "log k",
        "steps log d": "log d",
        "steps log n": "log n",
        "steps": "worst, steps",
        "backward": "with gradients",
        "compiled": "XLA's",
        "distance": "from PPNP",
        "each mk": "t mk",
        "each nk²": "t nk²",
        "each log k": "t log k",
        "each log d": "t log d",
        "m": "m",
        "n": "n",
        "steps 1": "depth else",
    },
    reduce=work_depth,
    tiers=by_model(
        minutes=4.0,
        runs={"layers": Runs(config="gnn/work_depth")},
        claims={
            "work": most("off", *OWN)
            .at_most(1.0, "percent of the work that the formulas' terms miss, the most")
            .fails({"gcn": DENSE}),
            "vertices": most("mk²", *_PROJECTED)
            .at_most(0.01, "mk² of layers that project vertices first, the most")
            .fails({"gat": BY_EDGE}, {"gat": "edge_conv"}),
            "products": least("nk²", *_PROJECTED)
            .at_least(1.99, "nk² of layers that project vertices first, the least")
            .fails({"gat": BY_EDGE}, {"gat": "edge_conv"}),
            "movement": least("mk", *LOCAL)
            .at_least(1.99, "mk of layers in local form, the least")
            .fails({"sage": UNMOVED}),
            "loops": cell("mk", "appnp")
            .at_least(19.9, "mk of ten steps, two each")
            .fails({"appnp": ONCE}),
            "appnp": cell("distance", "appnp")
            .at_most(1.001, "distance of APPNP from PPNP over 0.9^t, the most")
            .fails({"appnp": NO_RETURN}),
            "edges": least("mk²", *_OF_EDGES)
            .at_least(1.0, "mk² of layers whose products are of edges, the least")
            .fails({"edge_conv": "gat"}, {POOLED: "sage"}),
            "hops": least("each mk", *REPEATED)
            .at_least(1.99, "mk of each of t hops, layers, kernels or heads, the least")
            .fails({STEPS: ONCE}),
            "wider": least("each nk²", *WIDER)
            .at_least(1.99, "nk² of each of t layers, kernels or heads, the least")
            .fails({KERNELS: HOPS}),
            "depth": most("steps", *OWN)
            .at_most(1.0, "steps that logarithms miss, the most")
            .fails({"gcn": ONE_BY_ONE}),
            "softmax": abs(above("steps log d", "gat", "sage") - 2)
            .at_most(0.01, "from the two log d that a softmax takes beside a mean")
            .fails({"gat": "gcn"}),
        },
    ),
)


PARTS = 2, 4, 8
MISSING = "digits, rcm, halo, one vertex missing"
RCM, BY_LABEL, HASH = (f"digits, {m}, halo" for m in ("rcm", METHODS[-1], "hash"))
BLOCKS = "digits, rcm, all_to_all"
PEER = f"digits, {UNTOLD}"
CUTS = [f"{g}, {m}, {s}" for g in GRAPHS for m in METHODS for s in SCHEMES]


def exchanges(rows: reduce.Rows) -> "xr.Dataset":
    """Returns a row for each graph, method and scheme, and for the compiler's."""
    run, control = (reduce.first(rows[name]) for name in ("exchanges", "missing"))
    found = {}
    for name in CUTS:
        graph, method, scheme = name.split(", ")
        found[name] = _cells(
            run.sel({"graph": graph, "method": method, "scheme": scheme})
        )
    for graph in GRAPHS:
        for peer in PEERS:
            own = run["compiler"].sel(graph=graph, peer=peer)
            found[f"{graph}, {peer}"] = _shares(own) | {
                "bytes": float(own.sel(parts=8))  # over the rows of an all-gather
            }
    at = {"graph": "digits", "method": "rcm", "scheme": "halo"}
    found[MISSING] = _cells(control.sel(at))
    return reduce.from_cells(found)


def _shares(own: "xr.DataArray") -> dict[str, float]:
    return {f"{parts}": float(own.sel(parts=parts)) for parts in own["parts"].values}


def _cells(own: "xr.Dataset") -> dict[str, float]:
    """Returns the figures of one method and scheme, the farthest of all parts."""
    ratio = own["sent"] / own["rule"]
    return {
        **_shares(own["passed"]),
        "bytes": float(ratio.values.flat[abs(ratio - 1).values.argmax()]),
        "missed": float(abs(own["missed"]).max()),
        "distance": float(own["distance"].max()),
        "cut": 100 * float(own["cut"].sel(parts=8)),
        "imbalance": float(own["imbalance"].sel(parts=8)),
    }


BYTES = Table(
    id="gnn/bytes",
    title="One graph over several devices: what boundary rows cost, by scheme",
    paper=(
        "Besta and Hoefler, TPAMI 2023, its graph partition parallelism: a device "
        "fetches boundary vertices only, never more than an all-gather of all"
    ),
    caption=(
        "A graph convolution of width 16 on 2, 4 and 8 simulated devices, a part of "
        "the vertices each; by features a slice of the columns of all, and products "
        "are reduce-scattered. 2, 4, 8: rows through links forward, over those of "
        "an all-gather without padding, n (p - 1); of rounds, p times their "
        "lengths. bytes: of the compiled collectives, forward and with slopes, over 4 "
        "k times the rows of the formulas, the farthest from 1. missed: remote "
        "neighbours, counted by hand, that tables lack. distance: of outputs and "
        "slopes from one device's. cut: edges between 8 parts. compiler: the whole "
        "graph's program with rows cut, as it is, and told to gather all rows; its "
        "bytes are over those of the all-gather, too."
    ),
    shows=(
        "A graph's vertices were shared out over eight devices, which exchange the "
        "rows of neighbours. Short bars send little, 1 as much as all rows to all."
    ),
    picture=Bars(("8",), label="rows over an all-gather's", by="digits, "),
    columns={
        "2": "2",
        "4": "4",
        "8": "8",
        "bytes": "bytes / rule",
        "missed": "missed",
        "distance": "distance",
        "cut": "cut, %",
        "imbalance": "largest / mean",
    },
    reduce=exchanges,
    tiers=on_cpu(
        minutes=4.0,
        devices=8,
        runs={
            "exchanges": Runs(config="gnn/exchanges"),
            "missing": Runs(config="gnn/exchanges:missing"),
        },
        claims={
            "bytes": abs(of("bytes", *CUTS) - 1)
            .largest()
            .at_most(0, "farthest ratio of compiled bytes to the formulas' from 1")
            .fails({RCM: PEER}, only=("bytes",)),
            "missed": most("missed", *CUTS)
            .at_most(0, "remote neighbours that tables lack, or have twice")
            .fails({RCM: MISSING}, only=("missed",)),
            "distance": most("distance", *CUTS)
            .at_most(1e-5, "farthest of outputs and slopes from one device's")
            .fails({RCM: MISSING}, only=("distance",)),
            "rcm": cell("8", RCM)
            .at_most(0.55, "rows of rounds over an all-gather's, 8 parts by rcm")
            .fails({RCM: BLOCKS}, {RCM: HASH}),
            "labels": cell("8", BY_LABEL)
            .at_most(0.30, "rows of rounds over an all-gather's, 8 by labels")
            .fails({BY_LABEL: RCM}, {BY_LABEL: HASH}),
        },
    ),
)


_SEEDS = 0, 1, 2, 3, 4
FRESH, NEVER, REGRESSION = "τ = 0", "never", "logistic regression"
STEPS = FRESH, "τ = 1", "τ = 2", "τ = 4"
_VARIANTS = dict(zip(STEPS, ("fresh", "one", "two", "four"), strict=True)) | {
    "random, τ ≤ 2": "random",
    "τ = 1, mean of 0.95": "mean",
    NEVER: "never",
    REGRESSION: "regression",
}


def _least_rise(values: "np.ndarray") -> float:
    return float((values[1:] - values[:-1]).min())


def staleness(rows: reduce.Rows) -> "xr.Dataset":
    """Returns loss at step 20 and accuracy, mean and range of draws of the labels."""
    import xarray as xr

    found = {}
    for name in _VARIANTS:
        run = xr.concat([rows[f"{name}, labels {k}"] for k in _SEEDS], "seed")
        right = 100 * (1 - run["val_error"].isel(eval_step=-1))
        loss = run["loss"].sel(step=20, method="nearest")
        found[name] = reduce.extent(right, "accuracy") | reduce.extent(loss, "loss")
    return reduce.from_cells(found)


STALENESS = Table(
    id="gnn/staleness",
    title="Neighbours on other devices that are some steps old",
    paper=(
        "Besta and Hoefler, TPAMI 2023, its asynchrony: layers take rows of other "
        "devices of τ steps ago, of which they say that little is lost"
    ),
    caption=(
        "1,797 digits, edges to and from the ten nearest, 180 labels, on 4 simulated "
        "devices, parts by chance; two layers of graph convolution, width 64, Adam at "
        "0.01, 150 steps. loss: of the labels at step 20; accuracy: of all others in "
        "the end, with fresh rows. Mean and range of five draws of labels and "
        "parameters. random: drawn for each pair of devices and step. never: rows of "
        "other devices are zeros in the hidden layer. logistic regression: of pixels, "
        "by Adam at 0.1."
    ),
    shows=(
        "Four devices trained one graph network, with rows of each other that are τ "
        "steps old. Left is fast in the first panel, right is accurate in the second."
    ),
    picture=Dots(("loss", "accuracy")),
    columns={"loss": "loss at step 20", "accuracy": "accuracy, %"},
    reduce=staleness,
    tiers=on_cpu(
        minutes=8.0,
        devices=4,
        runs={
            f"{name}, labels {k}": Runs(
                config=f"gnn/staleness:{variant}",
                seeds=(k,),
                overrides={"dataset.source.draw_seed": str(k)},
            )
            for name, variant in _VARIANTS.items()
            for k in _SEEDS
        },
        claims={
            "late": over("loss", STEPS[1], FRESH)
            .at_most(1.5, "loss at step 20 of rows a step old over that of fresh ones")
            .fails({STEPS[1]: NEVER}),
            "grows": of("loss", *STEPS)
            .then(_least_rise)
            .at_least(
                0, "rise of that loss from τ to the next, of 0, 1, 2, 4, the least"
            )
            .fails({STEPS[3]: FRESH}),
            "close": above("accuracy", FRESH, STEPS[1])
            .at_most(1.5, "points of accuracy that rows a step old lose")
            .fails({STEPS[1]: REGRESSION}),
            "accuracy": cell("accuracy", FRESH)
            .at_least(96.0, "accuracy with fresh rows, %")
            .fails({FRESH: REGRESSION}),
            "edges": above("accuracy", FRESH, REGRESSION)
            .at_least(4.0, "points of it above logistic regression")
            .fails({FRESH: REGRESSION}),
        },
    ),
)


OTHER = "gcn, composed for 2 of 4 devices"
_EDGES = [name for name in KINDS if name != "mlp"]


def taxonomy(rows: reduce.Rows) -> "xr.Dataset":
    """Returns what each layer trains by, and what the refusals of the rest say."""
    run, control = (reduce.first(rows[name]) for name in ("tried", "other"))
    found = {name: _trials(run.sel(layer=name)) for name in KINDS}
    return reduce.from_cells(found | {OTHER: _trials(control.sel(layer="gcn"))})


def _trials(own: "xr.Dataset") -> dict[str, Any]:
    """Returns the trials of one layer, and how the first refusals begin."""
    done = own["tick"] * own["traced"]
    said = own["refusal"]
    parts = next((text for text in said.values[1:] if text), "")
    total = {name: int(own[name].sum()) for name in ("tick", "traced", "own", "named")}
    return {
        **{way: "yes" if done.sel(way=way) else "no" for way in WAYS},
        "ticks": total["tick"],
        "holes": total["tick"] - total["traced"],
        "silent": total["traced"] - total["own"],
        "unnamed": len(WAYS) - total["named"],
        "of_blocks": textwrap.shorten(str(said.values[0]), 58, placeholder=" …"),
        "of_parts": textwrap.shorten(str(parts), 58, placeholder=" …"),
    }


TAXONOMY = Table(
    id="gnn/taxonomy",
    title="Which layers of graph networks train by which parallelism",
    paper=(
        "Besta and Hoefler, TPAMI 2023, its taxonomy of parallelism: mini-batches of "
        "subgraphs, partitions of vertices, features, and asynchrony"
    ),
    caption=(
        "Each layer was composed into a training on 4 simulated devices in four ways, "
        "and its step was traced, not run. data: sampled subgraphs on each device; "
        "vertex: parts of a graph, rows in rounds; features: columns of all vertices; "
        "stale: vertex with rows a step old. ticks: tasks that parts compose, of four; "
        "holes: those whose step is not traced; silent: traced without the collective "
        "of its way, psum, ppermute, reduce_scatter, ppermute and rows kept; unnamed: "
        "neither traced nor refused by an error that names the layer. Of refusals, of "
        "data and of the first of the others, the beginnings. The control's parts are "
        "told of 2 devices."
    ),
    shows=(
        "Each layer of a graph network was composed with four kinds of parallelism. "
        "Long bars can be had in all of them; what is missing is refused by name."
    ),
    picture=Bars(("ticks",), label="kinds of parallelism"),
    columns={
        **{way: way for way in WAYS},
        "ticks": "ticks",
        "holes": "holes",
        "silent": "silent",
        "unnamed": "unnamed",
        "of_blocks": "of blocks is refused",
        "of_parts": "of parts is refused",
    },
    reduce=taxonomy,
    tiers=on_cpu(
        minutes=1.0,
        devices=4,
        runs={
            "tried": Runs(config="gnn/taxonomy"),
            "other": Runs(config="gnn/taxonomy:other"),
        },
        claims={
            "traced": most("holes", *KINDS)
            .at_most(0, "tasks that compose and whose step is not traced, of a layer")
            .fails({"gcn": OTHER}),
            "sends": most("silent", *_EDGES)
            .at_most(0, "steps without the collective of their way, of a layer")
            .fails({"gcn": "mlp"}),
            # Else one that refuses everything by name would pass.
            "trained": least("ticks", *(name for name in _EDGES if name != "sgc"))
            .at_least(3, "ways that a layer composes by, but of sgc and mlp")
            .fails({"gcn": "sgc"}),
            "named": most("unnamed", *KINDS)
            .at_most(0, "combinations neither traced nor refused by name, of a layer")
            .fails({"gcn": OTHER}),
        },
    ),
)
