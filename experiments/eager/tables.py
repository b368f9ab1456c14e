"""eager-SGD's tables: throughput, latency of a round, loss under imbalance."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

import numpy as np

from experiments.eager.scaling import MODES
from hpcjax.runs import reduce
from hpcjax.runs.pictures import Dots, Lines, Scatter
from hpcjax.runs.reduce import Cells, above, cell, interval, of, over
from hpcjax.runs.tables import Runs, Table, by_model, grid, on_cpu
from hpcjax.runs.targets import first_at_most

if TYPE_CHECKING:
    import xarray as xr

PAPER = "eager-SGD, PPoPP 2020"
DELAYS = {
    "no delay": {"pattern": "none"},
    "one 200 ms": {"pattern": "random_one", "delay": "0.2"},
    "one 300 ms": {"pattern": "random_one", "delay": "0.3"},
    "one 400 ms": {"pattern": "random_one", "delay": "0.4"},
    # A mean over rounds of uniform ranks from 1 to 8: 100 keep it within 3 sigma.
    "all 50 to 400 ms": {
        "pattern": "linear_skew",
        "delay": "0.05",
        "steps": "100",
        "repetitions": "1",
    },
}


@reduce.along("mode")
def throughput(row: "xr.Dataset", mode: str) -> Cells:
    """Returns medians over repetitions; speed-ups over the sync of the same turn."""
    run = reduce.first(row)
    own, sync = run.sel(mode=mode), run.sel(mode="sync")
    seconds = float(own["total"].median())
    return {
        "seconds": seconds,
        **interval(sync["total"] / own["total"], "faster"),
        "foretold": sync["foretold"] / own["foretold"],
        "model": float(own["foretold"]) / seconds,
        "fresh": own["fresh"].mean(),
        "contributors": own["contributors"].mean(),
        "staleness": own["staleness"].max(),
        "round": 1e3 * float(run["round"]),
        "ping": 1e3 * float(run["ping"]),
        "pong": 1e3 * float(run["pong"]),
    }


SMALL = slice(0, 16_384)  # bytes of messages that take less time than the skew
_SKEWED = "all 50 to 400 ms, majority"
THROUGHPUT = Table(
    id="eager/throughput",
    title="Time of 8 processes' steps, some of them late, beside the event model",
    paper=f"{PAPER}: how much faster solo is than sync",
    recalled={
        "one 200 ms, solo": "1.50",
        "one 300 ms, solo": "1.75",
        "one 400 ms, solo": "2.01",
    },
    caption=(
        "8 processes that sleep 20 ms a step, and as long as the delay says; gradients "
        "of 1 MB over sockets, 25 steps (100 where all are delayed), no limiter. "
        "Seconds until the last process has ended; medians of 3 runs in turns, "
        "speed-up over the sync of the same turn. Fresh: contributions that hold the "
        "round's own gradient. The event model is given the delays, the initiators and "
        "the measured time of a synchronous round."
    ),
    benchmark=True,
    shows=(
        "Eight processes trained together while some of them came late. Right of the "
        "line a step is twice as fast as when all wait for the last one."
    ),
    picture=Dots("faster", by=", ", bound="solo", log=True),
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
    tiers=on_cpu(
        minutes=5.0,
        runs=grid("eager/throughput", DELAYS),
        claims={
            "solo": cell("faster", "one 200 ms, solo")
            .at_least(2.0, "solo is faster than sync, one process 200 ms late")
            .fails({"one 200 ms, solo": "one 200 ms, sync"}),
            "majority": cell("faster", "one 200 ms, majority")
            .at_least(1.4, "majority is faster than sync, one process 200 ms late")
            .fails({"one 200 ms, majority": "one 200 ms, sync"}),
            "no delay": over("seconds", "no delay, sync", "no delay, solo")
            .at_least(0.8, "solo without delays, of sync's speed")
            # As if solo's rounds took what a late process makes them take.
            .fails({"no delay, solo": "one 200 ms, solo"}),
            "model": abs(of("foretold", "one 200 ms") / of("faster", "one 200 ms") - 1)
            .largest()
            .at_most(
                0.2, "the foretold speed-up's worst error, one process 200 ms late"
            )
            # A model that knows of no delay.
            .fails(
                {f"one 200 ms, {mode}": f"no delay, {mode}" for mode in MODES},
                only=("foretold",),
            ),
            "fresh least": cell("fresh", _SKEWED)
            .at_least(3.8, "fresh contributions to a majority's round, all delayed")
            .fails({_SKEWED: "all 50 to 400 ms, solo"}),
            "fresh most": cell("fresh", _SKEWED)
            .at_most(5.7, "fresh contributions to a majority's round, all delayed")
            .fails({_SKEWED: "all 50 to 400 ms, sync"}),
        },
    ),
)


def sleeper(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns the medians of the others' seconds, and what is left of their speed."""

    def figures(mode: str) -> dict[str, float]:
        awake, asleep = (
            reduce.first(rows[name])["others"].sel(mode=mode) for name in _SLEEP
        )
        seconds = {
            f"{name}_seconds": float(values.median())
            for name, values in (("awake", awake), ("asleep", asleep))
        }
        return seconds | interval(awake.median() / asleep, "left")

    return reduce.from_cells({mode: figures(mode) for mode in MODES})


_FOUR = {"processes": "4", "steps": "50", "pattern": "none"}
_SLEEP = {"awake": _FOUR, "asleep": {**_FOUR, "asleep": "5.0"}}
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
    shows=(
        "Three processes trained on while a fourth slept. At 1 they lose no speed; "
        "those that wait for it are far left."
    ),
    picture=Dots("left", bound="solo", label="speed left while one sleeps"),
    columns={
        "awake_seconds": "all awake, seconds",
        "asleep_seconds": "one asleep, seconds",
        "left": "speed left",
    },
    reduce=sleeper,
    tiers=on_cpu(
        minutes=1.5,
        runs=grid("eager/throughput", _SLEEP),
        claims={
            "solo": cell("left", "solo")
            .at_least(0.9, "the others' speed in solo rounds while one sleeps")
            .fails({"solo": "sync"})
        },
    ),
)


def latency(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns a row for each size."""
    import xarray as xr

    run = reduce.single(rows)
    columns = {"ping": 1e3 * run["ping"]}
    for mode in MODES:
        columns[mode] = 1e3 * run["latency"].sel(mode=mode, drop=True)
        columns[f"{mode} fresh"] = run["fresh"].sel(mode=mode, drop=True)
    return xr.Dataset(columns).rename(bytes="row")


def _worst(one: str, other: str) -> reduce.Number:
    """Returns the largest ratio of two modes at small messages."""
    return reduce.Number(lambda t: (t[one] / t[other]).sel(row=SMALL).max(skipna=False))


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
    shows=(
        "Eight processes that arrive one after another exchanged messages. Lower is "
        "sooner: a solo round waits for nobody, a majority for about half, sync for "
        "all."
    ),
    picture=Lines(
        "{}",
        ("sync", "majority", "solo"),
        x_label="bytes",
        label="ms from arrival to result",
    ),
    columns={
        **{mode: f"{mode}, ms" for mode in MODES},
        **{f"{mode} fresh": f"{mode}, fresh" for mode in MODES[1:]},
        "ping": "message, ms",
    },
    reduce=latency,
    tiers=on_cpu(
        minutes=1.0,
        runs={"all": Runs(config="eager/latency")},
        claims={
            "solo": _worst("solo", "majority")
            .at_most(1.0, "solo's latency over majority's, at the worst small size")
            .fails(columns={"solo": "sync"}),
            "majority": _worst("majority", "sync")
            .at_most(0.95, "majority's latency over sync's, at the worst small size")
            .fails(columns={"majority": "sync"}),
            "fresh": of("solo fresh")
            .then(lambda fresh: fresh[0])
            .at_most(3.0, "fresh contributions to a solo round of 64 bytes")
            .fails(columns={"solo fresh": "majority fresh"}),
        },
    ),
)


@reduce.along("mode")
def hyperplane(run: "xr.Dataset", mode: str) -> Cells:
    """Compares, seed by seed, every mode with the sync of the same run."""
    own, sync = run.sel(mode=mode), run.sel(mode="sync")
    target = 2 * sync["loss"].isel(step=-1)
    there, base = (
        _seconds_at(each["seconds"], first_at_most(each["loss"], target, "step"))
        for each in (own, sync)
    )
    return {
        "loss": own["loss"].isel(step=-1).median(skipna=False),
        **interval(own["loss"].isel(step=-1) / (target / 2), "over"),
        "seconds": own["total"].median(),
        **interval(there / base, "sooner"),
        "staleness": own["staleness"].median(),
    }


def _seconds_at(seconds: "xr.DataArray", steps: "xr.DataArray") -> "xr.DataArray":
    """Returns when a step was reached, inf for none."""
    reached = np.isfinite(steps)
    place = steps.where(reached, 0).astype(int)
    return seconds.isel(step=place).where(reached, np.inf)


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
    shows=(
        "A linear model was learnt by eight processes, of which one was always late. "
        "Towards the lower left is better: sooner at the target, with no more loss "
        "than the line."
    ),
    picture=Scatter("sooner", "over", by=", ", bound="loss"),
    columns={
        "loss": "final loss",
        "over": "over sync's",
        "seconds": "seconds",
        "sooner": "time to the target / sync's",
        "staleness": "staleness, s.d.",
    },
    reduce=hyperplane,
    tiers=on_cpu(
        minutes=12.0,
        runs={
            "all": Runs(config="eager/training", seeds=(0, 1, 2)),
            "newest": Runs(config="eager/training:newest", seeds=(0, 1, 2)),
        },
        claims={
            "loss": cell("over", "all, majority")
            .at_most(1.02, "final loss of majority over sync's")
            .fails({"all, majority": "newest, solo"}),
            "sooner": cell("sooner", "all, majority")
            .at_most(0.8, "majority's time to twice sync's final loss, of sync's")
            .fails({"all, majority": "all, sync"}),
            "staleness": above("staleness", "all, solo", "all, majority")
            .at_least(1.0, "solo's spread of staleness beyond majority's, rounds")
            .fails({"all, solo": "all, majority"}),
        },
    ),
)


@reduce.along("mode")
def scaling(row: "xr.Dataset", mode: str) -> Cells:
    """Returns medians over runs of the model."""
    run = reduce.first(row)
    own, sync = run.sel(mode=mode), run.sel(mode="sync")
    return {
        "seconds": own["total"].median(),
        **interval(sync["total"] / own["total"], "faster"),
        "fresh": own["fresh"].mean(),
    }


SIZES = (8, 64, 1024)
_HALVES = np.array([(p + 1) / 2 for p in SIZES])


SCALING = Table(
    id="eager/scaling",
    title="Time of 200 steps, one process 200 ms late, by the event model alone",
    paper=f"{PAPER}: 64 processes on a cluster; here no process runs",
    caption=(
        "Simulated. Steps of 20 ms, log-normal by 0.1; gradients of 1 MB; 0.08 ms for "
        "a message and 0.3 s/GB, as between two processes of one machine. Medians of "
        "20 runs."
    ),
    shows=(
        "An event model played steps with one late process, on up to 1,024. The higher "
        "a line, the more it gains over waiting for all; the dashed one is claimed."
    ),
    picture=Lines("P={}", "faster", bound="solo", x_label="processes"),
    columns={"seconds": "seconds", "faster": "faster than sync", "fresh": "fresh"},
    reduce=scaling,
    tiers=by_model(
        minutes=0.5,
        runs=grid("eager/scaling", {f"P={p}": {"processes": str(p)} for p in SIZES}),
        claims={
            "solo": cell("faster", "P=1024, solo")
            .at_least(2.0, "solo is faster than sync with 1024 processes")
            .fails({"P=1024, solo": "P=1024, sync"}),
            "fresh": abs(of("fresh", "majority") / _HALVES - 1)
            .largest()
            .at_most(0.05, "fresh contributions of majority, off (P + 1) / 2")
            .fails({f"P={p}, majority": f"P={p}, solo" for p in SIZES}),
        },
    ),
)
