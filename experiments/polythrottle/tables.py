"""Tables of PolyThrottle: convergence, savings, honesty, and energy by batch."""

from typing import TYPE_CHECKING

import numpy as np

from experiments.polythrottle.convergence import NEAR
from hpcjax.runs import reduce
from hpcjax.runs.pictures import Bars, Dots
from hpcjax.runs.reduce import above, cell, least, most, of, over
from hpcjax.runs.tables import Runs, Table, on_cpu, on_gpu

if TYPE_CHECKING:
    import xarray as xr

_PAPER = "Yan, Wang, Venkataraman, arXiv 2310.19991"
_NAMES = {
    "constrained": "constrained search",
    "random": "random",
    "GPU clock": "GPU clock alone",
    "penalty": "penalty",
    "unconstrained": "no feasibility factor",
}
_SCALED = "constrained search, scaled"
_DEVICES = ("tx2", "orin")


def convergence(rows: reduce.Rows) -> "xr.Dataset":
    """Returns a row for each strategy over all cases of both devices."""
    found = {name: reduce.first(row) for name, row in rows.items()}
    cells: dict[str, reduce.Cells] = {}
    for strategy, name in _NAMES.items():
        cells[name] = _describe([found[each] for each in _DEVICES], strategy)
    scaled = [found[f"{each} scaled"] for each in _DEVICES]
    cells[_SCALED] = _describe(scaled, "constrained")
    cells["random, scaled"] = _describe(scaled, "random")
    return reduce.from_cells(cells)


def _describe(runs: list["xr.Dataset"], strategy: str) -> reduce.Cells:
    own = [run.sel(strategy=strategy) for run in runs]

    def join(column: str) -> np.ndarray:
        return np.concatenate([each[column].values.ravel() for each in own])

    excess, feasible = join("excess"), join("feasible") == 1
    curve = np.concatenate(
        [each["best"].values.reshape(-1, each.sizes["trial"]) for each in own]
    )
    # The first quartile, median and third of all searches after each trial.
    low, middle, high = np.quantile(
        curve[:, curve.shape[1] * 2 // 3 - 1], [0.25, 0.5, 0.75]
    )
    return {
        "near": float(np.mean((excess <= NEAR) & feasible)),
        "excess": 100 * float(np.median(excess)),
        "feasible": float(feasible.mean()),
        "breaking": float(join("breaking").mean()),
        "ten": 100 * middle,
        "ten_low": 100 * low,
        "ten_high": 100 * high,
    }


CONVERGENCE = Table(
    id="polythrottle/convergence",
    title="Clocks and batches found in 15 trials, on simulated devices",
    paper=f"{_PAPER}: near-optimal settings in 10 to 20 trials that meet constraints",
    caption=(
        "Simulated: two devices of 13 GPU and 7 memory clocks, batches 1 to 32, noise "
        "of 2 % and 2 % outliers; four networks, objectives of 1.5, 2 and 3 times the "
        "latency of one query at the greatest clocks, three seeds. near: share within "
        "5 % of the grid's least energy and truly within 3 % of the objective. excess: "
        "median over that least; after 10 trials with quartiles. breaking: trials of "
        "15 beyond the objective. Penalty: the value times the fourth power of how far "
        "it is beyond. GPU clock alone: all 13 of them. Scaled: every constant of the "
        "devices between half and twice its own, two draws."
    ),
    shows=(
        "Searches looked for the clocks of least energy in 15 trials. Right of the "
        "line most of them end within 5 % of the best."
    ),
    picture=Dots(
        "near",
        bound="near",
        sort=True,
        label="of searches within 5 % of the least energy",
    ),
    columns={
        "near": "near",
        "excess": "excess, %",
        "ten": "after 10 trials, %",
        "feasible": "feasible",
        "breaking": "breaking",
    },
    reduce=convergence,
    tiers=on_cpu(
        minutes=3.0,
        runs={
            **{d: Runs(config=f"polythrottle/convergence:{d}") for d in _DEVICES},
            **{
                f"{d} scaled": Runs(config=f"polythrottle/convergence:{d}_scaled")
                for d in _DEVICES
            },
        },
        claims={
            "near": cell("near", "constrained search")
            .at_least(0.85, "of searches end within 5 % of the least energy")
            .fails({"constrained search": "penalty"}),
            "above random": above("near", "constrained search", "random")
            .at_least(0.40, "more of them than with random points")
            .fails({"constrained search": "random"}),
            "breaking": over("breaking", "constrained search", "random")
            .at_most(0.99, "of random points' trials beyond the objective")
            .fails({"constrained search": "no feasibility factor"}),
            "factor": over("breaking", "no feasibility factor", "constrained search")
            .at_least(1.2, "times as many without the factor of feasibility")
            .fails({"no feasibility factor": "constrained search"}),
            "scaled": cell("near", _SCALED)
            .at_least(0.80, "of searches, on devices of drawn constants")
            .fails({_SCALED: "random, scaled"}),
        },
    ),
)


def savings(rows: reduce.Rows) -> "xr.Dataset":
    """Returns a row for each network on each device."""
    cells: dict[str, reduce.Cells] = {}
    for device, row in rows.items():
        run = reduce.first(row)
        for model in run["model"].values.tolist():
            own = run.sel(model=model)
            one, last = own.sel(batch=1), own.isel(batch=min(4, own.sizes["batch"] - 1))
            inside = (one["gpu_place"] > 0) & (one["gpu_place"] < 1)
            lone = (one["race"] > 0) & (one["race"] < 1)
            cells[f"{model}, {device}"] = {
                "fixed": one["fixed"],
                "fixed_16": last["fixed"],
                "joint": own["joint"],
                "joint_batch": own["joint_batch"],
                "gpu": 100 * one["gpu_place"],
                "mem": 100 * one["mem_place"],
                "mem_16": 100 * last["mem_place"],
                "inside": inside.astype(float),
                "lone": lone.astype(float),
                "moved": 100 * abs(last["mem_place"] - one["mem_place"]),
                "none": 0.0,
            }
    return reduce.from_cells(cells)


def _count(column: str, bound: float) -> reduce.Number:
    return of(column).then(lambda values: np.sum(values >= bound))


SAVINGS = Table(
    id="polythrottle/savings",
    title="Energy a query that the best clocks save, on simulated devices",
    paper=f"{_PAPER}: up to 36 % of energy is saved; no table holds the best clocks",
    caption=(
        "Simulated, without noise. Percent saved over the greatest clocks, within 1.5 "
        "times their latency: with one query or 16 in a batch; jointly, with the best "
        "batch against one query, which is what batching saves, too. Places of the "
        "best clocks without an objective, 0 the least and 100 the greatest; the "
        "batch of 16 has others. memory moved: between the two."
    ),
    shows=(
        "Clocks and batch sizes of simulated devices were chosen for least energy. "
        "Longer saves more: choosing both against the clocks alone."
    ),
    picture=Bars(
        ("fixed", "fixed_16", "joint"), by=", ", label="energy a query saved, %"
    ),
    columns={
        "fixed": "at batch 1, %",
        "fixed_16": "at batch 16, %",
        "joint": "jointly, %",
        "joint_batch": "its batch",
        "gpu": "GPU clock",
        "mem": "memory clock",
        "mem_16": "at batch 16",
        "moved": "memory moved",
        "inside": "GPU inside",
        "lone": "inside, GPU's watts alone",
    },
    reduce=savings,
    tiers=on_cpu(
        minutes=0.5,
        runs={d: Runs(config=f"polythrottle/savings:{d}") for d in _DEVICES},
        claims={
            "fixed": _count("fixed", 10)
            .at_least(6, "of 8 pairs save 10 % or more at a batch of one")
            .fails(columns={"fixed": "none"}),
            "jointly": _count("joint", 28)
            .at_least(4, "of 8 pairs save 28 % or more with the batch chosen, too")
            .fails(columns={"joint": "fixed"}),
            "inside": least("inside")
            .at_least(1, "the best GPU clock is not an end of its range")
            .fails(columns={"inside": "lone"}),
            "moved": most("moved")
            .at_least(10, "percent of its range between the memory's best clocks")
            .fails(columns={"moved": "none"}),
        },
    ),
)


def honesty(rows: reduce.Rows) -> "xr.Dataset":
    """Returns a row for all choices, and one for each half of the traces."""
    runs = [reduce.first(row) for row in rows.values()]
    kept = {
        name: 100 * float(np.concatenate([run[name].values for run in runs]).mean())
        for name in ("guarded", "unguarded")
    }
    cells: dict[str, reduce.Cells] = {
        "choices": {**kept, "gained": kept["guarded"] - kept["unguarded"], "none": 0.0}
    }
    trace = runs[0]
    for half in ("early", "late"):
        own = trace.sel(half=half)
        names = ("admitted", "p95", "always_admitted", "always_p95")
        cells[f"trace, {half}"] = {name: own[name] for name in names}
    return reduce.from_cells(cells)


HONESTY = Table(
    id="polythrottle/honesty",
    title="Whether chosen clocks keep their objective, and training beside inference",
    paper=f"{_PAPER}, sections 5 and 6: constraints are met, training fits in between",
    caption=(
        "Simulated. Choices of two devices, four networks, objectives of 1.25, 1.5 and "
        "2 times the p95 at the greatest clocks: percent whose p95 over 200 fresh "
        "queries keeps the objective, with the guard of the last measurement and "
        "without; who chooses nothing keeps none. Trace: 60 s, batches of 8 for BERT "
        "on the TX2-like device, an objective of 250 ms and from 30 s on of 700: "
        "training steps admitted, p95 over the objective, and the same if all are "
        "admitted."
    ),
    shows=(
        "Clocks were chosen while the load changed, with and without a guard. Left of "
        "the line the slowest answers keep their objective."
    ),
    picture=Bars(
        ("p95", "always_p95"),
        rows="trace",
        label="p95 latency / the objective",
        bound="served",
    ),
    columns={
        "guarded": "guarded, %",
        "unguarded": "unguarded, %",
        "gained": "gained",
        "admitted": "admitted",
        "p95": "p95",
        "always_admitted": "all admitted",
        "always_p95": "p95 then",
    },
    reduce=honesty,
    tiers=on_cpu(
        minutes=5.0,
        runs={d: Runs(config=f"polythrottle/honesty:{d}") for d in _DEVICES},
        claims={
            "guarded": cell("guarded", "choices")
            .at_least(95, "percent of guarded choices keep the objective afresh")
            .fails(columns={"guarded": "unguarded"}),
            "guard": cell("gained", "choices")
            .at_least(5, "points fewer do without the guard")
            .fails(columns={"gained": "none"}),
            "early": cell("admitted", "trace, early")
            .at_most(0, "training steps while the objective allows none")
            .fails(columns={"admitted": "always_admitted"}),
            "late": cell("admitted", "trace, late")
            .at_least(1, "training steps once it does")
            .fails({"trace, late": "trace, early"}),
            "served": most("p95", "trace")
            .at_most(1.0, "of the objective, the p95 of the worse half")
            .fails(columns={"p95": "always_p95"}),
        },
    ),
)


def batch(rows: reduce.Rows) -> "xr.Dataset":
    """Returns a row for each batch, and its energy over that of one query."""
    cells: dict[str, reduce.Cells] = {}
    for name, row in rows.items():
        run = reduce.first(row)
        alone = run["joules"].sel(batch=1)
        for size in run["batch"].values.tolist():
            own = run.sel(batch=size)
            cells[f"{name}, {size}"] = {
                **reduce.interval(own["joules"], "joules"),
                **reduce.interval(own["joules"] / alone, "ratio"),
                "p95": 1e3 * own["p95"].median(),
                "idle": own["idle_watts"].median(),
            }
    return reduce.from_cells(cells)


BATCH = Table(
    id="polythrottle/batch",
    title="Energy a query by batch, measured on a GPU whose clocks are left alone",
    paper=f"{_PAPER}: the batch is a knob of energy",
    caption=(
        "Measured by the GPU's own counter, idle power included, in bfloat16: medians "
        "of five stretches of 2 s, in turns, with 95 % intervals. Batching saves this, "
        "not clocks."
    ),
    columns={
        "joules": "J a query",
        "ratio": "/ that of one",
        "p95": "p95 of a batch, ms",
        "idle": "idle, W",
    },
    reduce=batch,
    tiers=on_gpu(
        minutes=4.0,
        runs={
            name: Runs(config="polythrottle/batch", overrides={"model": name})
            for name in ("resnet50", "bert_base")
        },
        claims={
            "batching": most("ratio", ", 32")
            .at_most(0.5, "of one query's energy, in a batch of 32")
            .fails({"resnet50, 32": "resnet50, 1"}),
        },
    ),
)
