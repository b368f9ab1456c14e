"""The table of Bagpipe: what look-ahead fetches, keeps and waits for."""

from typing import TYPE_CHECKING

import numpy as np

from experiments.bagpipe import lookahead
from experiments.bagpipe.streams import ORDERS
from hpcjax.runs.claims import Trivial
from hpcjax.runs.pictures import Dots
from hpcjax.runs.reduce import cell, differs, most, over
from hpcjax.runs.tables import Runs, Table, on_cpu, variants

if TYPE_CHECKING:
    import xarray as xr

OURS, WHOLE = "look-ahead 16", "whole table"
NONE, HOT, LRU = "no cache", "static hot", "LRU"
HOT1, HOT2, LRU1, LRU2 = (f"{peer}, {n} ahead" for peer in (HOT, LRU) for n in (1, 2))
NEAR, SHORT, FAR, EARLY = "look-ahead 1", "look-ahead 4", "look-ahead 32", "evict first"
PLANNED, FIRST, SHORTER = (f"integers, {order}" for order in ORDERS)
SLOW, DISTANT = "3 MB/s: ", "100 ms: "


def _time_step(run: "xr.Dataset") -> "xr.DataArray":
    """Returns the milliseconds of a step and of the wait for its rows."""
    return 1e3 * (run["waited"] + np.maximum(run["computed"], lookahead.Config.pace))


def _behind(link: str, **overrides: str) -> dict[str, Runs]:
    """Returns rows of what prefetches, behind another link."""
    names = {"base": OURS, "static_hot_1": HOT1, "lru_1": LRU1, "lru_2": LRU2}
    given = {f"state.{key}": text for key, text in overrides.items()}
    return {
        link + name: Runs(config=f"bagpipe/lookahead:{variant}", overrides=given)
        for variant, name in names.items()
    }


LOOKAHEAD = Table(
    id="bagpipe/lookahead",
    title="Bagpipe: a table behind a slow link, by what its cache holds",
    paper=(
        "Agarwal et al., SOSP 2023: iterations up to 5.6 times faster than those of "
        "the baselines, of models and on clusters that no run here has"
    ),
    caption=(
        "DLRM, 26 tables of 20,000 rows of 48, batches of 256, 1 % of the rows have "
        "92 % of the look-ups; row-wise Adagrad. The link to the store has 10 MB/s in "
        "each direction (80 Mbit/s) and 0.5 ms a request, which a token bucket holds "
        "back; other rows have one of 3 MB/s, or one of 100 ms a request of up to "
        "4,096 rows, which follow each other. A step lasts 60 ms, or as long as it "
        "computes; ms a step: these and the wait for rows; took: with planning, in "
        "Python, and what else was done on a busy machine. All caches but those of "
        "other look-aheads have the same rows; static hot knows which rows the run "
        "will use most; 1 ahead: it fetches the rows of the next batch while one is "
        "trained on. Means of steps 17 to 64 of 96: in the last 32, look-ahead has "
        "nothing to fetch any more. fetched: rows over "
        "the unique rows of all batches. MB: of a step, both directions. plan: of a "
        "batch. look-ahead 1 keeps a row for one batch, and waits for what the next "
        "misses. differs: 1 if losses or table are not those of the whole table, to "
        "the bit. wrong: share of 400 random streams of integers, with 1, 2 "
        "or 4 trainers whose sums come late, that end in another table than one "
        "trainer's. evict first: rows leave before the last batch has updated them; no "
        "extension: rows are not kept for the batch that they are fetched for."
    ),
    shows=(
        "A table of embeddings was put behind a slow link, with different caches "
        "before it. Further left is faster: compare caches that look ahead with those "
        "that fetch what they miss."
    ),
    picture=Dots("ms", rows=("table", "cache", "hot", "LRU", "ahead")),
    columns={
        "ms": ("ms a step", _time_step),
        "wait": ("wait, ms", lambda run: 1e3 * run["waited"]),
        "took": ("took, ms", lambda run: 1e3 * run["seconds"]),
        "computed": ("computed, ms", lambda run: 1e3 * run["computed"]),
        "fetched": "fetched",
        "rows": "rows",
        "megabytes": ("MB", lambda run: run["bytes"] / 1e6),
        "plan": ("plan, ms", lambda run: 1e3 * run["plan_seconds"]),
        "programs": ("programs", lambda run: run["compiled"]),
        "differs": ("differs", differs("digest", WHOLE)),
        "wrong": "wrong",
    },
    along="order",
    tiers=on_cpu(
        minutes=8.0,
        runs=variants(
            "bagpipe/lookahead",
            **{"whole": WHOLE, "no_cache": NONE, "static_hot": HOT, "lru": LRU},
            **{"static_hot_1": HOT1, "static_hot_2": HOT2},
            **{"lru_1": LRU1, "lru_2": LRU2},
            **{"near": NEAR, "short": SHORT, "base": OURS, "far": FAR},
            evict_first=EARLY,
        )
        | _behind(SLOW, rate="3e6")
        | _behind(DISTANT, latency="0.1", piece="4096")
        | variants("bagpipe/streams", base="integers"),
        trivial=Trivial(rows=(DISTANT + HOT1, DISTANT + LRU1, DISTANT + LRU2), by="ms"),
        claims={
            "no cache": over("ms", NONE, LRU)
            .at_least(2.0, "times a step of a cache that fetches what it misses")
            .fails({LRU: NEAR}),
            "prefetching": over("ms", LRU, LRU1)
            .at_least(1.2, "times a step with the next batch's rows fetched ahead")
            .fails({LRU1: NEAR}),
            "near link": over("ms", LRU1, OURS)
            .at_most(1.1, "times a step of look-ahead, with one batch fetched ahead")
            .fails({LRU1: LRU}),
            "distant link": over("ms", DISTANT + LRU2, DISTANT + OURS)
            .at_least(2.0, "times a step of look-ahead, where a request takes 100 ms")
            .fails(
                {DISTANT + OURS: DISTANT + LRU1},
                {DISTANT + OURS: DISTANT + LRU2},
                {DISTANT + OURS: DISTANT + HOT1},
            ),
            "equal": most("differs", NONE, HOT, LRU, NEAR, SHORT, OURS, FAR)
            .at_most(0, "caches whose losses or table differ in any bit")
            .fails({OURS: EARLY}),
            "programs": most("programs", OURS, LRU, HOT)
            .at_most(1, "programs that steps are compiled to")
            .fails(columns={"programs": "rows"}),
            "integers": cell("wrong", PLANNED)
            .at_most(0, "of the streams end in another table")
            .fails({PLANNED: FIRST}),
            "extension": cell("wrong", SHORTER)
            .at_least(0.5, "of the streams, where rows are kept no longer than told")
            .fails({SHORTER: PLANNED}),
        },
    ),
)
