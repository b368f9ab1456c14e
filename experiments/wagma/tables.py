"""WAGMA-SGD's tables: throughput, drift of replicas, accuracy, many processes."""

from collections.abc import Mapping
from typing import TYPE_CHECKING

from hpcjax.runs import reduce
from hpcjax.runs.pictures import Dots, Lines, Scatter
from hpcjax.runs.reduce import Cells, above, cell, interval, least, over
from hpcjax.runs.tables import Runs, Table, by_model, grid, on_cpu

if TYPE_CHECKING:
    import xarray as xr

PAPER = "WAGMA-SGD, TPDS 2021"
DELAYS = {
    "no delay": {"pattern": "none"},
    "one 200 ms": {"pattern": "random_one"},
    "all 50 to 400 ms": {"pattern": "linear_skew", "delay": "0.05"},
}


def _speed(run: "xr.Dataset", algorithm: str) -> dict[str, float]:
    """Returns medians over repetitions; speed-ups over the same turn's allreduce."""
    own, base = (run["total"].sel(algorithm=name) for name in (algorithm, "allreduce"))
    return {"seconds": float(own.median()), **interval(base / own, "faster")}


@reduce.along("algorithm")
def throughput(row: "xr.Dataset", algorithm: str) -> Cells:
    """Returns a row for each delay and algorithm."""
    run = reduce.first(row)
    total = run["total"]
    gained = total.sel(algorithm="waiting") / total.sel(algorithm=algorithm)
    found = {
        **_speed(run, algorithm),
        "waiting": gained.median(),
        "copy": 1e3 * float(run["copy"]),
    }
    if algorithm == "wagma":
        found["late"] = float(run["late"].mean())
        found["staleness"] = float(run["staleness"].max())
    return found


_WAITING = {"one 200 ms, wagma": "one 200 ms, waiting"}
_GOSSIP = [f"one 200 ms, {name}" for name in ("sgp", "dpsgd", "local_sgd")]
THROUGHPUT = Table(
    id="wagma/throughput",
    title="Time of 8 processes' steps, some of them late, with each algorithm",
    paper=(
        f"{PAPER}: 2.1 times the throughput of decentralised baselines on 1,024 GPUs; "
        "no figure for 8 processes"
    ),
    caption=(
        "8 processes that sleep 20 ms a step, and as long as the delay says; models of "
        "1 MB over sockets, 40 steps after 10 without sleep. S = 4, tau = 10; waiting: "
        "the same groups, all members waited for; eager: solo. Seconds until the last "
        "process has ended; medians of 3 runs in turns, speed-ups of the same turn. "
        "Copy: the model from the device and back, once a step in all of them."
    ),
    benchmark=True,
    shows=(
        "Eight processes averaged models while some came late. Right of the line they "
        "are faster than an all-reduce that waits by the claimed factor."
    ),
    picture=Dots("faster", by=", ", log=True, bound="allreduce"),
    columns={
        "seconds": "seconds",
        "faster": "faster than allreduce",
        "waiting": "faster than waiting groups",
        "late": "late models",
        "staleness": "largest staleness",
        "copy": "copy, ms",
    },
    reduce=throughput,
    tiers=on_cpu(
        minutes=8.0,
        runs=grid("wagma/throughput", DELAYS),
        claims={
            "allreduce": cell("faster", "one 200 ms, wagma")
            .at_least(1.5, "WAGMA is faster than allreduce, one process 200 ms late")
            .fails(_WAITING),
            "waiting": cell("waiting", "one 200 ms, wagma")
            .at_least(1.15, "WAGMA is faster than groups that wait, 200 ms")
            .fails(_WAITING),
            "gossip": (
                least("seconds", *_GOSSIP) / cell("seconds", "one 200 ms, wagma")
            )
            .at_least(1.0, "WAGMA over the best of SGP, D-PSGD and local SGD, 200 ms")
            .fails(_WAITING),
        },
    ),
)

VARIANTS = {
    "S=4": {},
    "S=2": {"group_size": "2"},
    "S=8": {"group_size": "8"},
    "fixed": {"groups": "fixed"},
    "no global": {"tau": "0"},
    "fixed, no global": {"groups": "fixed", "tau": "0"},
    "wait-avoiding": {"wait_avoiding": "true"},
    "wait-avoiding, no global": {"wait_avoiding": "true", "tau": "0"},
}


@reduce.by_row
def drift(run: "xr.Dataset") -> Cells:
    """Returns medians over seeds."""
    half = run.sizes["step"] // 2
    return {
        "partial": run["partial"].median(),
        "error": run["error"].isel(step=slice(half, None)).mean(),
        "late": run["late"].mean(),
        "staleness": run["staleness"].max(),
        "total": run["total"].median(),
    }


DRIFT = Table(
    id="wagma/drift",
    title="Variance over 8 replicas on noisy quadratics, by groups and waiting",
    paper=f"{PAPER}: ablations by group size, fixed groups, no global sync, waiting",
    caption=(
        "Replayed: f_i = |x - a_i|^2 / 2 with gradient noise of deviation 1, rate 0.1, "
        "400 steps, 50 dimensions, S = 4 and tau = 10 unless it says so; all wait for "
        "their groups unless it says so. Variance after the partial rounds among the "
        "last 10 steps, median of three seeds; error: of the mean of all, over the "
        "second half. Lateness and seconds are the event model's: 20 ms a step "
        "(log-normal, 0.1), one worker 200 ms late, rounds of no length."
    ),
    shows=(
        "Eight replicas averaged in groups on a noisy problem. Lower is closer "
        "together, further left is sooner: changing groups against fixed ones."
    ),
    picture=Scatter("total", "partial", log=True),
    columns={
        "partial": "variance",
        "error": "error",
        "late": "late models",
        "staleness": "largest staleness",
        "total": "seconds, simulated",
    },
    reduce=drift,
    tiers=on_cpu(
        minutes=2.0,
        runs=grid("wagma/quadratic", VARIANTS, seeds=(0, 1, 2)),
        claims={
            "fixed": over("partial", "fixed, no global", "no global")
            .at_least(10.0, "variance without global sync, fixed over changing groups")
            .fails({"fixed, no global": "no global"}),
            "dynamic": over("partial", "no global", "S=4")
            .at_most(2.0, "variance of changing groups, without over with sync")
            .fails({"no global": "fixed, no global"}),
            "fixed with sync": over("partial", "fixed", "S=4")
            .at_least(2.0, "variance with global sync, fixed over changing groups")
            .fails({"fixed": "S=4"}),
            "time": over("total", "S=4", "wait-avoiding")
            .at_least(1.3, "seconds of waiting groups over wait-avoiding, simulated")
            .fails({"wait-avoiding": "S=4"}),
        },
    ),
)

# The negative control.
NEVER = "never averaged"
TRAINED = ("allreduce", "local_sgd", "dpsgd", "sgp", "eager", "wagma")


def accuracy(rows: Mapping[str, "xr.Dataset"]) -> "xr.Dataset":
    """Returns means over seeds, and the points below allreduce seed by seed."""
    base = rows["allreduce"]["accuracy"]
    return reduce.from_cells(
        {
            name: {
                "accuracy": run["accuracy"].mean(skipna=False),
                "least": run["accuracy"].min(skipna=False),
                "below": (base - run["accuracy"]).mean(skipna=False),
                "alone": run["alone"].mean(skipna=False),
            }
            for name, run in rows.items()
        }
    )


ACCURACY = Table(
    id="wagma/accuracy",
    title="Accuracy on digits after 300 steps of 8 workers",
    paper=f"{PAPER}: accuracy close to allreduce SGD's, gossip's lower; on ImageNet",
    caption=(
        "scikit-learn digits, a hidden layer of 64, batches of 16 a worker drawn from "
        "all images, S = 4, "
        "tau = 10 (also local SGD's period). Late workers of WAGMA and eager-SGD "
        "(solo) are replayed from the event model: 20 ms a step (log-normal, 0.1), one "
        "of them 200 ms late. AD-PSGD has no replay. 359 held-out images: one is 0.28 "
        "points."
    ),
    shows=(
        "Digits were learnt by eight workers that average in different ways. Left of "
        "the line accuracy is within a point of the all-reduce's."
    ),
    picture=Dots("below", bound="allreduce"),
    columns={
        "accuracy": "accuracy of the mean model, %",
        "least": "least",
        "below": "points below allreduce",
        "alone": "mean of the models' own, %",
    },
    reduce=accuracy,
    tiers=on_cpu(
        minutes=2.0,
        devices=8,
        runs={
            **grid("wagma/digits:{0}", TRAINED, seeds=(0, 1, 2)),
            NEVER: Runs(
                config="wagma/digits:local_sgd",
                overrides={"averaging.period": "1000"},
                seeds=(0, 1, 2),
            ),
        },
        claims={
            "allreduce": cell("below", "wagma")
            .at_most(1.0, "WAGMA's accuracy, points below allreduce's")
            .fails({"wagma": NEVER}),
            "gossip": above("accuracy", "wagma", "dpsgd")
            .at_least(0.0, "WAGMA's accuracy above D-PSGD's, points")
            .fails({"wagma": NEVER}),
        },
    ),
)

SIZES = {8: 4, 64: 8, 1024: 32}


@reduce.along("algorithm")
def scaling(row: "xr.Dataset", algorithm: str) -> Cells:
    """Returns medians over runs of the model."""
    run = reduce.first(row)
    words = float(run["words"].sel(algorithm=algorithm))
    return {**_speed(run, algorithm), "words": words}


SCALING = Table(
    id="wagma/scaling",
    title="Time of 200 steps, one process 200 ms late, by the event model alone",
    paper=f"{PAPER}: up to 1,024 GPUs; here no process runs",
    recalled={
        "P=1024, local_sgd": "WAGMA 2.33 times as fast",
        "P=1024, dpsgd": "1.88 times",
        "P=1024, sgp": "2.10 times",
    },
    caption=(
        "Simulated. Steps of 20 ms, log-normal by 0.1; models of 1 MB; 0.08 ms for a "
        "message and 0.3 s/GB, as between two processes of one machine. S = 4, 8 and "
        "32, tau = 10. Medians of 20 runs. One late process of many seldom meets a "
        "neighbour: what the paper gains over gossip is not to be seen so."
    ),
    shows=(
        "An event model played steps with one late process, on up to 1,024. The higher "
        "a line, the more is gained over an all-reduce that waits."
    ),
    picture=Lines("P={}", "faster", log=True, bound="allreduce", x_label="processes"),
    columns={
        "seconds": "seconds",
        "faster": "faster than allreduce",
        "words": "numbers sent in a step",
    },
    reduce=scaling,
    tiers=by_model(
        minutes=0.5,
        runs=grid(
            "wagma/scaling",
            {
                f"P={p}": {"processes": str(p), "group_size": str(s)}
                for p, s in SIZES.items()
            },
        ),
        claims={
            "allreduce": cell("faster", "P=1024, wagma")
            .at_least(1.5, "WAGMA is faster than allreduce with 1024 processes")
            .fails({"P=1024, wagma": "P=1024, allreduce"}),
            "waiting": over("faster", "P=1024, wagma", "P=1024, waiting")
            .at_least(1.15, "WAGMA is faster than groups that wait, 1024 processes")
            .fails({"P=1024, wagma": "P=1024, waiting"}),
        },
    ),
)
