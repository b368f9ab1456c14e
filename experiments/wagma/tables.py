"""WAGMA-SGD's tables: throughput, drift of replicas, accuracy, many processes."""

from collections.abc import Callable, Mapping

import numpy as np
import xarray as xr

from experiments.eager.tables import cell, summary, table_of
from experiments.wagma.scaling import METHODS
from hpcjax.runs.tables import Claim, Runs, Table, Tier

PAPER = "WAGMA-SGD, TPDS 2021"
DELAYS = {
    "no delay": {"pattern": "none"},
    "one 200 ms": {"pattern": "random_one"},
    "all 50 to 400 ms": {"pattern": "linear_skew", "delay": "0.05"},
}


def _speed(run: xr.Dataset, algorithm: str) -> dict[str, float]:
    """Returns medians over repetitions; speed-ups over the same turn's allreduce."""
    own, base = (run["total"].sel(algorithm=name) for name in (algorithm, "allreduce"))
    return {"seconds": float(own.median()), **summary(base / own, "faster")}


def _over(column: str, row: str, base: str) -> Callable[[xr.Dataset], float]:
    return lambda table: float(table[column].sel(row=row) / table[column].sel(row=base))


def throughput(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Returns a row for each delay and algorithm."""
    found = {}
    for name, row in rows.items():
        run = row.isel(seed=0, drop=True)
        waiting = run["total"].sel(algorithm="waiting")
        for algorithm in METHODS:
            late = algorithm == "wagma"
            found[f"{name}, {algorithm}"] = {
                **_speed(run, algorithm),
                "waiting": float(
                    (waiting / run["total"].sel(algorithm=algorithm)).median()
                ),
                "late": float(run["late"].mean()) if late else np.nan,
                "staleness": float(run["staleness"].max()) if late else np.nan,
                "copy": 1e3 * float(run["copy"]),
            }
    return table_of(found)


def _least_over(others: tuple[str, ...]) -> Callable[[xr.Dataset], float]:
    """Returns how much faster WAGMA is than the fastest of others, 200 ms."""

    def ours(table: xr.Dataset) -> float:
        seconds = table["seconds"]
        best = min(float(seconds.sel(row=f"one 200 ms, {name}")) for name in others)
        return best / float(seconds.sel(row="one 200 ms, wagma"))

    return ours


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
    columns={
        "seconds": "seconds",
        "faster": "faster than allreduce",
        "waiting": "faster than waiting groups",
        "late": "late models",
        "staleness": "largest staleness",
        "copy": "copy, ms",
    },
    reduce=throughput,
    tiers={
        "cpu": Tier(
            minutes=8.0,
            runs={
                name: Runs(config="wagma/throughput", overrides=overrides)
                for name, overrides in DELAYS.items()
            },
            claims={
                "allreduce": Claim(
                    relation="WAGMA is faster than allreduce, one process 200 ms late",
                    ours=cell("faster", "one 200 ms, wagma"),
                    at_least=1.5,
                ),
                "waiting": Claim(
                    relation="WAGMA is faster than groups that wait, 200 ms",
                    ours=cell("waiting", "one 200 ms, wagma"),
                    at_least=1.15,
                ),
                "gossip": Claim(
                    relation="WAGMA over the best of SGP, D-PSGD and local SGD, 200 ms",
                    ours=_least_over(("sgp", "dpsgd", "local_sgd")),
                    at_least=1.0,
                ),
            },
        )
    },
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


def drift(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Returns medians over seeds."""
    half = next(iter(rows.values())).sizes["step"] // 2
    return table_of(
        {
            name: {
                "partial": float(run["partial"].median()),
                "error": float(run["error"].isel(step=slice(half, None)).mean()),
                "late": float(run["late"].mean()),
                "staleness": float(run["staleness"].max()),
                "total": float(run["total"].median()),
            }
            for name, run in rows.items()
        }
    )


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
    columns={
        "partial": "variance",
        "error": "error",
        "late": "late models",
        "staleness": "largest staleness",
        "total": "seconds, simulated",
    },
    reduce=drift,
    tiers={
        "cpu": Tier(
            minutes=2.0,
            runs={
                name: Runs(
                    config="wagma/quadratic", overrides=overrides, seeds=(0, 1, 2)
                )
                for name, overrides in VARIANTS.items()
            },
            claims={
                "fixed": Claim(
                    relation="variance without global sync, fixed over changing groups",
                    ours=_over("partial", "fixed, no global", "no global"),
                    at_least=10.0,
                ),
                "dynamic": Claim(
                    relation="variance of changing groups, without over with sync",
                    ours=_over("partial", "no global", "S=4"),
                    at_most=2.0,
                ),
                "fixed with sync": Claim(
                    relation="variance with global sync, fixed over changing groups",
                    ours=_over("partial", "fixed", "S=4"),
                    at_least=1.0,
                ),
                "time": Claim(
                    relation="seconds of waiting groups over wait-avoiding, simulated",
                    ours=_over("total", "S=4", "wait-avoiding"),
                    at_least=1.0,
                ),
                "error": Claim(
                    relation="error of wait-avoiding groups over that of waiting ones",
                    ours=_over("error", "wait-avoiding", "S=4"),
                    at_most=2.0,
                ),
            },
        )
    },
)

TRAINED = ("allreduce", "local_sgd", "dpsgd", "sgp", "eager", "wagma")


def accuracy(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Returns means over seeds, and the points below allreduce seed by seed."""
    base = rows["allreduce"]["accuracy"]
    return table_of(
        {
            name: {
                "accuracy": float(run["accuracy"].mean()),
                "least": float(run["accuracy"].min()),
                "below": float((base - run["accuracy"]).mean()),
                "alone": float(run["alone"].mean()),
            }
            for name, run in rows.items()
        }
    )


def _lead(row: str, base: str) -> Callable[[xr.Dataset], float]:
    return lambda table: float(
        table["accuracy"].sel(row=row) - table["accuracy"].sel(row=base)
    )


ACCURACY = Table(
    id="wagma/accuracy",
    title="Accuracy on digits after 300 steps of 8 workers",
    paper=f"{PAPER}: accuracy close to allreduce SGD's, gossip's lower; on ImageNet",
    caption=(
        "scikit-learn digits, a hidden layer of 64, batches of 16 a worker, S = 4, "
        "tau = 10 (also local SGD's period). Late workers of WAGMA and eager-SGD "
        "(solo) are replayed from the event model: 20 ms a step (log-normal, 0.1), one "
        "of them 200 ms late. AD-PSGD has no replay. 359 held-out images: one is 0.28 "
        "points."
    ),
    columns={
        "accuracy": "accuracy of the mean model, %",
        "least": "least",
        "below": "points below allreduce",
        "alone": "mean of the models' own, %",
    },
    reduce=accuracy,
    tiers={
        "cpu": Tier(
            minutes=2.0,
            runs={
                name: Runs(
                    config="wagma/digits", overrides={"method": name}, seeds=(0, 1, 2)
                )
                for name in TRAINED
            },
            claims={
                "allreduce": Claim(
                    relation="WAGMA's accuracy, points below allreduce's",
                    ours=cell("below", "wagma"),
                    at_most=1.0,
                ),
                "gossip": Claim(
                    relation="WAGMA's accuracy above D-PSGD's, points",
                    ours=_lead("wagma", "dpsgd"),
                    at_least=0.0,
                ),
            },
        )
    },
)

SIZES = {8: 4, 64: 8, 1024: 32}


def scaling(rows: Mapping[str, xr.Dataset]) -> xr.Dataset:
    """Returns medians over runs of the model."""
    found = {}
    for name, row in rows.items():
        run = row.isel(seed=0, drop=True)
        for algorithm in METHODS:
            words = float(run["words"].sel(algorithm=algorithm))
            found[f"{name}, {algorithm}"] = {**_speed(run, algorithm), "words": words}
    return table_of(found)


SCALING = Table(
    id="wagma/scaling",
    title="Time of 200 steps, one process 200 ms late, by the event model alone",
    paper=(
        f"{PAPER}: up to 1,024 GPUs, 2.33, 1.88 and 2.10 times local SGD, D-PSGD and "
        "SGP [recalled]; here no process runs"
    ),
    caption=(
        "Simulated. Steps of 20 ms, log-normal by 0.1; models of 1 MB; 0.08 ms for a "
        "message and 0.3 s/GB, as between two processes of one machine. S = 4, 8 and "
        "32, tau = 10. Medians of 20 runs. One late process of many seldom meets a "
        "neighbour: what the paper gains over gossip is not to be seen so."
    ),
    columns={
        "seconds": "seconds",
        "faster": "faster than allreduce",
        "words": "numbers sent in a step",
    },
    reduce=scaling,
    tiers={
        "model": Tier(
            minutes=0.5,
            runs={
                f"P={p}": Runs(
                    config="wagma/scaling",
                    overrides={"processes": str(p), "group_size": str(s)},
                )
                for p, s in SIZES.items()
            },
            claims={
                "allreduce": Claim(
                    relation="WAGMA is faster than allreduce with 1024 processes",
                    ours=cell("faster", "P=1024, wagma"),
                    at_least=1.5,
                ),
                "waiting": Claim(
                    relation="WAGMA is faster than groups that wait, 1024 processes",
                    ours=_over("faster", "P=1024, wagma", "P=1024, waiting"),
                    at_least=1.15,
                ),
                "volume": Claim(
                    relation="WAGMA's numbers sent, 8 processes, of allreduce's",
                    ours=_over("words", "P=8, wagma", "P=8, allreduce"),
                    at_most=1.25,
                ),
            },
        )
    },
)
