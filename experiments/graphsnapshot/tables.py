"""Tables of snapshots of sampled neighbours: their cost, accuracy and freshness."""

from typing import TYPE_CHECKING

import numpy as np

from experiments.graphsnapshot.freshness import (
    ALL,
    DROPPED,
    NEWEST,
    REPEATS,
)
from experiments.graphsnapshot.freshness import (
    PARTIAL as PART,
)
from experiments.graphsnapshot.loader import FCR, FULL, PARTIAL, POLICIES, SHARED
from hpcjax.cost.disk import disk_seconds
from hpcjax.runs import reduce
from hpcjax.runs.claims import Trivial
from hpcjax.runs.pictures import Bars, Dots, Lines
from hpcjax.runs.reduce import above, cell, over
from hpcjax.runs.tables import Runs, Table, on_cpu

if TYPE_CHECKING:
    import xarray as xr

PAPER = "Liu et al., GraphSnapShot, 2024"
_DISK = (
    "Disk: ⌈pages/32⌉ · 80 µs + pages · 4 KiB / 2 GB/s, and bytes of rows at 10 GB/s, "
    "a model; sampling: processor time of one thread, measured"
)
_SEEDS = (0, 1, 2)
_ENOUGH = 2000  # deleted entries, to tell a distance of
_ALONE = "features alone"
_STILL = "2 neighbours, never refreshed"
_NEVER, _FROZEN = "SAGE, FCR never refreshed", f"SAGE, {_STILL}"
_GCN_FROZEN = f"GCN, {_STILL}"


def loader(rows: reduce.Rows) -> "xr.Dataset":
    """Returns what a batch costs by policy, in the mean over batches."""
    run = reduce.single(rows)
    found: dict[str, reduce.Cells] = {}
    for name in POLICIES:
        own = run.sel(policy=name)
        pages, moved = own["pages"].values, own["moved"].values
        each = [disk_seconds(p, m) for p, m in zip(pages, moved, strict=True)]
        disk, sampling = (1e3 * float(np.mean(e)) for e in (each, own["seconds"]))
        cells: dict[str, float] = {
            **{"disk": disk, "sampling": sampling, "total": disk + sampling},
            "memory": float(own["snapshot"] / run["store"]),
            "rows": float(own["rows"] / run["store"]),
            **{key: float(own[key].mean()) for key in ("pages", "entries", "hits")},
        }
        for threshold in run["threshold"].values if name == FCR else ():
            stored = run["stored"].sel(threshold=threshold)
            cells[f"stored_{threshold}"] = float(stored)
        found[name] = cells
    return reduce.from_cells(found)


def freshness(rows: reduce.Rows) -> "xr.Dataset":
    """Returns what is stale after k refreshes, and how far from the law."""
    run = reduce.single(rows)
    found = {}
    for name in run["row"].values:
        own = run.sel(row=name)
        law, stale = own["law"].values, own["stale"].values
        spread = np.sqrt(np.maximum(law * (1 - law), 1e-12) / float(own["deleted"]))
        away = (np.abs(stale - law) / spread)[1:]
        for number in range(1, len(law)):
            found[_after(name, number)] = {
                **{
                    "stale": stale[number],
                    "law": law[number],
                    "distance": away[number - 1],
                },
                **{"deleted": own["deleted"], "repeated": own["repeated"]},
                "furthest": away.max() if own["deleted"] >= _ENOUGH else np.inf,
            }
    return reduce.from_cells(found)


def _after(name: str, refreshes: int) -> str:
    return f"{name}, k = {refreshes}"


def accuracy(rows: reduce.Rows) -> "xr.Dataset":
    """Returns test accuracies at the end, mean and range of seeds."""
    return reduce.from_cells(
        {
            name: reduce.extent(1 - run["val_error"].isel(eval_step=-1), "accuracy")
            for name, run in rows.items()
        }
    )


LOADER = Table(
    id="graphsnapshot/loader",
    title="Neighbours of a batch from a store or from a snapshot: pages and time",
    paper=(
        f"{PAPER}: up to 30 % less time and 73 % less memory than loading every batch "
        "in full [abstract]"
    ),
    caption=(
        "R-MAT, 2^19 vertices, 8 M edges; two layers of 10 neighbours, 300 batches of "
        "128 targets, the same for all, in turns; rows 1.5 times as wide as the "
        "fan-out, refreshed every 50 batches, refresh rate 0.3, fetch rate 0.4; lists "
        "longer than 30 have rows. Means over batches, the filling of rows and "
        f"their refreshes among them. {_DISK}. Pages: of the lists, each once a batch; "
        "offsets are in memory. Lazy: a row is drawn when it is asked for, with the "
        "same batches. memory: all of a snapshot over the lists' bytes; rows: of their "
        "entries alone."
    ),
    shows=(
        "The same batches of neighbours were sampled by nine policies. Compare the "
        "bars: the left part is a disk's, by its pages, the right one the sampling."
    ),
    picture=Bars(("disk", "sampling"), stacked=True, label="ms a batch"),
    columns={
        "total": "ms a batch",
        "disk": "of these disk (model)",
        "sampling": "sampling",
        "pages": "pages",
        "entries": "entries read",
        "hits": "from rows",
        "memory": "memory over lists",
        "rows": "rows over lists",
        "stored_10": "stored, θ = 10",
        "stored_30": "θ = 30",
        "stored_100": "θ = 100",
    },
    reduce=loader,
    tiers=on_cpu(
        minutes=1.5,
        runs={"loader": Runs(config="graphsnapshot/loader")},
        claims={
            "less time": over("total", FULL, SHARED)
            .at_least(1.3, "time of full batches over that of FCR with shared rows")
            .fails({SHARED: PARTIAL}),
            "less time, own rows": over("total", FULL, FCR)
            .at_least(1.3, "over that of FCR")
            .fails({FCR: PARTIAL}),
            "fewer pages": over("pages", FCR, FULL)
            .at_most(0.5, "pages of FCR over those of full batches")
            .fails({FCR: PARTIAL}),
            "less memory": cell("memory", SHARED)
            .at_most(0.27, "bytes of FCR with shared rows over those of the lists")
            .fails({SHARED: FCR}),
            "small rows": cell("rows", SHARED)
            .at_most(0.15, "the same, of the rows' entries alone")
            .fails({SHARED: FCR}),
            "all in memory": over("sampling", SHARED, FULL)
            .at_most(1.1, "sampling alone, of FCR with shared rows over full batches")
            .fails({SHARED: FCR}),
        },
    ),
)


FRESHNESS = Table(
    id="graphsnapshot/freshness",
    title="Deleted edges that a snapshot still serves, by refreshes of its rows",
    paper=f"{PAPER}, its freshness; the law (1 - r)^k is derived",
    caption=(
        "R-MAT, 65,536 vertices, 2 M edges, of which 5 % are deleted at once and as "
        "many inserted; rows of 15 entries, of lists longer than 60, renewed in each "
        "batch. stale: of the deleted entries that rows held, how many they hold after "
        "k refreshes; r: share of a row that is renewed, 3/15 and 4/15. Distance: in "
        "binomial standard errors. Newest kept: rows keep what came last. Kept drawn "
        "again: new entries are drawn from all of the list."
    ),
    shows=(
        "A twentieth of a graph's edges were deleted below a snapshot of it. Follow "
        "the lines: how many of these its rows still serve after k refreshes."
    ),
    picture=Lines("k = {}", ("stale", "law"), label="stale share", x_label="refreshes"),
    columns={
        "stale": "stale",
        "law": "(1 - r)^k",
        "distance": "distance, s.e.",
        "furthest": "the largest of all k",
        "deleted": "deleted entries",
        "repeated": "repeated entries",
    },
    reduce=freshness,
    tiers=on_cpu(
        minutes=0.5,
        runs={"freshness": Runs(config="graphsnapshot/freshness")},
        claims={
            "the law": cell("furthest", _after(PART, 1))
            .at_most(4.0, "largest distance from (1 - r)^k, partial refresh, s.e.")
            .fails({_after(PART, 1): _after(NEWEST, 1)}),
            "the law, all rows": cell("furthest", _after(ALL, 1))
            .at_most(4.0, "likewise, refresh of all rows")
            .fails({_after(ALL, 1): _after(NEWEST, 1)}),
            "full refresh": cell("stale", _after("FCR", 1))
            .at_most(0.0, "stale share after a full refresh")
            .fails({_after("FCR", 1): _after(PART, 1)}),
            "invalidated": cell("stale", _after(DROPPED, 1))
            .at_most(0.0, "stale share where deletions reach the rows")
            .fails({_after(DROPPED, 1): _after(PART, 1)}),
            "rows are sets": cell("repeated", _after(PART, 1))
            .at_most(0.0, "entries that a row holds twice")
            .fails({_after(PART, 1): _after(REPEATS, 1)}),
        },
    ),
)


def _runs(name: str, seeds: tuple[int, ...] = _SEEDS) -> Runs:
    return Runs(config=f"graphsnapshot/accuracy:{name}", seeds=seeds)


ACCURACY = Table(
    id="graphsnapshot/accuracy",
    title="Accuracy of networks on neighbours from a snapshot",
    paper=f"{PAPER}: lossless; GraphSAGE 0.725, FCR 0.718, on the fly 0.717 (table 3)",
    caption=(
        "A drawn graph, 20,000 vertices of ten classes, 25 neighbours in the mean; two "
        "layers of 10, 120 steps of 256 targets; test part, whose neighbourhoods are "
        "read from the store. Mean and range of three seeds. On the fly: partial "
        "refresh and partial fetch. The graph stands still, so that a row which is "
        "never refreshed loses nothing either; the control has two neighbours of every "
        "vertex for all of the training, and features alone see no edge."
    ),
    shows=(
        "Networks were trained on neighbours from a store and from a snapshot. Right "
        "is more accurate; the last row has the same two neighbours all the time."
    ),
    picture=Dots("accuracy"),
    columns={"accuracy": "test accuracy"},
    reduce=accuracy,
    tiers=on_cpu(
        minutes=7.0,
        runs={
            "SAGE, full batch": _runs("full"),
            "SAGE, FCR": _runs("fcr"),
            "SAGE, on the fly": _runs("fly"),
            _NEVER: _runs("never", (0,)),
            _FROZEN: _runs("frozen"),
            _ALONE: _runs("alone", (0,)),
            "GCN, full batch": _runs("gcn"),
            "GCN, FCR": _runs("gcn_fcr"),
            "GCN, on the fly": _runs("gcn_fly"),
            _GCN_FROZEN: _runs("gcn_frozen"),
        },
        trivial=Trivial(rows=(_ALONE,), by="accuracy", largest=True),
        claims={
            "FCR": abs(above("accuracy", "SAGE, FCR", "SAGE, full batch"))
            .at_most(0.015, "between FCR and full batches, GraphSAGE")
            .fails({"SAGE, FCR": _FROZEN}, {"SAGE, FCR": _ALONE}),
            "on the fly": abs(above("accuracy", "SAGE, on the fly", "SAGE, full batch"))
            .at_most(0.015, "between on the fly and full batches, GraphSAGE")
            .fails({"SAGE, on the fly": _FROZEN}, {"SAGE, on the fly": _ALONE}),
            "GCN": abs(above("accuracy", "GCN, FCR", "GCN, full batch"))
            .at_most(0.015, "between FCR and full batches, GCN")
            .fails({"GCN, FCR": _GCN_FROZEN}, {"GCN, FCR": _ALONE}),
            "GCN on the fly": abs(
                above("accuracy", "GCN, on the fly", "GCN, full batch")
            )
            .at_most(0.015, "between on the fly and full batches, GCN")
            .fails({"GCN, on the fly": _GCN_FROZEN}, {"GCN, on the fly": _ALONE}),
        },
    ),
)
