"""Tables of orders of partitions: what they do to a graph, and to what is learnt."""

from typing import TYPE_CHECKING

import numpy as np

from experiments.marius.policies import FILE, ROWS
from hpcjax.runs import reduce
from hpcjax.runs.pictures import Dots
from hpcjax.runs.reduce import Number, above, cell
from hpcjax.runs.tables import Runs, Table, by_model, on_cpu

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
    found["beta"]["gap"] = lost.mean() if lost.mean() > 3 * error else 0.0
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
