"""Tables of NoPFS: real reading from a slow storage, and policies simulated."""

import xarray as xr

from hpcjax.runs import reduce
from hpcjax.runs.pictures import Dots, Lines
from hpcjax.runs.reduce import cell, most, over
from hpcjax.runs.tables import Runs, Table, on_cpu

NAIVE, AHEAD = "naive", "read ahead"
OURS, OWN = "clairvoyant", "own memory only"


def loading(rows: reduce.Rows) -> xr.Dataset:
    """Returns a row for each way of reading, beside what the simulator predicts."""
    table = reduce.by_run(rows)
    same = table["digest"].sel(row=NAIVE)
    ahead = table["predicted"].sel(row=AHEAD)
    return table.assign(
        apart=abs(table["predicted"] / table["seconds"] - 1),
        apart_ahead=abs(ahead / table["seconds"] - 1),
        differs=(table["digest"] != same).astype(float),
        reversed_differs=(table["digest_reversed"] != same).astype(float),
        idle=1 - table["processor"],
    )


LOADING = Table(
    id="nopfs/loading",
    title="NoPFS: time lost to input that comes from a slow storage",
    paper=(
        "Dryden et al., SC 2021: up to 5.4 times less time of training that waits for "
        "its input (abstract), on clusters and data sets that no run here has"
    ),
    caption=(
        "Four processes read 2,000 files of 100 kB, in a new order in each of 10 "
        "epochs, from a storage of 40 MB/s and 5 ms a request for all together, "
        "and sleep as long as training at 20 MB/s each would take, after each batch of "
        "40 for one another. Each reads at most 64 files ahead, and has memory for a "
        "fifth of all. lost: seconds of no training. reads: of the storage, over all "
        "reads. predicted: by `cost.simulate_input`. processor: share of "
        "both cores' time; above 0.8 times would be the processor's. own memory only: "
        "the same plan, but nobody asks for what another process keeps."
    ),
    picture=Lines("epoch", "epoch_seconds", label="seconds an epoch"),
    columns={
        "seconds": "s",
        "lost": "lost, s",
        "first_epoch": "epoch 1, s",
        "storage_reads": "reads",
        "predicted": "predicted, s",
        "predicted_reads": "predicted reads",
        "plan_seconds": "plan, s",
        "processor": "processor",
    },
    reduce=loading,
    tiers=on_cpu(
        minutes=5.0,
        runs={
            NAIVE: Runs(config="nopfs/loading:naive"),
            AHEAD: Runs(config="nopfs/loading:read_ahead"),
            OURS: Runs(config="nopfs/loading"),
            OWN: Runs(config="nopfs/loading:own_memory"),
        },
        claims={
            "lost": over("lost", OURS, AHEAD)
            .at_most(0.35, "of the seconds that reading ahead loses")
            .fails({OURS: OWN}),
            "total": over("seconds", OURS, AHEAD)
            .at_most(0.7, "of the seconds that reading ahead takes")
            .fails({OURS: NAIVE}),
            "first epoch": over("first_epoch", OURS, AHEAD)
            .at_most(1.1, "of reading ahead's seconds in the first epoch")
            .fails({OURS: NAIVE}),
            "reads": cell("storage_reads", OURS)
            .at_most(0.5, "reads of the storage over all reads")
            .fails({OURS: OWN}),
            "predicted": most("apart")
            .at_most(0.2, "farthest that a prediction is from the seconds")
            .fails(columns={"apart": "apart_ahead"}),
            "same batches": most("differs")
            .at_most(0, "rows whose batches are not those of naive reading, any byte")
            .fails(columns={"differs": "reversed_differs"}),
            "idle": most("processor")
            .at_most(0.8, "of the processor's time, so that times are the storage's")
            .fails(columns={"processor": "idle"}),
            "neighbours": over("lost", OWN, AHEAD)
            .at_least(0.4, "of reading ahead's loss without the memory of others")
            .fails({OWN: OURS}),
            "own reads": cell("storage_reads", OWN)
            .at_least(0.7, "reads of the storage over all without that memory")
            .fails({OWN: OURS}),
        },
    ),
)

_LARGEST = "in no memory"
_NAMES = {
    "read_ahead": AHEAD,
    "data_store": "data store",
    "by_number": "by number",
}


def policies(rows: reduce.Rows) -> xr.Dataset:
    """Returns a row for each policy of each memory."""
    run = reduce.single(rows)
    cells: dict[str, reduce.Cells] = {}
    for regime in run["regime"].values.tolist():
        own = run.sel(regime=regime)
        # Those that shuffle all data, as all here do, but the perfect one.
        best = float(own["seconds"].drop_sel(policy="perfect").min())
        for policy in run["policy"].values.tolist():
            found = own.sel(policy=policy)
            if found["seconds"].isnull():
                continue
            name = _NAMES.get(policy, policy)
            cells[f"{regime}, {name}"] = {
                "seconds": found["seconds"],
                "lost": found["lost"],
                "storage_reads": found["storage_reads"],
                "slower": found["seconds"] / best,
                "ideal": found["seconds"] / own["seconds"].sel(policy="perfect"),
            }
    return reduce.from_cells(cells)


POLICIES = Table(
    id="nopfs/policies",
    title="NoPFS: policies of reading, simulated for large and small memory",
    paper=(
        "Dryden et al., SC 2021, simulations of four regimes: the clairvoyant policy "
        "is near the perfect one in all of them"
    ),
    caption=(
        "1,000 records of 100 kB, 10 epochs, four workers that train at 20 MB/s each, "
        "a storage of 40 MB/s and 5 ms. A worker's RAM and SSD hold 1.2 and 0 of all "
        "data; 0.2 and 1; 0.05 and 0.25; 0.02 and 0.08. frequency, dedup and hybrid: "
        "the clairvoyant policy by who keeps what. by number: the control, all keep "
        "the same first records. A data store keeps everything after epoch 1, and "
        "needs room for that. slower: over the best policy's seconds."
    ),
    picture=Dots(
        "slower",
        by=", ",
        bound="no worse",
        log=True,
        label="seconds / the best policy's",
    ),
    columns={
        "seconds": "s",
        "lost": "lost, s",
        "storage_reads": "reads",
        "slower": "slower",
        "ideal": "/ perfect",
    },
    reduce=policies,
    tiers=on_cpu(
        minutes=0.5,
        runs={"all": Runs(config="nopfs/policies")},
        claims={
            "no worse": most("slower", "frequency")
            .at_most(1.02, "times the best policy's seconds, in the worst regime")
            .fails({f"{_LARGEST}, frequency": f"{_LARGEST}, {AHEAD}"}),
            "never perfect": reduce.least("ideal", "frequency", "dedup", "hybrid")
            .at_least(1.0, "times the perfect policy's seconds, in the best regime")
            .fails(columns={"ideal": "storage_reads"}),
            "largest": over("seconds", f"{_LARGEST}, frequency", f"{_LARGEST}, {AHEAD}")
            .at_most(0.9, "of reading ahead's seconds where no memory holds the data")
            .fails({f"{_LARGEST}, frequency": f"{_LARGEST}, {NAIVE}"}),
            "by frequency": over(
                "storage_reads", f"{_LARGEST}, frequency", f"{_LARGEST}, by number"
            )
            .at_most(0.8, "of the reads by number where no memory holds the data")
            .fails({f"{_LARGEST}, frequency": f"{_LARGEST}, by number"}),
        },
    ),
)
