"""The table of Bagpipe: what look-ahead fetches, keeps and waits for."""

from experiments.bagpipe.streams import ORDERS
from hpcjax.runs.pictures import Dots
from hpcjax.runs.reduce import cell, differs, most, over
from hpcjax.runs.tables import Table, on_cpu, variants

OURS, WHOLE = "look-ahead 16", "whole table"
NONE, HOT, LRU = "no cache", "static hot", "LRU"
NEAR, SHORT, FAR, EARLY = "look-ahead 1", "look-ahead 4", "look-ahead 32", "evict first"
PLANNED, FIRST, SHORTER = (f"integers, {order}" for order in ORDERS)

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
        "back. A step lasts 60 ms, or as long as it computes. All caches but those of "
        "other look-aheads have the same rows; static hot knows which rows the run "
        "will use most. Means of 48 steps of 64. wait: for rows. fetched: rows over "
        "the unique rows of all batches. MB: of a step, both directions. plan: of a "
        "batch. differs: 1 if losses or table are not those of the whole "
        "table, to the bit. wrong: share of 400 random streams of integers, with 1, 2 "
        "or 4 trainers whose sums come late, that end in another table than one "
        "trainer's. evict first: rows leave before the last batch has updated them; no "
        "extension: rows are not kept for the batch that they are fetched for."
    ),
    picture=Dots("ms", rows=("table", "cache", "hot", "LRU", "ahead")),
    columns={
        "ms": ("ms a step", lambda run: 1e3 * run["seconds"]),
        "wait": ("wait, ms", lambda run: 1e3 * run["waited"]),
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
        minutes=5.0,
        runs=variants(
            "bagpipe/lookahead",
            **{"whole": WHOLE, "no_cache": NONE, "static_hot": HOT, "lru": LRU},
            **{"near": NEAR, "short": SHORT, "base": OURS, "far": FAR},
            evict_first=EARLY,
        )
        | variants("bagpipe/streams", base="integers"),
        claims={
            "no cache": over("ms", NONE, OURS)
            .at_least(2.0, "times a step of look-ahead")
            .fails({NONE: FAR}),
            "static hot": over("ms", HOT, OURS)
            .at_least(1.2, "times a step of look-ahead, with as many rows")
            .fails({HOT: EARLY}),
            "LRU": over("ms", LRU, OURS)
            .at_least(1.2, "times a step of look-ahead, with as many rows")
            .fails({LRU: EARLY}),
            "wait": over("wait", OURS, HOT)
            .at_most(0.1, "of the wait for rows that are not hot")
            .fails({OURS: NEAR}),
            "fetched": over("fetched", OURS, NEAR)
            .at_most(0.8, "of the rows that looking one batch ahead fetches")
            .fails({OURS: NONE}),
            "small": over("rows", NEAR, WHOLE)
            .at_most(0.02, "of the table in the cache that looks one batch ahead")
            .fails({NEAR: FAR}),
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
