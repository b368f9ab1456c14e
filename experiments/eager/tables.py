"""eager-SGD's tables: throughput, latency of a round, loss under imbalance."""

from collections.abc import Callable, Mapping

import numpy as np
import xarray as xr

from hpcjax.perf.intervals import bootstrap_median
from hpcjax.runs.tables import Claim, Runs, Table, Tier
from hpcjax.runs.targets import first_at_most

PAPER = "eager-SGD, PPoPP 2020"
MODES = ("sync", "majority", "solo")
DELAYS = {
    "no delay": {"pattern": "none"},
    "one 200 ms": {"pattern": "random_one", "delay": "0.2"},
    "one 300 ms": {"pattern": "random_one", "delay": "0.3"},
    "one 400 ms": {"pattern": "random_one", "delay": "0.4"},
    "all 50 to 400 ms": {"pattern": "linear_skew", "delay": "0.05"},
}
# A mean over rounds of uniform ranks from 1 to 8: 100 rounds keep it within 3 sigma.
_ROUNDS = {"all 50 to 400 ms": {"steps": "100", "repetitions": "1"}}


def summary(values: xr.DataArray, name: str) -> dict[str, float]:
    """Returns the median as a column of that name, and its interval."""
    low, high = bootstrap_median(values.values)
    return {name: float(values.median()), f"{name}_low": low, f"{name}_high": high}


def table_of(found: Mapping[str, Mapping[str, float]]) -> xr.Dataset:
    """Returns a table from the columns of each row."""
    columns = next(iter(found.values()))
    return xr.Dataset(
        {name: ("row", [each[name] for each in found.values()]) for name in columns},
        coords={"row": list(found)},
    )


def _by_mode(
    rows: Mapping[str, xr.Dataset],
    figures: Callable[[xr.Dataset, str], Mapping[str, float]],
) -> xr.Dataset:
    """Returns a row for each run and mode, with what `figures` says of them."""
    found = {
        f"{name}, {mode}": figures(row.isel(seed=0, drop=True), mode)
        for name, row in rows.items()
        for mode in MODES
    }
    return table_of(found)


def throughput(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Returns medians over repetitions; speed-ups over the sync of the same turn."""

    def figures(run: xr.Dataset, mode: str) -> dict[str, float]:
        own, sync = run.sel(mode=mode), run.sel(mode="sync")
        seconds = float(own["total"].median())
        return {
            "seconds": seconds,
            **summary(sync["total"] / own["total"], "faster"),
            "foretold": float(sync["foretold"] / own["foretold"]),
            "model": float(own["foretold"]) / seconds,
            "fresh": float(own["fresh"].mean()),
            "contributors": float(own["contributors"].mean()),
            "staleness": float(own["staleness"].max()),
            "round": 1e3 * float(run["round"]),
            "ping": 1e3 * float(run["ping"]),
            "pong": 1e3 * float(run["pong"]),
        }

    return _by_mode(rows, figures)


def cell(column: str, row: str) -> Callable[[xr.Dataset], float]:
    """Returns what reads a cell of a table."""
    return lambda table: float(table[column].sel(row=row))


def _model_error(table: xr.Dataset) -> float:
    ratios = [table["model"].sel(row=f"one 200 ms, {mode}") for mode in MODES]
    return float(np.max(np.abs(np.array(ratios) - 1)))


SMALL = slice(0, 16_384)  # bytes of messages that take less time than the skew
_SKEWED = "all 50 to 400 ms, majority"
THROUGHPUT = Table(
    id="eager/throughput",
    title="Time of 8 processes' steps, some of them late, beside the event model",
    paper=(
        f"{PAPER}: solo 1.50, 1.75, 2.01 times as fast as sync at 200, 300, 400 ms "
        "[recalled]"
    ),
    caption=(
        "8 processes that sleep 20 ms a step, and as long as the delay says; gradients "
        "of 1 MB over sockets, 25 steps (100 where all are delayed), no limiter. "
        "Seconds until the last process has ended; medians of 3 runs in turns, "
        "speed-up over the sync of the same turn. Fresh: contributions that hold the "
        "round's own gradient. The event model is given the delays, the initiators and "
        "the measured time of a synchronous round."
    ),
    benchmark=True,
    columns={
        "seconds": "seconds",
        "faster": "faster than sync",
        "foretold": "foretold",
        "model": "model's seconds / measured",
        "fresh": "fresh",
        "contributors": "contributors",
        "staleness": "largest staleness",
        "round": "round, ms",
        "ping": "message, ms",
        "pong": "1 MB, ms",
    },
    reduce=throughput,
    tiers={
        "cpu": Tier(
            minutes=5.0,
            runs={
                name: Runs(
                    config="eager/throughput",
                    overrides={**overrides, **_ROUNDS.get(name, {})},
                )
                for name, overrides in DELAYS.items()
            },
            claims={
                "solo": Claim(
                    relation="solo is faster than sync, one process 200 ms late",
                    ours=cell("faster", "one 200 ms, solo"),
                    at_least=2.0,
                ),
                "majority": Claim(
                    relation="majority is faster than sync, one process 200 ms late",
                    ours=cell("faster", "one 200 ms, majority"),
                    at_least=1.4,
                ),
                "no delay": Claim(
                    relation="solo without delays, of sync's speed",
                    ours=cell("faster", "no delay, solo"),
                    at_least=0.8,
                ),
                "model": Claim(
                    relation="the event model's worst error, one process 200 ms late",
                    ours=_model_error,
                    at_most=0.2,
                ),
                "fresh least": Claim(
                    relation="fresh contributions to a majority's round, all delayed",
                    ours=cell("fresh", _SKEWED),
                    at_least=3.8,
                ),
                "fresh most": Claim(
                    relation="fresh contributions to a majority's round, all delayed",
                    ours=cell("fresh", _SKEWED),
                    at_most=5.7,
                ),
            },
        )
    },
)


def sleeper(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Returns the medians of the others' seconds, and what is left of their speed."""

    def figures(mode: str) -> dict[str, float]:
        awake, asleep = (
            rows[name]["others"].isel(seed=0, drop=True).sel(mode=mode)
            for name in _SLEEP
        )
        seconds = {
            f"{name}_seconds": float(values.median())
            for name, values in (("awake", awake), ("asleep", asleep))
        }
        return seconds | summary(awake.median() / asleep, "left")

    return table_of({mode: figures(mode) for mode in MODES})


_SLEEP = {"awake": {}, "asleep": {"asleep": "5.0"}}
SLEEPER = Table(
    id="eager/sleeper",
    title="Time of 3 processes' steps while a fourth sleeps for 5 s",
    paper=f"{PAPER}: solo rounds wait for nobody; no figure of this",
    caption=(
        "4 processes whose steps take 20 ms, 50 steps; the last one sleeps for 5 s in "
        "its first step. Until the three others have ended theirs, median of 3 runs. A "
        "majority's round waits where the one who sleeps was drawn to start it."
    ),
    benchmark=True,
    columns={
        "awake_seconds": "all awake, seconds",
        "asleep_seconds": "one asleep, seconds",
        "left": "speed left",
    },
    reduce=sleeper,
    tiers={
        "cpu": Tier(
            minutes=1.5,
            runs={
                name: Runs(
                    config="eager/throughput",
                    overrides={
                        "processes": "4",
                        "steps": "50",
                        "pattern": "none",
                        **more,
                    },
                )
                for name, more in _SLEEP.items()
            },
            claims={
                "solo": Claim(
                    relation="the others' speed in solo rounds while one sleeps",
                    ours=lambda table: float(table["left"].sel(row="solo")),
                    at_least=0.9,
                )
            },
        )
    },
)


def latency(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Returns a row for each size."""
    run = rows["all"].isel(seed=0, drop=True)
    columns = {"ping": 1e3 * run["ping"]}
    for mode in MODES:
        columns[mode] = 1e3 * run["latency"].sel(mode=mode, drop=True)
        columns[f"{mode} fresh"] = run["fresh"].sel(mode=mode, drop=True)
    return xr.Dataset(columns).rename(bytes="row")


def _worst(one: str, other: str) -> Callable[[xr.Dataset], float]:
    return lambda table: float((table[one] / table[other]).sel(row=SMALL).max())


LATENCY = Table(
    id="eager/latency",
    title="Mean time from arrival to result, 8 processes that arrive in turns",
    paper=f"{PAPER}: microbenchmark under linearly skewed arrival",
    caption=(
        "8 processes arrive 1 to 8 ms after a barrier, each first in turn; mean over "
        "64 rounds and all workers. More processes than cores: a hand-over between "
        "threads alone takes 0.1 to 1 ms. Message: half of there and back between two. "
        "Claims are about messages of up to 16 KiB; larger ones keep two cores busy "
        "for longer than the skew."
    ),
    benchmark=True,
    columns={
        **{mode: f"{mode}, ms" for mode in MODES},
        **{f"{mode} fresh": f"{mode}, fresh" for mode in MODES[1:]},
        "ping": "message, ms",
    },
    reduce=latency,
    tiers={
        "cpu": Tier(
            minutes=1.0,
            runs={"all": Runs(config="eager/latency")},
            claims={
                "solo": Claim(
                    relation="solo's latency over majority's, at the worst small size",
                    ours=_worst("solo", "majority"),
                    at_most=1.0,
                ),
                "majority": Claim(
                    relation="majority's latency over sync's, at the worst small size",
                    ours=_worst("majority", "sync"),
                    at_most=1.0,
                ),
                "fresh": Claim(
                    relation="fresh contributions to a solo round of 64 bytes",
                    ours=lambda table: float(table["solo fresh"][0]),
                    at_most=3.0,
                ),
            },
        )
    },
)


def hyperplane(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Compares, seed by seed, every mode with the sync of the same run."""
    found: dict[str, dict[str, float]] = {}
    for name, run in rows.items():
        sync = run.sel(mode="sync")
        target = 2 * sync["loss"].isel(step=-1)
        for mode in MODES:
            own = run.sel(mode=mode)
            steps = first_at_most(own["loss"], target, "step")
            there = _seconds_at(own["seconds"], steps)
            base = _seconds_at(
                sync["seconds"], first_at_most(sync["loss"], target, "step")
            )
            found[f"{name}, {mode}"] = {
                "loss": float(own["loss"].isel(step=-1).median()),
                **summary(own["loss"].isel(step=-1) / (target / 2), "over"),
                "seconds": float(own["total"].median()),
                **summary(there / base, "sooner"),
                "staleness": float(own["staleness"].median()),
            }
    return table_of(found)


def _seconds_at(seconds: xr.DataArray, steps: xr.DataArray) -> xr.DataArray:
    """Returns when a step was reached, inf for none."""
    reached = np.isfinite(steps)
    place = steps.where(reached, 0).astype(int)
    return seconds.isel(step=place).where(reached, np.inf)


def _spread(table: xr.Dataset) -> float:
    spread = table["staleness"]
    return float(spread.sel(row="all, solo") - spread.sel(row="all, majority"))


HYPERPLANE = Table(
    id="eager/hyperplane",
    title="A hyperplane learned by 8 processes, one of them 200 ms late in every step",
    paper=f"{PAPER}: hyperplane regression, one process of 8 delayed",
    caption=(
        "1,024 dimensions, 8,192 points, batch 512, 192 steps, 20 ms slept in each; "
        "every process has its own shard. Loss: half the expected squared error on new "
        "points, the noise's included, mean over the workers. Sooner: seconds to twice "
        "sync's final loss, over sync's. newest: late workers apply the newest result "
        "only, and parameters are averaged every 48 steps."
    ),
    benchmark=True,
    columns={
        "loss": "final loss",
        "over": "over sync's",
        "seconds": "seconds",
        "sooner": "time to the target / sync's",
        "staleness": "staleness, s.d.",
    },
    reduce=hyperplane,
    tiers={
        "cpu": Tier(
            minutes=12.0,
            runs={
                "all": Runs(config="eager/training", seeds=(0, 1, 2)),
                "newest": Runs(config="eager/training:newest", seeds=(0, 1, 2)),
            },
            claims={
                "loss": Claim(
                    relation="final loss of majority over sync's",
                    ours=cell("over", "all, majority"),
                    at_most=1.02,
                ),
                "sooner": Claim(
                    relation="majority's time to twice sync's final loss, of sync's",
                    ours=cell("sooner", "all, majority"),
                    at_most=1.0,
                ),
                "staleness": Claim(
                    relation="solo's spread of staleness beyond majority's, rounds",
                    ours=_spread,
                    at_least=0.0,
                ),
            },
        )
    },
)


def scaling(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Returns medians over runs of the model."""

    def figures(run: xr.Dataset, mode: str) -> dict[str, float]:
        own, sync = run.sel(mode=mode), run.sel(mode="sync")
        return {
            "seconds": float(own["total"].median()),
            **summary(sync["total"] / own["total"], "faster"),
            "fresh": float(own["fresh"].mean()),
        }

    return _by_mode(rows, figures)


SIZES = (8, 64, 1024)


def _majorities(table: xr.Dataset) -> float:
    shares = [
        float(table["fresh"].sel(row=f"P={p}, majority")) / ((p + 1) / 2) for p in SIZES
    ]
    return float(np.max(np.abs(np.array(shares) - 1)))


SCALING = Table(
    id="eager/scaling",
    title="Time of 200 steps, one process 200 ms late, by the event model alone",
    paper=f"{PAPER}: 64 processes on a cluster; here no process runs",
    caption=(
        "Simulated. Steps of 20 ms, log-normal by 0.1; gradients of 1 MB; 0.08 ms for "
        "a message and 0.3 s/GB, as between two processes of one machine. Medians of "
        "20 runs."
    ),
    columns={"seconds": "seconds", "faster": "faster than sync", "fresh": "fresh"},
    reduce=scaling,
    tiers={
        "model": Tier(
            minutes=0.5,
            runs={
                f"P={p}": Runs(config="eager/scaling", overrides={"processes": str(p)})
                for p in SIZES
            },
            claims={
                "solo": Claim(
                    relation="solo is faster than sync with 1024 processes",
                    ours=cell("faster", "P=1024, solo"),
                    at_least=2.0,
                ),
                "fresh": Claim(
                    relation="fresh contributions of majority, off (P + 1) / 2",
                    ours=_majorities,
                    at_most=0.05,
                ),
            },
        )
    },
)
