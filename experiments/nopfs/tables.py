"""Tables of NoPFS: real reading from a slow storage, and policies simulated."""

from typing import TYPE_CHECKING

from hpcjax.runs.claims import Trivial
from hpcjax.runs.pictures import Dots
from hpcjax.runs.reduce import differs, least, most, over
from hpcjax.runs.tables import Table, on_cpu, variants

if TYPE_CHECKING:
    import xarray as xr

NAIVE, AHEAD, OWN = "naive", "read ahead", "own memory only"
PLANNED, OURS = "planned", "frequency"
SLOW, FIRST = "6 MB/s, planned", "6 MB/s, first touch"


def _name_kept(run: "xr.Dataset") -> str:
    """Returns the placement of a run; nothing if it keeps nothing."""
    kept = run["placement"].values[run["keeps"].values > 0]
    return str(kept[0]) if len(kept) else ""


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
        "fifth of all. 6 MB/s: of what leaves a process; links of others are as fast "
        "as the machine. planned: the simulator chooses who keeps what. "
        "lost: seconds of no training. reads: of the storage, over all "
        "reads. predicted: by `cost.simulate_input`. processor: share of "
        "both cores' time; above 0.8 times would be the processor's. own memory only: "
        "by frequency, but nobody asks for what another process keeps."
    ),
    shows=(
        "Training data were read from a slow storage by different plans. Further left "
        "loses less time waiting for input."
    ),
    picture=Dots("lost"),
    columns={
        "seconds": "s",
        "lost": "lost, s",
        "first_epoch": "epoch 1, s",
        "storage_reads": "reads",
        "keeps": ("keeps by", _name_kept),
        "predicted": "predicted, s",
        "predicted_reads": "predicted reads",
        "plan_seconds": "plan, s",
        "processor": "processor",
        "apart": ("", lambda run: abs(run["predicted"] / run["seconds"] - 1)),
        "apart_ahead": (
            "",
            lambda run, rows: abs(rows[AHEAD]["predicted"] / run["seconds"] - 1),
        ),
        "differs": ("", differs("digest", NAIVE)),
        "reversed_differs": (
            "",
            lambda run, rows: float(run["digest_reversed"] != rows[NAIVE]["digest"]),
        ),
        "idle": ("", lambda run: 1 - run["processor"]),
    },
    tiers=on_cpu(
        minutes=7.0,
        runs=variants(
            "nopfs/loading",
            slow_planned=SLOW,
            slow_first_touch=FIRST,
            naive=NAIVE,
            read_ahead=AHEAD,
            planned=PLANNED,
            base=OURS,
            own_memory=OWN,
        ),
        trivial=Trivial(rows=(FIRST, AHEAD), by="lost"),
        claims={
            "slow links": over("lost", SLOW, FIRST)
            .at_most(0.5, "of what keeping what is read first loses, by slow links")
            .fails({SLOW: FIRST}, {SLOW: AHEAD}),
            "fast links": over("storage_reads", PLANNED, OURS)
            .at_most(0.8, "of frequency's reads, by keeping what is read first")
            .fails({PLANNED: OURS}),
            "sharing": over("lost", PLANNED, AHEAD)
            .at_most(0.35, "of the seconds that reading ahead loses, by sharing")
            .fails({PLANNED: OWN}),
            "first epoch": over("first_epoch", PLANNED, AHEAD)
            .at_most(1.1, "of reading ahead's seconds in the first epoch")
            .fails({PLANNED: NAIVE}),
            "predicted": most("apart")
            .at_most(0.2, "farthest that a prediction is from the seconds")
            .fails(columns={"apart": "apart_ahead"}),
            "same batches": most("differs")
            .at_most(0, "rows whose batches are not those of naive reading, any byte")
            .fails(columns={"differs": "reversed_differs"}),
            "idle": most("processor")
            .at_most(0.8, "of the processor's time, so that times are the storage's")
            .fails(columns={"processor": "idle"}),
        },
    ),
)

LINKS, LARGEST = "slow links", "in no memory"


def _keeping(placement: str) -> dict[str, str]:
    """Returns rows that the simulator has chosen, and those of one placement."""
    return {f"{each}, auto": f"{each}, {placement}" for each in (LINKS, LARGEST)}


POLICIES = Table(
    id="nopfs/policies",
    title="NoPFS: policies of reading, simulated for large and small memory",
    paper=(
        "Dryden et al., SC 2021, simulations of four regimes: the clairvoyant policy "
        "is near the perfect one in all of them"
    ),
    caption=(
        "1,000 records of 100 kB, 10 epochs, four workers that train at 20 MB/s each, "
        "a storage of 40 MB/s and 5 ms. A worker's RAM and SSD hold 0.2 and 0 of all "
        "data, with links of 8 MB/s in and out; then, with 1 GB/s, 1.2 and 0; "
        "0.2 and 1; 0.05 and 0.25; 0.02 and 0.08. frequency, dedup, hybrid, first "
        "touch: the clairvoyant policy by who keeps what; auto: by the one that is "
        "simulated to be the fastest. A data store keeps everything after epoch 1, and "
        "needs room for that. slower: over the best policy's seconds."
    ),
    shows=(
        "Plans of reading were simulated for memory of several sizes. At 1 is the best "
        "plan: the planner's own choice, auto, should stay left of the line "
        "everywhere."
    ),
    picture=Dots(
        "slower",
        by=", ",
        bound="auto",
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
    along="policy",
    named=lambda name: name.replace("_", " "),
    tiers=on_cpu(
        minutes=0.5,
        runs=variants(
            "nopfs/policies",
            base=LINKS,
            ram="in RAM",
            ssd="in RAM and SSD",
            workers="in all workers",
            little=LARGEST,
        ),
        trivial=Trivial(
            rows=(f"{LINKS}, first touch", f"{LINKS}, read ahead"), by="seconds"
        ),
        claims={
            "auto": most("slower", "auto")
            .at_most(1.02, "times the best policy's seconds, in the worst regime")
            .fails(*map(_keeping, ("frequency", "dedup", "hybrid", "first touch"))),
            "frequency": over("seconds", f"{LINKS}, frequency", f"{LINKS}, first touch")
            .at_most(0.8, "of the seconds of keeping what is read first, by slow links")
            .fails(
                {f"{LINKS}, frequency": f"{LINKS}, first touch"},
                {f"{LINKS}, frequency": f"{LINKS}, read ahead"},
            ),
            "never perfect": least("ideal", "frequency", "dedup", "hybrid", "first")
            .at_least(1.0, "times the perfect policy's seconds, in the best regime")
            .fails(columns={"ideal": "storage_reads"}),
        },
    ),
)
