"""Tables of orders of partitions: what they do to a graph, and to what is learnt."""

from typing import TYPE_CHECKING

import numpy as np

from experiments.marius.policies import FILE, ROWS
from hpcjax.runs import reduce
from hpcjax.runs.pictures import Dots, Lines
from hpcjax.runs.reduce import Number, above, cell, most, over
from hpcjax.runs.tables import Runs, Table, by_model, on_cpu, variants

if TYPE_CHECKING:
    import xarray as xr

PAPER = "Waleffe et al., MariusGNN, EuroSys 2023"
_HALF = ROWS[2]
SEEDS = (0, 1, 2)
# Of the table's rows that an epoch reads: what is resident first, and a group a swap.
READS = {
    "memory": 1.0,
    "beta": (4 + 42) / 16,
    "comet": (2 + 27) / 8,
    "one fill": 4 / 16,
}
_ROW_BYTES = 40_943 * 64 * 4 * 2  # of all rows, and as much of Adagrad's sums


def policies(rows: reduce.Rows) -> "xr.Dataset":
    """Returns figures of orders, and of each draw how they are beside BETA's."""
    run = reduce.single(rows)
    found = {}
    for name in ROWS:
        own, peer = run.sel(policy=name), f"BETA{FILE * name.endswith(FILE)}"
        base = run.sel(policy=peer)
        less, wider = base["bias"] - own["bias"], own["groups"] / base["groups"]
        found[name] = {
            **reduce.extent(own["bias"], "bias"),
            **reduce.extent(own["groups"], "groups"),
            **{
                "reads": own["reads"].mean(),
                "over": (own["reads"] / base["reads"]).mean(),
            },
            **{"less": less.mean(), "least": less.min(), "wider": wider.min()},
        }
    return reduce.from_cells(found)


POLICIES = Table(
    id="marius/policies",
    title="Orders of partitions: how evenly an epoch trains a graph, and its reads",
    paper=f"{PAPER}, figure 8: bias of COMET and BETA; its formula of B is not known",
    caption=(
        "WN18RR, a quarter of the vertices resident, ten draws of ids and orders, mean "
        "and range. B: the most by which shares of trained edges differ between 64 "
        "ranges of ids after a state; the formula is ours. D: of how many ranges a "
        "state's edges are. BETA: 16 partitions, 4 resident; COMET: 64, 16, groups of "
        "8. Sorted ids are the control: parts of a sorted list are no random ones."
    ),
    shows=(
        "Edges were put in the orders in which two systems train them. On the left "
        "further left is more even, on the right further right more diverse."
    ),
    picture=Dots(("bias", "groups")),
    columns={
        "bias": "B",
        "groups": "D",
        "reads": "reads over all rows",
        "over": "over BETA's",
        "less": "B below BETA's",
        "least": "least of the draws",
        "wider": "least D over BETA's",
    },
    reduce=policies,
    tiers=by_model(
        minutes=1.0,
        runs={"WN18RR": Runs(config="marius/policies")},
        claims={
            "less bias": cell("less", "COMET")
            .at_least(0.03, "mean B of BETA above COMET's")
            .fails({"COMET": f"COMET{FILE}"}, {"COMET": "BETA"}),
            "in each draw": cell("least", "COMET")
            .at_least(0.001, "least B of BETA above COMET's")
            .fails({"COMET": f"COMET{FILE}"}, {"COMET": "BETA"}),
            "more groups": cell("wider", "COMET")
            .at_least(1.15, "least effective groups of COMET over BETA's")
            .fails({"COMET": f"COMET{FILE}"}, {"COMET": "BETA"}),
            "reads": cell("over", "COMET")
            .at_most(1.35, "what COMET reads over BETA's, with as much memory")
            .fails({"COMET": _HALF}),
        },
    ),
)


def links(rows: reduce.Rows) -> "xr.Dataset":
    """Returns what was learnt by order, and the gap between memory and BETA."""
    found = {}
    for name, row in rows.items():
        last = row.isel(eval_step=-1)
        took = np.median(np.diff(reduce.first(row)["seconds"].values))
        found[name] = {
            **reduce.extent(last["val_mrr"], "mrr"),
            **reduce.extent(last["val_hits10"], "hits10"),
            **{"megabytes": READS[name] * _ROW_BYTES / 1e6, "milliseconds": 1e3 * took},
        }
    scores = [rows[name].isel(eval_step=-1)["val_mrr"].values for name in rows][:2]
    lost = scores[0] - scores[1]
    error = lost.std(ddof=1) / np.sqrt(len(lost)) if len(lost) > 1 else np.inf
    found["beta"]["gap"] = 0.0 if lost.mean() <= 3 * error else lost.mean()
    return reduce.from_cells(found)


@Number
def _closed(table: "xr.Dataset") -> float:
    """Returns the share of BETA's gap that COMET closes; where none is, 1 or 0."""
    gap, gained = cell("gap", "beta")(table), above("mrr", "comet", "beta")(table)
    return gained / gap if gap else float(gained >= -0.005)


def _runs(variant: str) -> Runs:
    own = {"dataset.holdout": "test"}
    return Runs(config=f"marius/links:{variant}", overrides=own, seeds=SEEDS)


LINKS = Table(
    id="marius/links",
    title="DistMult on WN18RR by the order of partitions: filtered test MRR",
    paper=f"{PAPER}, tables 4 and 7: from disk by COMET as in memory",
    caption=(
        "86,835 links of 40,943 synsets, width 64, batches of 1,024 links with 512 "
        "negatives in each direction, half by degree, Adagrad 0.1, ten epochs; chosen "
        "on the validation part. Ranks are among all synsets, both directions, ties by "
        "the mean rank; mean and range of three seeds. The table is in memory: orders "
        "are those that a disk would need, bytes what it would read in an epoch. One "
        "fill: BETA's first state alone, for as many steps."
    ),
    shows=(
        "Embeddings of WordNet were learnt in orders that need a quarter of the table "
        "in memory. Further right is better; one fill is the control."
    ),
    picture=Dots("mrr"),
    columns={
        "mrr": "MRR",
        "hits10": "Hits@10",
        "gap": "gap to memory (0: no gap to close)",
        "megabytes": "read in an epoch, MB",
        "milliseconds": "step, ms",
    },
    reduce=links,
    tiers=on_cpu(
        minutes=9.0,
        runs={
            name: _runs(name.replace(" ", "_"))
            for name in ("memory", "beta", "comet", "one fill")
        },
        claims={
            "as memory": above("mrr", "comet", "memory")
            .at_least(-0.01, "MRR by COMET above that in memory")
            .fails({"comet": "one fill"}),
            "as BETA": above("mrr", "comet", "beta")
            .at_least(-0.005, "MRR by COMET above that by BETA")
            .fails({"comet": "one fill"}),
            "one fill does not do": above("mrr", "memory", "one fill")
            .at_least(0.2, "MRR in memory above that of one fill")
            .fails({"one fill": "memory"}),
            "closes the gap": _closed.at_least(
                0.5, "share of BETA's gap that COMET closes; 1: no gap to close"
            ).fails({"comet": "one fill"}),
        },
    ),
)


WHOLE, PART, STILL = "memory", "45 % resident", "45 %, still, by classes"
QUARTER, ALONE = "25 % resident", "features alone"
EPOCHS = 5  # of configs/marius/nodes.py
WEAK, WEAK_QUARTER = "weak, memory", "weak, 25 % resident"


def nodes(rows: reduce.Rows) -> "xr.Dataset":
    """Returns accuracies, and in the mean how far they are below memory's."""
    found = {}
    for name, row in rows.items():
        run, peer = reduce.first(row), rows[WEAK if "weak" in name else WHOLE]
        own, base = (x.isel(eval_step=-1) for x in (row, peer))
        right, loss = 100 * (1 - own["val_error"]), own["val_loss"]
        took = [np.median(np.diff(reduce.first(x)["seconds"])) for x in (row, peer)]
        found[name] = {
            **reduce.extent(right, "accuracy"),
            "lost": 100
            * float((own["val_error"] - base["val_error"]).mean(skipna=False)),
            "excess": float((loss - base["val_loss"]).mean(skipna=False)),
            "resident": 1.0,
            "time": took[0] / took[1],
        }
        if "resident_bytes" in run:
            found[name]["resident"] = run["resident_bytes"] / run["graph_bytes"]
            found[name]["megabytes"] = run["read_bytes"] / EPOCHS / 1e6
    return reduce.from_cells(found)


NODES = Table(
    id="marius/nodes",
    title="GraphSAGE on a graph in files, a part of it resident: test accuracy",
    paper=f"{PAPER}, table 3: from disk as accurate as in memory, 44 % resident",
    caption=(
        "A drawn graph, 60,000 vertices of ten classes, 25 neighbours in the mean, "
        "8,000 vertices to train on, in 64 partitions; two layers, ten neighbours "
        "each, width 64, five epochs of 32 blocks; accuracy on 2,000 vertices of the "
        "test part with neighbours of all partitions. Mean and range of three seeds; "
        "lost: mean points below memory; excess: mean held-out loss above memory's. "
        "Resident: bytes of features and of edges over all; MB: read in an epoch. "
        "Features alone tell the classes nearly, weak ones do not. Still, by classes: "
        "other partitions stay as they were drawn, and have vertices in order of their "
        "classes. time: median step over memory's."
    ),
    shows=(
        "Classes of vertices were learnt while a part of the graph was in memory. "
        "Further right is better; each kind of features has its own row of memory."
    ),
    picture=Dots("accuracy"),
    columns={
        "accuracy": "test accuracy, %",
        "lost": "points lost",
        "excess": "excess loss",
        "resident": "resident",
        "megabytes": "MB an epoch",
        "time": "step over memory's",
    },
    reduce=nodes,
    tiers=on_cpu(
        minutes=4.0,
        runs=variants(
            "marius/nodes",
            seeds=SEEDS,
            **{"memory": WHOLE, "base": PART, "quarter": QUARTER, "still": STILL},
            **{"alone": ALONE, "weak_memory": WEAK, "weak_quarter": WEAK_QUARTER},
        ),
        claims={
            "as memory": cell("lost", PART)
            .at_most(1.5, "points lost with 45 % resident")
            .fails({PART: ALONE}, {PART: WEAK_QUARTER}),
            "weak features lose": cell("lost", WEAK_QUARTER)
            .at_least(5.0, "points lost of weak features with a quarter resident")
            .fails({WEAK_QUARTER: WEAK}, {WEAK_QUARTER: QUARTER}),
            "less memory": cell("resident", PART)
            .at_most(0.45, "of features and edges are resident")
            .fails({PART: WHOLE}),
        },
    ),
)


DISK, MEMORY, LEFT = "COMET, disk", "COMET, memory", "COMET, leave first"
BETA, BETA_MEMORY, LRU = "BETA, disk", "BETA, memory", "rows by LRU"
WAITS, AHEAD, SPARE = "slow disk", "slow disk, 8 ahead", "slow disk, spare slots"
PACE = 0.1  # seconds of a step before a slow disk


def disk(rows: reduce.Rows) -> "xr.Dataset":
    """Returns what was learnt, in how far it is memory's, bytes, and time."""
    runs, found = {name: reduce.first(row) for name, row in rows.items()}, {}
    for name, run in runs.items():
        own = found[name] = {"resident": run["resident"]}
        peer = runs[BETA_MEMORY if name in (BETA, BETA_MEMORY) else MEMORY]
        wanted, losses = peer["loss"].values, run["loss"].values
        if len(losses) == len(wanted):
            own |= {"mrr": run["mrr"], "table": run["digest"] != peer["digest"]}
        if "memory" not in name:
            own["losses"] = np.sum(losses != wanted[: len(losses)])
            own["megabytes"] = run["bytes"] / 1e6
            own["off"] = abs(run["bytes"] - run["order_bytes"])
        if name.startswith(WAITS):
            own["ms"] = 1e3 * (run["waited"] + np.maximum(run["computed"], PACE))
    return reduce.from_cells(found)


DISKS = Table(
    id="marius/disk",
    title="A table of embeddings on disk, moved by partitions, against one in memory",
    paper=f"{PAPER}: from disk with the accuracy of memory; COMET and BETA",
    caption=(
        "DistMult as in marius/links, five epochs, one seed. On disk a table and "
        "Adagrad's sums are files of partitions, of which the cache has those of a "
        "state: resident, its rows over all. losses: steps whose loss is not that of "
        "the same order in memory, in any bit; table: 1 if these or the table at the "
        "end differ. MB: read and written; off: bytes by which these are not the first "
        "load and the swaps of the order as drawn, there and back. Leave first: a "
        "partition leaves before its last batch has updated it. By LRU: of a "
        "table in memory, the cache has as many rows, those used last. LRU's and those "
        "of a slow disk are one epoch; this is behind a token bucket of 16 MB/s each "
        "way, and a step lasts 100 ms. ms: of a step, with the wait for partitions. 8 "
        "ahead: so many come while a state is trained on; spare slots: room for them, "
        "and none come."
    ),
    shows=(
        "Embeddings of WordNet were trained from files, a quarter of them in memory. "
        "Further right is better where it is MRR, which from files must be that of "
        "memory; of bytes that are moved fewer are better."
    ),
    picture=Dots(("mrr", "megabytes")),
    columns={
        "mrr": "MRR",
        "resident": "resident",
        "losses": "losses",
        "table": "table",
        "megabytes": "MB",
        "off": "off, B",
        "ms": "ms a step",
    },
    reduce=disk,
    tiers=on_cpu(
        minutes=5.0,
        runs=variants(
            "marius/disk",
            **{"base": DISK, "comet_memory": MEMORY, "evict_first": LEFT},
            **{"beta": BETA, "beta_memory": BETA_MEMORY, "lru": LRU},
            **{"waits": WAITS, "ahead": AHEAD, "spare": SPARE},
        ),
        claims={
            "losses": most("losses", DISK, BETA, AHEAD)
            .at_most(0, "steps whose loss differs from memory's in any bit")
            .fails({DISK: LEFT}),
            "table": most("table", DISK, BETA)
            .at_most(0, "tables that differ from memory's in any bit")
            .fails({DISK: LEFT}),
            "bytes": most("off", DISK, BETA, AHEAD)
            .at_most(0, "bytes read and written beyond what the order says")
            .fails({DISK: LRU}),
            "a quarter": most("resident", DISK, BETA)
            .at_most(0.26, "of the rows are resident")
            .fails({DISK: MEMORY}),
            "ahead": over("ms", WAITS, AHEAD)
            .at_least(1.3, "times a step with the next partitions fetched ahead")
            .fails({AHEAD: SPARE}),
        },
    ),
)


FIFTH, SAMPLED, RESIDENT = "a fifth resident", "sampled_graph", "all resident"


def limited(rows: reduce.Rows) -> "xr.Dataset":
    """Returns what became of a process that may take half of its graph's bytes."""
    found = {}
    for name, row in rows.items():
        run = reduce.first(row)
        own = {key: run[key] for key in ("ended", "refused", "seconds", "waited")}
        own |= {key: run[key] / 1e6 for key in ("graph_bytes", "limit", "peak")}
        rows_alone = run["counted"] - run["edge_bytes"]
        for column, count in (("off", run["counted"]), ("off_rows", rows_alone)):
            # What was never read was not counted either.
            off = abs(count / run["told"] - 1) if run["told"] else np.inf
            own |= {column: 100 * off, "resident": run["resident"]}
        found[name] = {**own, "read": run["counted"] / 1e6}
    anon = [reduce.first(row)["anon"] for row in rows.values()]
    return reduce.from_cells(found).assign(
        anon=(("row", "moment"), [each.values for each in anon]),
        moment=anon[0]["moment"].values,
    )


LIMITED = Table(
    id="marius/memory",
    title="Training under a limit of memory that a graph does not fit in",
    paper=f"{PAPER}: in-memory accuracy with a fraction of the memory",
    caption=(
        "A drawn graph of 2 M vertices, 128 features each, made in pieces from hashes "
        "of numbers, and 20 M edges: MB of both. Processes of their own, which may "
        "take half of that, RLIMIT_DATA, above what they have after a warm-up on a "
        "small one. An epoch of GraphSAGE, 50,000 targets, five neighbours a layer. "
        "Resident: of features and edges, in buffers. MB read for training, by our "
        "count; off: by how many per cent it is not that of /proc/self/io, less what "
        "opening the files reads; rows alone: if edges were not counted. Peak: most of "
        "RssAnon above that of the start, MB. "
        "Sampled_graph has it all in memory, as all resident has it from files."
    ),
    shows=(
        "Processes trained on a graph twice as large as the memory that they may take. "
        "Lines that end below one have come through; the controls died of MemoryError."
    ),
    picture=Lines(
        "moment",
        "anon",
        label="RssAnon above the start / limit",
        x_label="per cent of the time up to the end",
        bound=1.0,
        log=False,
        log_x=False,
    ),
    columns={
        "ended": "ended",
        "refused": "MemoryError",
        "resident": "resident",
        "graph_bytes": "MB",
        "limit": "limit, MB",
        "peak": "peak, MB",
        "read": "read, MB",
        "off": "off, %",
        "off_rows": "rows alone off, %",
        "seconds": "s of steps",
        "waited": "of these waited",
    },
    reduce=limited,
    tiers=on_cpu(
        minutes=5.0,
        runs=variants("marius/memory", base=FIFTH, memory=SAMPLED, resident=RESIDENT),
        claims={
            "ends": cell("ended", FIFTH)
            .at_least(1, "it comes to its end")
            .fails({FIFTH: SAMPLED}, {FIFTH: RESIDENT}),
            "in memory dies": cell("refused", SAMPLED)
            .at_least(1, "the same config in memory ends with a MemoryError")
            .fails({SAMPLED: FIFTH}),
            "resident": cell("resident", FIFTH)
            .at_most(0.25, "of features and edges are in buffers")
            .fails({FIFTH: RESIDENT}),
            "counted": cell("off", FIFTH)
            .at_most(2, "per cent by which counted bytes are not the system's")
            .fails(columns={"off": "off_rows"}),
        },
    ),
)
