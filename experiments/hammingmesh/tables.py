"""Tables of HammingMesh: networks and prices, allocation, and exchanges on networks."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from experiments.hammingmesh.allocation import HEURISTICS
from hpcjax.runs import reduce
from hpcjax.runs.pictures import Bars, Scatter
from hpcjax.runs.reduce import cell, least, most, over
from hpcjax.runs.tables import Runs, Table, on_cpu

if TYPE_CHECKING:
    import xarray as xr

_NAMES = {
    "fat_tree": "fat tree",
    "fat_tree_50": "fat tree, 50 % tapered",
    "fat_tree_75": "fat tree, 75 % tapered",
    "dragonfly": "Dragonfly",
    "hyperx": "HyperX",
    "hx2mesh": "Hx2Mesh",
    "hx4mesh": "Hx4Mesh",
    "torus": "torus",
}
# Millions of dollars of the paper's table II, as they are recalled.
_RECALLED = {
    "fat tree, 1k": 25.3,
    "fat tree, 50 % tapered, 1k": 17.6,
    "fat tree, 75 % tapered, 1k": 13.2,
    "HyperX, 1k": 10.8,
    "Hx2Mesh, 1k": 5.4,
    "Hx4Mesh, 1k": 2.7,
    "torus, 1k": 2.5,
    "fat tree, 16k": 680,
    "fat tree, 50 % tapered, 16k": 419,
    "fat tree, 75 % tapered, 16k": 271,
    "Dragonfly, 16k": 429,
    "HyperX, 16k": 448,
    "Hx2Mesh, 16k": 224,
    "Hx4Mesh, 16k": 43.3,
    "torus, 16k": 39.5,
}
# Percent, (N - 1) x / (N (x - 1)) / 2a: all ports of a line are loaded alike.
_TO_ALL = 100 * 1023 * 16 / (1024 * 15) / 4


def _name(network: str) -> str:
    short = network.removesuffix("_16k")
    return f"{_NAMES[short]}, {'1k' if short == network else '16k'}"


def _recalled(run: "xr.Dataset") -> float:
    return _RECALLED[_name(run["network"].item())]


def _apart(figure: str) -> Callable[["xr.Dataset"], Any]:
    """Makes a cell: millions, rounded as the paper prints them, from the recalled."""

    def cell(run: "xr.Dataset") -> float:
        recalled = _recalled(run)
        return abs(round(float(run[figure]) / 1e6, int(recalled < 100)) - recalled)

    return cell


def _price(share: str) -> Callable[["xr.Dataset", reduce.Rows], Any]:
    """Makes a cell: dollars for a unit of bandwidth, over the Hx2Mesh's of its size."""

    def cell(run: "xr.Dataset", rows: reduce.Rows) -> Any:
        size = "_16k" if run["network"].item().endswith("_16k") else ""
        base = rows[f"hx2mesh{size}"]
        price = run["dollars"] / run["endpoints"]
        price = price / (base["dollars"] / base["endpoints"])
        return price * base[share] / run[share]

    return cell


NETWORKS = Table(
    id="hammingmesh/networks",
    title="What networks cost, and what bandwidth they have for training",
    paper=(
        "Hoefler et al., SC 2022, table II: a HammingMesh has the bandwidth that "
        "training needs at a fraction of a fat tree's price"
    ),
    recalled={
        "HyperX, 1k": "91.6 % to all",
        "torus, 1k": "2.0 %",
        "Dragonfly, 16k": "62.9 %",
    },
    caption=(
        "About 1,000 and 16,000 accelerators with 16 links of 400 Gb/s each. Dollars "
        "of switches and cables; recalled: the paper's, apart: of dollars rounded as "
        "these; off by graph: dollars by which counting the graph's cables and "
        "switches differs; if unshared: a switch a line. Diameter in links, those of "
        "endpoints included; the paper counts 3 between a Dragonfly's routers. Shares "
        "of the injection bandwidth at which the first link is full, with messages "
        "split over all shortest paths: to all others, around two disjoint Hamiltonian "
        "cycles, and around one ring in the order of numbers. The paper's packets do "
        "not split. price: dollars for a unit of that bandwidth of an accelerator, "
        "over the Hx2Mesh's."
    ),
    shows=(
        "Networks of accelerators were priced, and their bandwidth from all to all was "
        "computed. Towards the upper left is better; the joined ones have no better "
        "one."
    ),
    picture=Scatter("dollars", "alltoall", labels=True, front=("least", "most")),
    columns={
        "dollars": "dollars",
        "recalled": ("recalled, M$", _recalled),
        "apart": ("apart, M$", _apart("dollars")),
        "copper": ("apart if all copper, M$", _apart("copper")),
        "off": "off by graph, $",
        "unshared": "if unshared, $",
        "endpoints": "endpoints",
        "diameter": "diameter",
        "bisection": "bisection, %",
        "alltoall": "all to all, %",
        "allreduce": "around rings, %",
        "in_order": "in order, %",
        "alltoall_price": ("price, all to all", _price("alltoall")),
        "allreduce_price": ("price, rings", _price("allreduce")),
    },
    along="network",
    named=_name,
    tiers=on_cpu(
        minutes=1.0,
        runs={"all": Runs(config="hammingmesh/networks")},
        claims={
            "rules": most("off")
            .at_most(0, "dollars between the graphs and the rules")
            .fails(columns={"off": "unshared"}),
            "recalled": most("apart")
            .at_most(0, "millions between a price, as the paper rounds it, and its own")
            .fails(columns={"apart": "copper"}),
            "price": over("dollars", "Hx2Mesh, 1k", "fat tree, 1k")
            .at_most(0.22, "Hx2Mesh's price over the fat tree's")
            .fails({"Hx2Mesh, 1k": "HyperX, 1k"}),
            "rings": over("allreduce", "Hx2Mesh, 1k", "fat tree, 1k")
            .at_least(0.98, "Hx2Mesh's share around rings over the fat tree's")
            .fails(columns={"allreduce": "in_order"}),
            "to all": abs(cell("alltoall", "Hx2Mesh, 1k") - _TO_ALL)
            .at_most(
                1e-6, "points from an Hx2Mesh's share to all, 26.6406 % by formula"
            )
            .fails({"Hx2Mesh, 1k": "torus, 1k"}),
        },
    ),
)


def allocation(rows: reduce.Rows) -> "xr.Dataset":
    """Returns a row for each grid and number of faults, means over draws."""
    cells: dict[str, reduce.Cells] = {}
    for name, row in rows.items():
        used = reduce.first(row)["used"]
        mean = used.mean("draw")
        steps = mean.sel(heuristic=list(HEURISTICS)[:-1]).diff("heuristic")
        final = mean.sel(heuristic=["+ ratios", "contiguous"]).diff("heuristic")
        lost = mean.sel(heuristic="+ sort") - mean.sel(heuristic="contiguous")
        cells[name] = {
            **{str(h): mean.sel(heuristic=h) for h in HEURISTICS},
            "worst": used.sel(heuristic="+ sort").quantile(0.01, "draw"),
            "step": steps.min(),
            "final": final.min(),
            "lost": lost,
        }
    return reduce.from_cells(cells)


_GRIDS = {
    f"{boards}x{boards}, {faults} failed": Runs(
        config="hammingmesh/allocation",
        overrides={"boards": str(boards), "faults": str(faults)},
    )
    for boards in (16, 32)
    for faults in (0, 20, 40)
}
_WHOLE = tuple(name for name in _GRIDS if ", 0" in name)

ALLOCATION = Table(
    id="hammingmesh/allocation",
    title="Boards of a HammingMesh that jobs use, in percent of those that work",
    paper=(
        "Hoefler et al., SC 2022, the figure of section 4.2: nearly all boards are "
        "used once jobs are sorted, also when some have failed"
    ),
    caption=(
        "Jobs of a trace of Alibaba's, until the free boards are spoken for; means of "
        "400 draws, the same jobs and failed boards in all columns. Each adds to that "
        "before it: a shape's transpose, other shapes of as many boards, the "
        "largest job first. contiguous: sorted, too, but jobs need neighbouring rows "
        "and columns, as on a torus. worst: 1st percentile when sorted. step: a "
        "heuristic's least gain over the one before; final: that of contiguous."
    ),
    shows=(
        "Jobs were placed on a mesh of boards, of which some have failed. Longer is "
        "better: sorting and free choice of boards against greedy and neighbouring "
        "ones."
    ),
    picture=Bars(("greedy", "+ sort", "contiguous"), label="boards in use, %"),
    columns={
        **{name: name for name in HEURISTICS},
        "worst": "worst",
        "step": "step",
        "final": "final",
        "lost": "+ sort above contiguous",
    },
    reduce=allocation,
    tiers=on_cpu(
        minutes=1.0,
        runs=_GRIDS,
        claims={
            "order": least("step")
            .at_least(0, "points that a heuristic gains over the one before, the least")
            .fails(columns={"step": "final"}),
            "full": least("+ sort", *_WHOLE)
            .at_least(99, "percent of boards used when none has failed")
            .fails(columns={"+ sort": "greedy"}),
            "neighbours": cell("lost", "16x16, 40 failed")
            .at_least(10, "points that a need for neighbouring boards would cost")
            .fails({"16x16, 40 failed": "16x16, 0 failed"}),
        },
    ),
)


def exchanges(rows: reduce.Rows) -> "xr.Dataset":
    """Returns a row for each model and method, milliseconds on each network."""
    run = reduce.single(rows)
    cells: dict[str, reduce.Cells] = {}
    for model in run["model"].values.tolist():
        for method in run["exchange"].values.tolist():
            own = run.sel(model=model, exchange=method)
            price = own["seconds"] * own["dollars"] * 1e-3
            on = {str(n): own.sel(network=n) for n in run["network"].values}
            hx2, tree, torus = (on[name] for name in ("hx2mesh", "fat_tree", "torus"))
            cells[f"{model}, {method}"] = {
                **{n: 1e3 * each["seconds"] for n, each in on.items()},
                **{f"{n}_price": price.sel(network=n) for n in on},
                "tree": hx2["seconds"] / tree["seconds"],
                "torus_bytes": torus["bytes_s"] / hx2["bytes_s"],
                "megabytes": own["megabytes"],
            }
    return reduce.from_cells(cells)


EXCHANGES = Table(
    id="hammingmesh/exchanges",
    title="Gradients of 1,024 accelerators, exchanged on three networks",
    paper=(
        "Hoefler et al., SC 2022, section 5: all-reduces run as fast as on a fat tree; "
        "with the model of Agarwal et al., MLSys 2022"
    ),
    caption=(
        "One exchange of all gradients, none of it beside the backward pass, and "
        "without encoding: bytes at the network's share of 6.4 Tb/s, around rings or "
        "to all, and 80 ns for each link that a message takes. ms x M$: milliseconds "
        "times the network's price in millions. torus / Hx2: of the bytes alone."
    ),
    shows=(
        "Exchanges of gradients were simulated on three networks. Shorter is faster: "
        "Hx2Mesh beside the fat tree for dense ones, beside the torus for messages to "
        "all."
    ),
    picture=Bars(("hx2mesh", "fat_tree", "torus"), label="ms of an exchange"),
    columns={
        "megabytes": "MB",
        "hx2mesh": "Hx2Mesh, ms",
        "fat_tree": "fat tree, ms",
        "torus": "torus, ms",
        "hx2mesh_price": "Hx2Mesh, ms x M$",
        "fat_tree_price": "fat tree, ms x M$",
        "torus_price": "torus, ms x M$",
        "tree": "Hx2 / fat tree",
        "torus_bytes": "torus / Hx2",
    },
    reduce=exchanges,
    tiers=on_cpu(
        minutes=0.5,
        runs={"all": Runs(config="hammingmesh/exchanges")},
        claims={
            "dense": most("tree", "resnet50, dense", "bert_base, dense")
            .at_most(1.05, "of the fat tree's time for a dense all-reduce on Hx2Mesh")
            .fails({"bert_base, dense": "bert_base, Ok-Topk"}),
            "to all": cell("torus_bytes", "bert_base, Ok-Topk")
            .at_least(3.0, "times Hx2Mesh's time on a torus for messages to all")
            .fails({"bert_base, Ok-Topk": "bert_base, dense"}),
        },
    ),
)
